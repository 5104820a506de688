"""The slow part of a truncation: the remaining part of the segment is copied and fsynced.

``TruncationJob.run`` works in a thread and does not change the log, which is served until it is truncated on the event
loop (``Log.truncate``). There the copies replace the segment's files. The copied part of the segment cannot change
before that. If the segment leaves the log, or another truncation comes first, the copies are deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path

from sparklog.errors import StorageError
from sparklog.storage.disk import is_full, sync_file
from sparklog.storage.segment import COPY_SUFFIX, Segment

#: The bytes that are copied and fsynced at a time. A cancellation, perhaps by the end of the process, waits no longer.
_PIECE_BYTES = 32 * 1024 * 1024
_numbers = itertools.count()


class TruncationJob:
    """One copy for a truncation. Made, cancelled and used on the event loop; run once in any thread."""

    def __init__(self, segment: Segment, count: int, *, frees_segments: bool = False) -> None:
        """Create the job.

        Raises OSError.

        ``count`` is the number of batches of the segment to keep. ``frees_segments``: the truncation will first remove
        other segments, which frees space.
        """
        self.segment = segment
        self.count = count
        #: The copies exist and are durable.
        self.done = False
        #: The disk was full, and the truncation itself frees no space: it must begin again later. On the event loop the
        #: disk would be just as full, and a failed truncation takes the log directory offline.
        self.awaits_room = False
        self.cancelled = False
        self._frees_segments = frees_segments
        self._disk = segment.disk
        number = next(_numbers)
        #: Each file, its copy, and the number of bytes to copy. The names belong to this job alone. A cancelled job may
        #: still run when another one begins, for this segment or for that of a recreated topic.
        self._copies = [
            (path, path.with_name(f"{path.name}.{number}{COPY_SUFFIX}"), length)
            for path, length in segment.files_truncated_to(count)
        ]
        self._ends = threading.Lock()

    def run(self) -> None:
        """Make the copies.

        Return without ``done`` if cancelled, if the files have left the log, or if the disk is full.

        Raises:
            StorageError: the log directory must go offline.
        """
        try:
            if self._copied():
                with self._ends:
                    self.done = not self.cancelled
        except OSError as failure:
            # The job wrote no file of the log. So the failure of a cancelled job may come from later events and is
            # ignored.
            if not (self.cancelled or isinstance(failure, FileNotFoundError) or is_full(failure)):
                raise StorageError(f"copying {self.segment.data_path} to truncate it: {failure}") from failure
            self.awaits_room = is_full(failure) and not (self._frees_segments or self.cancelled)
        finally:
            if not self.done:
                for _, copy, _ in self._copies:
                    with contextlib.suppress(OSError):  # the next start removes it
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
        """Rename the copies over the segment's files, which are closed. Call it once, if ``done``. Raises OSError."""
        for path, copy, _ in self._copies:
            self._disk.rename(copy, path)
        self._copies = []

    def cancel(self) -> list[Path]:
        """Cancel the job: the copies are not needed. Return the files to remove."""
        with self._ends:
            self.cancelled = True
            return [copy for _, copy, _ in self._copies] if self.done else []
