"""``partition.json``: whose log a partition directory holds, and the schemas its segments need."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sparklog.model import TopicPartition, TopicSchema
from sparklog.storage.disk import Disk, read_file, replace_file
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
