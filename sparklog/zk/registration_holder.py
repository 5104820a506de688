"""The process that holds a registration on this host: it has ended, or it lives and belongs to another broker.

A log directory's lock proves that no other process works in that directory. It proves nothing about a copy of the
directory, which has the same broker id: only the process itself does, identified by pid, pid namespace and start time.
"""

from __future__ import annotations

from pathlib import Path

from sparklog.model import BrokerRegistration


def pid_namespace() -> int:
    """Return the namespace of this process's pids, or 0 if the system does not report it.

    A container has its own, but the boot id of its host.
    """
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def start_time(pid: int) -> int:
    """Return when the process with this pid started, in clock ticks after boot.

    Returns 0 if there is none, or only a zombie. Source: proc_pid_stat(5), field 22.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # The command's name is in brackets and may contain anything, even brackets.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return 0 if fields[0] in {b"Z", b"X"} else int(fields[19])


def same_host(one: BrokerRegistration, other: BrokerRegistration) -> bool:
    return (one.host, one.boot_id) == (other.host, other.boot_id)


def is_over(held: BrokerRegistration, mine: BrokerRegistration) -> bool:
    """Return whether the process that registered ``held`` is the one that registers ``mine``, or has ended.

    Returns False also if this process cannot know: then the registration ends with its session.

    A release before the pid namespace was registered omits its identity. Its registration counts as over, as in that
    release itself.
    """
    if not same_host(held, mine):
        return False
    if not held.pid or not held.pid_namespace:
        return True
    if held.pid_namespace != mine.pid_namespace:
        return False
    if held.pid == mine.pid:
        return True  # Only one process at a time has a pid.
    started = start_time(held.pid)
    return not started or (held.start_time not in {0, started})
