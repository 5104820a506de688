"""The position of a streaming query, as the JSON that Spark stores in the checkpoint.

    {"from": {...}, "topics": {"flights": {"epochs": {"0": 3}, "id": "...", "offsets": {"0": 23}}}, "version": 1}

``offsets`` are the next offsets to read. ``epochs`` are the leader epochs in which the partition was known to reach
that offset; with them, the query detects a log that was truncated later. ``from`` has the same form as ``topics``. It
has the start offsets of the batch that ends at this position, but only for partitions whose start differs from the end
of the previous batch. These are new partitions and partitions that lost records. A replay of the batch begins at these
offsets.

Spark compares offsets as text, so each position has exactly one text: keys are sorted, partitions by number. The first
batch begins at a constant (``MARKER``) instead of an offset, because Spark requests the initial offset again when it
replays that batch, and "latest" may then be another offset. The position at the end of the first batch has the start of
that batch in ``from``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from sparklog.errors import ConfigError
from sparklog.model import NO_EPOCH, TopicPartition

VERSION = 1

#: The initial offset of every query. It does not name an offset, so it is the same in each replay.
MARKER: dict[str, Any] = {"start": "as the options say", "version": VERSION}


class Position(NamedTuple):
    """The next offset that a query reads in a partition, with the id of the partition's topic.

    ``epoch`` is the leader epoch in which the partition was known to reach that offset. With NO_EPOCH, a truncation of
    the log is not detected.
    """

    topic_id: str
    offset: int
    epoch: int = NO_EPOCH


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The position of a query at the end of a batch.

    ``begun`` has the start of the batch in each partition where this start differs from the end of the previous batch.
    """

    positions: Mapping[TopicPartition, Position]
    begun: Mapping[TopicPartition, Position] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the position as the value that Spark stores as JSON. ``json.dumps`` keeps the order of its keys."""
        begun = {"from": _grouped(self.begun)} if self.begun else {}
        return {**begun, "topics": _grouped(self.positions), "version": VERSION}


class _TopicPositions(msgspec.Struct):
    id: str
    offsets: dict[str, int]
    epochs: dict[str, int] = {}


class _Stored(msgspec.Struct):
    topics: dict[str, _TopicPositions]
    begun: dict[str, _TopicPositions] = msgspec.field(name="from", default_factory=dict)


def is_marker(offset: Mapping[str, Any]) -> bool:
    _check_version(offset)
    return "start" in offset


def parse_stream_offset(offset: Mapping[str, Any]) -> StreamOffset:
    """Parse a position that Spark has read from the checkpoint.

    Raises:
        ConfigError: a newer version or another source wrote it.
    """
    _check_version(offset)
    try:
        stored = msgspec.convert(offset, _Stored)
        return StreamOffset(_flat(stored.topics), _flat(stored.begun))
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"checkpoint offset {str(offset)[:500]} was not written by this source: {error}") from None


def _check_version(offset: Mapping[str, Any]) -> None:
    version = offset.get("version")
    if not isinstance(version, int) or version < 1:
        raise ConfigError(f"checkpoint offset {str(offset)[:500]} was not written by this source: it has no version")
    if version > VERSION:
        raise ConfigError(
            f"checkpoint offset has version {version}, but this version of sparklog supports only up to {VERSION}: "
            "a newer version ran the query"
        )


def _grouped(positions: Mapping[TopicPartition, Position]) -> dict[str, Any]:
    grouped: dict[str, Any] = {}
    for tp in sorted(positions):
        found = positions[tp]
        topic = grouped.setdefault(tp.topic, {"epochs": {}, "id": found.topic_id, "offsets": {}})
        topic["offsets"][str(tp.partition)] = found.offset
        if found.epoch != NO_EPOCH:
            topic["epochs"][str(tp.partition)] = found.epoch
    return grouped


def _flat(topics: Mapping[str, _TopicPositions]) -> dict[TopicPartition, Position]:
    return {
        TopicPartition(name, int(number)): Position(topic.id, offset, topic.epochs.get(number, NO_EPOCH))
        for name, topic in topics.items()
        for number, offset in topic.offsets.items()
    }
