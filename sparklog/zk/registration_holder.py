"""Which process holds a registration on this host: whether it is over, or lives and is another broker's.

A log directory's lock proves that no other process works in that directory. It proves nothing about a copy of the
directory, which has the same broker id: only the process itself, told by pid, pid namespace and start time, does.
"""

from __future__ import annotations

from pathlib import Path

from sparklog.model import BrokerRegistration


def pid_namespace() -> int:
    """Which processes pids are numbered among here; a container has its own, with the boot id of its host. 0 where the
    system does not say."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def start_time(pid: int) -> int:
    """Return when the process with this pid started, in clock ticks after boot; 0 where there is none, or only its
    unreaped remains. Source: proc_pid_stat(5), field 22."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # The command's name stands in brackets and may hold anything, brackets included.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return 0 if fields[0] in {b"Z", b"X"} else int(fields[19])


def same_host(one: BrokerRegistration, other: BrokerRegistration) -> bool:
    return (one.host, one.boot_id) == (other.host, other.boot_id)


def is_over(held: BrokerRegistration, mine: BrokerRegistration) -> bool:
    """Return whether the process that registered ``held`` is the one that registers ``mine``, or has ended. False also
    where this process cannot tell: then the registration goes with its session.

    A release before the pid namespace was registered leaves out who it is; its registration counts as over, as that
    release itself would have it.
    """
    if not same_host(held, mine):
        return False
    if not held.pid or not held.pid_namespace:
        return True
    if held.pid_namespace != mine.pid_namespace:
        return False
    if held.pid == mine.pid:
        return True  # a pid has one process at a time
    started = start_time(held.pid)
    return not started or (held.start_time not in {0, started})
