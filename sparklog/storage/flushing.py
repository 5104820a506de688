"""A periodic flush: a thread fsyncs the records that a log has when the flush begins, while appends continue.

``FlushJob.run`` runs in a thread. Then ``LogDurability.flush_finished``, on the event loop, moves the log's recovery
point. If the log is truncated or segments are deleted in the meantime, the job is canceled. The fsyncs of a canceled
job do not move the recovery point, and a file that a canceled job does not find is not reported as a failure of the
disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparklog.errors import StorageError
from sparklog.storage.disk import Disk, sync_file


class FlushJob:
    """A job that fsyncs the files of one log.

    The event loop creates the job and may cancel it. Call ``run`` once, in any thread.
    """

    def __init__(
        self, disk: Disk, files: Sequence[Path], *, directory: Path, end_offset: int, records: int, since_us: int
    ) -> None:
        """Create the job.

        ``records`` is the number of records that are not fsynced. The oldest of them is not fsynced since ``since_us``.
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
        """Fsync the files, then the log's directory and its parent directory.

        Raises:
            StorageError: the log directory must go offline.
        """
        try:
            for path in self._files:
                sync_file(self._disk, path)
            self._disk.sync_directory(self._directory)
            self._disk.sync_directory(self._directory.parent)
        except OSError as failure:
            # A disk reports a failure only once. So raise it even if the job is cancelled: no other call gets it.
            if not (self.cancelled and isinstance(failure, FileNotFoundError)):
                raise StorageError(f"flushing {self._directory}: {failure}") from failure
