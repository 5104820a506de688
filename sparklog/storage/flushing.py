"""A periodic flush: a thread fsyncs the records that a log had when the flush was due, while appends continue.

``FlushJob.run`` works in a thread. The log handles the end on the event loop (``LogDurability.flush_finished``) and
only then moves its recovery point. Code that truncates the log or deletes segments in the meantime cancels the job. Its
fsyncs then do not count, and missing files are no failure of the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparklog.errors import StorageError
from sparklog.storage.disk import Disk, sync_file


class FlushJob:
    """One flush. Made, cancelled and finished on the event loop; run once in any thread."""

    def __init__(
        self, disk: Disk, files: Sequence[Path], *, directory: Path, end_offset: int, records: int, since_us: int
    ) -> None:
        """Create the job.

        ``records`` is the number of records without an fsync, the oldest of them since ``since_us``.
        """
        self.end_offset = end_offset
        self.records = records
        self.since_us = since_us
        self.cancelled = False
        self._disk = disk
        self._files = files
        self._directory = directory

    def cancel(self) -> None:
        """Cancel the job, because files that it fsyncs are about to be deleted or truncated."""
        self.cancelled = True

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
            # A disk reports a failure once. Even if cancelled, raise it: no other call would see it.
            if not (self.cancelled and isinstance(failure, FileNotFoundError)):
                raise StorageError(f"flushing {self._directory}: {failure}") from failure
