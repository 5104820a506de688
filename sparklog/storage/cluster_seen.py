"""The file ``cluster-seen`` in a log directory, with the highest epochs and ids that the broker has received.

They are counters in ZooKeeper. If ZooKeeper is restored from an older backup, the counters decrease, and only a log
directory can show that. The file is replaced atomically, and its new content is durable on return. A missing or damaged
file shows nothing about ZooKeeper.
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
    """The content of the file ``cluster-seen``: the highest epochs and ids that the broker has received.

    ``controller_id`` is the controller of ``controller_epoch``. ``incarnation`` is the highest incarnation that this
    broker got from ZooKeeper. ``producer_ids`` is the end of the highest block of producer ids that this broker
    received.
    """

    controller_epoch: int = -1
    controller_id: str = ""
    incarnation: int = -1
    producer_ids: int = 0
    version: int = 1


class SeenFile:
    """The file ``cluster-seen`` of one log directory, with its content in memory.

    Any thread may call the ``note_*`` methods. These methods block for an fsync if the number is higher than the number
    on disk.
    """

    def __init__(self, disk: Disk, log_dir: Path) -> None:
        self._disk = disk
        self._path = log_dir / SEEN_FILE
        self._lock = threading.Lock()
        self.seen = read_seen(disk, log_dir)

    def note_controller(self, epoch: int, controller_id: str) -> None:
        """Record the controller's epoch and id, if the epoch is higher than the recorded one. Raises OSError."""
        if epoch > self.seen.controller_epoch:
            self._raise("controller_epoch", epoch, controller_id=controller_id)

    def note_incarnation(self, incarnation: int) -> None:
        """Record an incarnation of this broker, if it is higher than the recorded one. Raises OSError."""
        if incarnation > self.seen.incarnation:
            self._raise("incarnation", incarnation)

    def note_producer_ids(self, end: int) -> None:
        """Record the end of a block of producer ids, if it is higher than the recorded one. Raises OSError."""
        if end > self.seen.producer_ids:
            self._raise("producer_ids", end)

    def _raise(self, name: str, number: int, **others: str) -> None:
        """Write a higher number to the file, unless another thread has already written this one or a higher one."""
        with self._lock:
            if number <= getattr(self.seen, name):
                return
            seen = msgspec.structs.replace(self.seen, **{name: number}, **others)
            replace_file(self._disk, self._path, encode_state(seen))
            self.seen = seen


def read_seen(disk: Disk, log_dir: Path) -> ClusterSeen:
    """Return the content of ``cluster-seen``, or the initial values if the file is missing or damaged.

    Raises:
        NewerFormatError: a newer release wrote the file.
    """
    path = log_dir / SEEN_FILE
    try:
        return decode_state(read_file(disk, path), ClusterSeen, path=path)
    except FileNotFoundError:
        return ClusterSeen()
    except NewerFormatError:
        raise
    except StorageError as failure:
        logger.warning("%s; the numbers that this directory has seen are unknown", failure)
        return ClusterSeen()
