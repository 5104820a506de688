"""The activity of this machine during a measurement: processor time of given processes and of unrelated programs."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sparklog.record import header

_TICKS = os.sysconf("SC_CLK_TCK")
#: The fields of /proc/<pid>/stat after the name with the user and system time of a process and of its ended children.
_PARENT, _WITH_ENDED = 1, slice(11, 15)
#: The process clock on Linux that counts the time that the scheduler gave the process, in nanoseconds.
_CLOCK_OF_SCHEDULER = 2


class CpuTime:
    """The processor time in seconds of some processes: ``with CpuTime(pids) as cpu: ...; cpu.seconds``."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self.seconds = 0.0

    def __enter__(self) -> CpuTime:
        self.seconds = -self._taken()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += self._taken()

    def _taken(self) -> float:
        return sum(map(_processor_s, self._pids))


class Others:
    """The average number of cores that unrelated programs use: ``with Others() as others: ...; others.cores``.

    The measured systems cannot use these cores. The loss may differ between the two systems.
    """

    cores = 0.0

    def __enter__(self) -> Others:
        self._began, self._before = time.perf_counter(), _busy_s() - _ours_s()
        return self

    def __exit__(self, *_: object) -> None:
        took = time.perf_counter() - self._began
        self.cores = max(0.0, (_busy_s() - _ours_s() - self._before) / took)


def _processor_s(pid: int) -> float:
    """Return the processor time of a process and its threads, ended ones included.

    /proc counts hundredths of a second, and an idle broker takes less in half a second. This clock is the one of the
    C library's ``clock_getcpuclockid``.
    """
    return time.clock_gettime((~pid << 3) | _CLOCK_OF_SCHEDULER)


def compiled() -> bool:
    """Return whether this process runs the compiled modules."""
    return not str(header.__file__).endswith(".py")


def describe() -> dict[str, Any]:
    """Return the description of the machine that measured the figures."""
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": platform.system(),
        "python": platform.python_version(),
        "compiled": compiled(),
    }


def _busy_s() -> float:
    """Return the busy time of all cores since the start of the machine, without waits for disks."""
    user, nice, system, _idle, _wait, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / _TICKS


def _ours_s() -> float:
    """Return the processor time of this process and its descendants, ended ones included."""
    children: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    for pid, fields in _processes():
        children.setdefault(int(fields[_PARENT]), []).append(pid)
        times[pid] = sum(map(int, fields[_WITH_ENDED])) / _TICKS
    total, left = 0.0, [os.getpid()]
    while left:
        pid = left.pop()
        total += times.get(pid, 0.0)
        left += children.get(pid, ())
    return total


def _processes() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), _fields(int(entry.name))
            except (OSError, IndexError):  # the process has just ended
                continue


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


if __name__ == "__main__" and not compiled():
    raise SystemExit("--compiled: the sources are what would be measured; it wants Python 3.11 or newer")
