"""A check whether the process that holds a broker's registration has ended, or is live and therefore another broker.

The lock of a log directory proves that no other process uses that directory. But a process may use a copy of the
directory, which has the same broker id. So this module checks the process itself, and identifies it by pid, pid
namespace and start time.
"""

from __future__ import annotations

from pathlib import Path

from sparklog.model import BrokerRegistration


def pid_namespace() -> int:
    """Return the id of this process's pid namespace, or 0 if the system does not report it.

    A container has its own pid namespace, but the same boot id as its host.
    """
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def start_time(pid: int) -> int:
    """Return when the process with this pid started, in clock ticks after boot.

    Return 0 if there is no such process or it is a zombie. Source: proc_pid_stat(5), field 22.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # The command's name is in parentheses and may itself contain parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return 0 if fields[0] in {b"Z", b"X"} else int(fields[19])


def same_host(one: BrokerRegistration, other: BrokerRegistration) -> bool:
    return (one.host, one.boot_id) == (other.host, other.boot_id)


def is_over(held: BrokerRegistration, mine: BrokerRegistration) -> bool:
    """Return whether the registration ``held`` is stale, so that this process may replace it with ``mine``.

    A registration is stale if the process that wrote it has ended, or is this process. Return False if this process
    cannot find out whether the other process has ended. The registration then disappears when its session expires.

    A registration that an earlier release wrote has no pid namespace. If it is from this host, the process is assumed
    to have ended.
    """
    if not same_host(held, mine):
        return False
    if not held.pid or not held.pid_namespace:
        return True
    if held.pid_namespace != mine.pid_namespace:
        return False
    if held.pid == mine.pid:
        return True  # A pid has only one process at a time.
    started = start_time(held.pid)
    return not started or (held.start_time not in {0, started})
