"""Removal of the files and directories of deleted logs and segments, in a thread.

First a file gets another name, or a directory is moved into ``removed/``. After that the file or directory is no longer
part of a log, and its removal may take long. If a process ends before a removal is complete, the next start completes
it.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparklog.errors import StorageError
from sparklog.storage.disk import Disk

_REMOVED = "removed"

logger = logging.getLogger(__name__)


class FileRemoval:
    """A service that deletes files and directories of one log directory in the background.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self,
        disk: Disk,
        log_dir: Path,
        *,
        in_background: Callable[[Callable[[], None]], object] | None,
        failed: Callable[[str], None],
    ) -> None:
        """Create the object.

        ``in_background`` runs a removal, possibly later. If it is None, a thread of this object runs the removals.
        ``failed`` takes the directory offline.
        """
        self._disk = disk
        self._log_dir = log_dir
        self._path = log_dir / _REMOVED
        self._failed = failed
        self._numbers = itertools.count()
        self._threads: ThreadPoolExecutor | None = None
        if in_background is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="log-removal")
            in_background = self._threads.submit
        self._in_background = in_background

    @property
    def uses_threads(self) -> bool:
        return self._threads is not None

    def close(self) -> None:
        """Wait until this object's thread has finished all removals, including queued ones."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)

    def remove_files(self, paths: Sequence[Path]) -> None:
        """Delete files in the background. The names of the files must already show that the files belong to no log."""

        def remove() -> None:
            for path in paths:
                try:
                    self._disk.remove(path)
                except OSError as failure:  # noqa: PERF203 - a failed one must not stop the others
                    # A file that stays does no harm: the next start removes it.
                    logger.warning("cannot remove %s: %s", path, failure)

        if paths:
            self._in_background(remove)

    def remove_directory(self, directory: Path) -> None:
        """Move a directory to ``removed/`` at once, and delete it in the background.

        Raises:
            StorageError: the disk refused the move. The log directory is now offline.
        """
        try:
            target = self.new_path()
            self._disk.rename(directory, target)
        except OSError as failure:
            detail = f"deleting {directory}: {failure}"
            self._failed(detail)
            raise StorageError(f"log directory {self._log_dir}: {detail}") from failure
        self.remove_tree(target)

    def new_path(self) -> Path:
        """Return an unused path in ``removed/``. Raises OSError."""
        self._disk.make_directory(self._path)
        return self._path / f"{os.getpid()}-{time.time_ns()}-{next(self._numbers)}"

    def remove_tree(self, target: Path) -> None:
        """Delete an entry of ``removed/`` in the background."""

        def remove() -> None:
            try:
                try:
                    self._disk.remove_tree(target)
                except NotADirectoryError:  # an entry that is a single file
                    self._disk.remove(target)
            except OSError as failure:
                logger.warning("cannot remove %s: %s", target, failure)

        self._in_background(remove)

    def remove_leftovers(self) -> None:
        """Delete the entries of ``removed/`` that earlier processes left, in the background. Raises OSError."""
        if self._disk.exists(self._path):
            for name in self._disk.names(self._path):
                self.remove_tree(self._path / name)
