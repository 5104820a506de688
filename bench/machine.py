"""What this machine does while something is measured: processor time of some processes, and of all that is not ours."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sparklog.record import header

_TICKS = os.sysconf("SC_CLK_TCK")
#: Of the fields of /proc/<pid>/stat behind the name: user and system time, and those of children that have ended.
_PARENT, _WITH_ENDED = 1, slice(11, 15)
#: Of a process's clocks on Linux, the one that counts what the scheduler gave it, in nanoseconds.
_CLOCK_OF_SCHEDULER = 2


class CpuTime:
    """Seconds of processor time that some processes take: ``with CpuTime(pids) as cpu: ...; cpu.seconds``."""

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
    """How many cores programs took, on average, that this one did not start: ``with Others() as others: ...;
    others.cores``. What they take is missing to both systems, though not in equal parts."""

    cores = 0.0

    def __enter__(self) -> Others:
        self._began, self._before = time.perf_counter(), _busy_s() - _ours_s()
        return self

    def __exit__(self, *_: object) -> None:
        took = time.perf_counter() - self._began
        self.cores = max(0.0, (_busy_s() - _ours_s() - self._before) / took)


def _processor_s(pid: int) -> float:
    """Of a process and its threads, also those that have ended. /proc counts hundredths of a second, of which an idle
    broker takes none in half a second; this is the clock that the C library's ``clock_getcpuclockid`` names."""
    return time.clock_gettime((~pid << 3) | _CLOCK_OF_SCHEDULER)


def compiled() -> bool:
    """Whether a compiled install is what runs."""
    return not str(header.__file__).endswith(".py")


def describe() -> dict[str, Any]:
    """What figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": platform.system(),
        "python": platform.python_version(),
        "compiled": compiled(),
    }


def _busy_s() -> float:
    """Of all cores since the start of the machine; without waiting for disks."""
    user, nice, system, _idle, _wait, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / _TICKS


def _ours_s() -> float:
    """Of this process and everything below it, ended or not."""
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
            except (OSError, IndexError):  # it has ended meanwhile
                continue


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


if __name__ == "__main__" and not compiled():
    raise SystemExit("--compiled: the sources are what would be measured; it wants Python 3.11 or newer")
