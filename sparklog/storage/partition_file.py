"""``partition.json``: whose log a partition directory holds, and the schemas its segments need.

Written with the log's first append, and fsynced before anything in the log counts as fsynced. From then on it only
gives way to one that is durable already: a log whose file a power cut empties would be set aside. A schema that came
later is in memory and at the front of its segments at first; ``PartitionFileJob`` brings it into the file.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from sparklog.errors import StorageError
from sparklog.model import TopicPartition, TopicSchema
from sparklog.storage.disk import Disk, is_full, read_file, replace_file
from sparklog.storage.formats import decode_state, encode_state

PARTITION_FILE = "partition.json"


class PartitionFile(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    topic_id: str
    schemas: tuple[TopicSchema, ...]
    version: int = 1


def directory_name(tp: TopicPartition) -> str:
    """As Kafka names it. At most 255 bytes, since topic names have at most 249 and partitions 5 digits."""
    return f"{tp.topic}-{tp.partition}"


def parse_directory_name(name: str) -> TopicPartition | None:
    topic, dash, partition = name.rpartition("-")
    if not topic or not dash or not (partition.isascii() and partition.isdigit()):
        return None
    return TopicPartition(topic, int(partition))


def read_partition_file(disk: Disk, directory: Path) -> PartitionFile:
    """Raises FileNotFoundError, StorageError or NewerFormatError."""
    path = directory / PARTITION_FILE
    return decode_state(read_file(disk, path), PartitionFile, path=path)


def write_partition_file(disk: Disk, directory: Path, content: PartitionFile, *, sync: bool) -> None:
    replace_file(disk, directory / PARTITION_FILE, encode_state(content), sync=sync)


class PartitionFileJob:
    """Brings the schemas of ``content`` into ``partition.json``. Made and finished on the event loop, run once in any
    thread."""

    def __init__(self, disk: Disk, directory: Path, content: PartitionFile) -> None:
        self.content = content
        #: it is there, durably
        self.done = False
        self._cancelled = False
        self._disk = disk
        self._directory = directory
        self._by_path = threading.Lock()

    def cancel(self) -> None:
        """Nothing is written by this job after this returns: another log may get the directory's name."""
        with self._by_path:
            self._cancelled = True

    def run(self) -> None:
        """Returns without ``done`` when cancelled or the disk is full (it will be due again).

        Raises:
            StorageError: the log directory must go offline.
        """
        with self._by_path:
            if self._cancelled:
                return
            try:
                write_partition_file(self._disk, self._directory, self.content, sync=True)
            except OSError as failure:
                if not is_full(failure):
                    raise StorageError(f"storing the schemas of {self._directory}: {failure}") from failure
            else:
                self.done = True
