"""A flush by time: fsync of what a log held when it was due, in a thread, while the log is appended to.

``FlushJob.run`` works in a thread. The log learns of it back on the event loop (``LogDurability.flush_finished``) and
only then moves its recovery point. Whoever cuts the log or lets go of segments meanwhile cancels the job: what it has
done counts for nothing then, and files that it misses are no fault of the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparklog.errors import StorageError
from sparklog.storage.disk import Disk, sync_file


class FlushJob:
    """Made, cancelled and finished on the event loop, run once in any thread."""

    def __init__(
        self, disk: Disk, files: Sequence[Path], *, directory: Path, end_offset: int, records: int, since_us: int
    ) -> None:
        """``records``: of them were not flushed, the oldest since ``since_us``."""
        self.end_offset = end_offset
        self.records = records
        self.since_us = since_us
        self.cancelled = False
        self._disk = disk
        self._files = files
        self._directory = directory

    def run(self) -> None:
        """fsync the files, then the names.

        Raises:
            StorageError: the log directory must go offline.
        """
        try:
            for path in self._files:
                sync_file(self._disk, path)
            self._disk.sync_directory(self._directory)
            self._disk.sync_directory(self._directory.parent)
        except OSError as failure:
            # A disk that fails tells it once: cancelled or not, nobody else would hear of it.
            if not (self.cancelled and isinstance(failure, FileNotFoundError)):
                raise StorageError(f"flushing {self._directory}: {failure}") from failure
