"""The slow part of a truncation: to copy and fsync the remaining part of the last segment.

``TruncationJob.run`` runs in a thread and does not change the log, so the log can be read meanwhile. Then the event
loop truncates the log (``Log.truncate``), and the copies replace the segment's files. The copied part of the segment
does not change until then. If the segment is removed from the log, or another truncation comes first, the copies are
deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path

from sparklog.errors import StorageError
from sparklog.storage.disk import is_full, sync_file
from sparklog.storage.segment import COPY_SUFFIX, Segment

#: The bytes that are copied and fsynced at a time. A cancelled job ends after the current part.
_PIECE_BYTES = 32 * 1024 * 1024
_numbers = itertools.count()


class TruncationJob:
    """A job that copies the remaining part of a segment for a truncation.

    The event loop creates the job, uses its copies and may cancel it. Call ``run`` once, in any thread.
    """

    def __init__(self, segment: Segment, count: int, *, frees_segments: bool = False) -> None:
        """Create the job. Raises OSError.

        ``count`` is the number of batches of the segment to keep. ``frees_segments`` means that the truncation will
        first remove other segments, which frees disk space.
        """
        self.segment = segment
        self.count = count
        #: Whether the copies exist and are durable.
        self.done = False
        #: Whether the disk was full, and the truncation itself would not free space first. If so, the truncation must
        #: begin again later. If the event loop made the copies now, it would fail too and take the log directory
        #: offline.
        self.awaits_room = False
        self.cancelled = False
        self._frees_segments = frees_segments
        self._disk = segment.disk
        number = next(_numbers)
        #: Each file, its copy, and the number of bytes to copy. No other job uses the same names: a cancelled job may
        #: still run when another job begins, for this segment or for a segment of a recreated topic.
        self._copies = [
            (path, path.with_name(f"{path.name}.{number}{COPY_SUFFIX}"), length)
            for path, length in segment.files_truncated_to(count)
        ]
        self._ends = threading.Lock()

    def run(self) -> None:
        """Copy the remaining part of the segment's files, and fsync the copies.

        ``done`` stays False if the job is canceled, if the files no longer exist, or if the disk is full.

        Raises:
            StorageError: the log directory must go offline.
        """
        try:
            if self._copied():
                with self._ends:
                    self.done = not self.cancelled
        except OSError as failure:
            # Ignore the failure of a cancelled job. The files may be deleted already, and the job has written no file
            # of the log.
            if not (self.cancelled or isinstance(failure, FileNotFoundError) or is_full(failure)):
                raise StorageError(f"copying {self.segment.data_path} to truncate it: {failure}") from failure
            self.awaits_room = is_full(failure) and not (self._frees_segments or self.cancelled)
        finally:
            if not self.done:
                for _, copy, _ in self._copies:
                    with contextlib.suppress(OSError):  # The next start removes a copy that remains.
                        self._disk.remove(copy)

    def _copied(self) -> bool:
        for path, copy, length in self._copies:
            for start in range(0, length, _PIECE_BYTES):
                if self.cancelled:
                    return False
                self._disk.copy(path, copy, min(start + _PIECE_BYTES, length), start=start)
                sync_file(self._disk, copy)
        return True

    def put_in_place(self) -> None:
        """Replace the segment's files by the copies.

        Call this once, only if ``done`` is True and the files are closed. Raises OSError.
        """
        for path, copy, _ in self._copies:
            self._disk.rename(copy, path)
        self._copies = []

    def cancel(self) -> list[Path]:
        """Cancel the job, because its copies are not needed. Return the copies that the caller must delete."""
        with self._ends:
            self.cancelled = True
            return [copy for _, copy, _ in self._copies] if self.done else []
