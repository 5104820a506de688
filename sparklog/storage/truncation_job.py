"""What takes long in a cut: what is left of the segment that it goes through is copied beside it, and fsynced.

``TruncationJob.run`` works in a thread and changes nothing of the log, which is served as it is until it is cut, back
on the event loop (``Log.truncate``): there the copies take the places of the segment's files. What they hold of the
segment cannot change before that; where it is not the log's any more, or another cut comes first, they are thrown away.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path

from sparklog.errors import StorageError
from sparklog.storage.disk import is_full, sync_file
from sparklog.storage.segment import COPY_SUFFIX, Segment

#: Copied and fsynced at a time: where a cut is forgotten, by the end of the process perhaps, no more is waited for.
_PIECE_BYTES = 32 * 1024 * 1024
_numbers = itertools.count()


class TruncationJob:
    """Made, cancelled and used on the event loop, run in any thread, once."""

    def __init__(self, segment: Segment, count: int, *, frees_segments: bool = False) -> None:
        """``count``: batches to be kept of the segment. ``frees_segments``: the cut will remove others first, which
        makes room. Raises OSError."""
        self.segment = segment
        self.count = count
        #: the copies are there, and durable
        self.done = False
        #: The disk was full, and the cut itself makes no room on it: it is to be begun anew later. On the event loop
        #: there would be no more room, and a cut that fails takes the log directory offline.
        self.awaits_room = False
        self.cancelled = False
        self._frees_segments = frees_segments
        self._disk = segment.disk
        number = next(_numbers)
        #: Which file, its copy, and how many bytes of it. The names are this job's own: one that was cancelled may
        #: still be at work when another one begins, at this segment or at that of a topic made anew.
        self._copies = [
            (path, path.with_name(f"{path.name}.{number}{COPY_SUFFIX}"), length)
            for path, length in segment.files_cut_to(count)
        ]
        self._ends = threading.Lock()

    def run(self) -> None:
        """Make the copies. Returns without ``done`` when cancelled, when the files have left the log, or the disk is
        full.

        Raises:
            StorageError: the log directory must go offline.
        """
        try:
            if self._copied():
                with self._ends:
                    self.done = not self.cancelled
        except OSError as failure:
            # Nothing of the log's own was written: a job that was cancelled may fail by what came after it.
            if not (self.cancelled or isinstance(failure, FileNotFoundError) or is_full(failure)):
                raise StorageError(f"copying {self.segment.data_path} to cut it: {failure}") from failure
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
        """Put the copies over the segment's files, which are closed. Once, when ``done``. Raises OSError."""
        for path, copy, _ in self._copies:
            self._disk.rename(copy, path)
        self._copies = []

    def cancel(self) -> list[Path]:
        """Nobody wants the copies any more. Returns what remains to be removed."""
        with self._ends:
            self.cancelled = True
            return [copy for _, copy, _ in self._copies] if self.done else []
