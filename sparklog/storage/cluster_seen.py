"""The highest numbers that a broker has seen its cluster count to: ``cluster-seen`` in the root of a log directory.

ZooKeeper holds these counters. When ZooKeeper is put back from an older copy, they go back, and only a log directory
can tell. The file is replaced atomically and durable on return. A missing or damaged one proves nothing.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgspec

from sparklog.errors import StorageError
from sparklog.storage.disk import Disk, read_file, replace_file
from sparklog.storage.formats import NewerFormatError, decode_state, encode_state

SEEN_FILE = "cluster-seen"

logger = logging.getLogger(__name__)


class ClusterSeen(msgspec.Struct, frozen=True):
    """``controller_id`` is the controller of ``controller_epoch``; ``incarnation`` this broker's last one that
    ZooKeeper has counted; ``producer_ids`` the end of the highest block of producer ids that this broker was given."""

    controller_epoch: int = -1
    controller_id: str = ""
    incarnation: int = -1
    producer_ids: int = 0
    version: int = 1


class SeenFile:
    """The file of one log directory. ``note_*`` may be called in any thread, and block for an fsync where a number is
    higher than the one on disk."""

    def __init__(self, disk: Disk, log_dir: Path) -> None:
        self._disk = disk
        self._path = log_dir / SEEN_FILE
        self._lock = threading.Lock()
        self.seen = read_seen(disk, log_dir)

    def note_controller(self, epoch: int, controller_id: str) -> None:
        """Raises OSError: it is not noted."""
        if epoch > self.seen.controller_epoch:
            self._raise("controller_epoch", epoch, controller_id=controller_id)

    def note_incarnation(self, incarnation: int) -> None:
        """Raises OSError: it is not noted."""
        if incarnation > self.seen.incarnation:
            self._raise("incarnation", incarnation)

    def note_producer_ids(self, end: int) -> None:
        """Raises OSError: it is not noted."""
        if end > self.seen.producer_ids:
            self._raise("producer_ids", end)

    def _raise(self, name: str, number: int, **others: str) -> None:
        """Raise one number, unless another thread has written a higher one meanwhile."""
        with self._lock:
            if number <= getattr(self.seen, name):
                return
            seen = msgspec.structs.replace(self.seen, **{name: number}, **others)
            replace_file(self._disk, self._path, encode_state(seen))
            self.seen = seen


def read_seen(disk: Disk, log_dir: Path) -> ClusterSeen:
    """Raises NewerFormatError: it was written by a newer release."""
    path = log_dir / SEEN_FILE
    try:
        return decode_state(read_file(disk, path), ClusterSeen, path=path)
    except FileNotFoundError:
        return ClusterSeen()
    except NewerFormatError:
        raise
    except StorageError as failure:
        logger.warning("%s; it says nothing of what the cluster has counted to", failure)
        return ClusterSeen()
