"""A broker that measures the processor time of the longest turn of its event loop: ``python -m tests.broker.metered
--config file.json``.

It measures processor time and not elapsed time: on a busy machine any turn may last long. It counts all threads,
because the loop may wait for work in another thread.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Any

from sparklog.testing.process_cluster import ProcessCluster

_NUMBERS = struct.Struct("<qq")


def _file_of(config: Path) -> Path:
    return config.with_suffix(".longest-turn")


class LongestTurn:
    """Two numbers in a file that both processes map: the processor time in ns of the longest turn, for all threads
    and for the loop's thread alone."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_NUMBERS.size))
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), _NUMBERS.size)

    def read(self) -> tuple[int, int]:
        process, thread = _NUMBERS.unpack(self._mapped)
        return int(process), int(thread)

    def write(self, process: int, thread: int) -> None:
        self._mapped[:] = _NUMBERS.pack(process, thread)


class MeteredCluster(ProcessCluster):
    """A cluster of metered brokers."""

    def __init__(self, brokers: int = 1, **options: Any) -> None:
        super().__init__(brokers, **options)
        for slot in self.slots.values():
            slot.program = ("tests.broker.metered",)

    def longest_turn(self, broker_id: int) -> LongestTurn:
        return LongestTurn(_file_of(self.slots[broker_id].config_file))


class MeteredLoop(asyncio.SelectorEventLoop):
    """A selector that measures turns. A turn waits only for the selector, which uses no processor time."""

    longest: LongestTurn

    def _run_once(self) -> None:
        process, thread = time.process_time_ns(), time.thread_time_ns()
        super()._run_once()  # type: ignore[misc]
        process, thread = time.process_time_ns() - process, time.thread_time_ns() - thread
        longest_process, longest_thread = self.longest.read()
        if process > longest_process or thread > longest_thread:
            self.longest.write(max(process, longest_process), max(thread, longest_thread))


def main() -> int:
    from sparklog.broker import __main__ as broker

    MeteredLoop.longest = LongestTurn(_file_of(Path(sys.argv[sys.argv.index("--config") + 1])))
    vars(broker)["new_event_loop"] = MeteredLoop
    return broker.main()


if __name__ == "__main__":
    sys.exit(main())
