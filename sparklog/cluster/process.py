"""Processes told apart for certain: a pid alone may be someone else's by the time it is used.

An identity is a pid with the start time the kernel noted, on one boot. Everything here works for processes that are
not our children, because an adopted broker is the child of nobody. Linux only: it reads /proc and uses pidfds.
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
    """One process, for ever."""

    pid: int
    #: Clock ticks after boot. Source: proc_pid_stat(5), field 22.
    start_time: int
    boot_id: str


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessIdentity | None:
    """The process that has ``pid`` now; None when there is none, or only its unreaped remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in brackets and may hold anything, brackets included.
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in {b"Z", b"X"}:
        return None
    return ProcessIdentity(pid, int(fields[19]), boot_id())


def is_alive(identity: ProcessIdentity) -> bool:
    return identify(identity.pid) == identity


def send_signal(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal exactly this process. False when it is gone.

    The pidfd is opened before the identity is compared: a pid reused in between would fail the comparison.
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
    """Return when the process has ended, whoever its parent is."""
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
    """Who listens at the other end of a connected Unix socket, told by the kernel and not by the peer."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _uid, _gid = struct.unpack("3i", raw)
    return identify(pid) if pid > 0 else None


def port_taken(host: str, port: int) -> bool:
    """Whether something listens on ``port`` of the address ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are still fading is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
        return False


def host_name() -> str:
    """A name by which other hosts may know this one: the full one, where the resolver knows more than loopback."""
    for name in (socket.getfqdn(), socket.gethostname()):
        if name.split(".")[0] == "localhost":
            continue
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            continue
        return name
    return "localhost"
