"""``partition.json``: the partition and topic id of a log, and the schemas of its segments.

The log's first append writes it. It is fsynced before anything in the log counts as fsynced. Later it is only replaced
by a durable file: if a power cut emptied it, the next start would set the log aside. A schema that came later is first
only in memory and at the front of its segments. ``PartitionFileJob`` writes it to the file.
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
    """Return the directory's name, as in Kafka.

    It has at most 255 bytes, because topic names have at most 249 and partitions 5 digits.
    """
    return f"{tp.topic}-{tp.partition}"


def parse_directory_name(name: str) -> TopicPartition | None:
    topic, dash, partition = name.rpartition("-")
    if not topic or not dash or not (partition.isascii() and partition.isdigit()):
        return None
    return TopicPartition(topic, int(partition))


def read_partition_file(disk: Disk, directory: Path) -> PartitionFile:
    """Return the content of the file. Raises FileNotFoundError, StorageError or NewerFormatError."""
    path = directory / PARTITION_FILE
    return decode_state(read_file(disk, path), PartitionFile, path=path)


def write_partition_file(disk: Disk, directory: Path, content: PartitionFile, *, sync: bool) -> None:
    replace_file(disk, directory / PARTITION_FILE, encode_state(content), sync=sync)


class PartitionFileJob:
    """The write of ``content`` to ``partition.json``. Made and finished on the event loop; run once in any thread."""

    def __init__(self, disk: Disk, directory: Path, content: PartitionFile) -> None:
        self.content = content
        #: The file has the content, durably.
        self.done = False
        self._cancelled = False
        self._disk = disk
        self._directory = directory
        self._by_path = threading.Lock()

    def cancel(self) -> None:
        """Stop the job: after the return it writes nothing, because another log may get the directory's name."""
        with self._by_path:
            self._cancelled = True

    def run(self) -> None:
        """Write the file.

        Return without ``done`` if cancelled or if the disk is full; the job is then due again.

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
