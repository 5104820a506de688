"""The reliable identification of processes. A pid alone is not enough.

After a process has ended, another process may get the same pid. An identity is a pid with the process's start time and
the boot id. All functions work for processes that are not children of this one, because an adopted broker is not a
child of its supervisor. Linux only: it reads /proc and uses pidfds.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import struct
from pathlib import Path

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True):
    """The identity of one process, which no other process ever has."""

    pid: int
    #: The start time in clock ticks after boot. Source: proc_pid_stat(5), field 22.
    start_time: int
    boot_id: str


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process that now has ``pid``. Return None if there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name is in parentheses and may contain anything, including parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in {b"Z", b"X"}:
        return None
    return ProcessIdentity(pid, int(fields[19]), boot_id())


def is_alive(identity: ProcessIdentity) -> bool:
    return identify(identity.pid) == identity


def send_signal(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Send a signal to exactly this process. Return False if the process has ended.

    The pidfd is opened before the identity is compared. So if another process has the pid by then, the comparison
    fails.
    """
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(identity):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


async def exited(identity: ProcessIdentity) -> None:
    """Wait until the process has ended. It may be any process, not only a child of this one."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    try:
        if not is_alive(identity):
            return
        loop.add_reader(descriptor, gone.set)
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def peer_of(connection: socket.socket) -> ProcessIdentity | None:
    """Return the process at the other end of a connected Unix socket, as reported by the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _uid, _gid = struct.unpack("3i", raw)
    return identify(pid) if pid > 0 else None


def port_taken(host: str, port: int) -> bool:
    """Return whether a process already uses ``port`` of the address ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Servers set this as well: a port whose connections are all in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
        return False


def host_name() -> str:
    """Return a name by which other hosts can reach this host.

    This is the fully qualified name or else the host name, whichever can be resolved first. If neither can, it is
    ``localhost``.
    """
    for name in (socket.getfqdn(), socket.gethostname()):
        if name.split(".")[0] == "localhost":
            continue
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            continue
        return name
    return "localhost"
