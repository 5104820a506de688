"""The position of a consumed batch, in the metadata of its schema, so that the batch stays a plain Arrow batch.

A consumer returns plain ``pyarrow.RecordBatch``es. ``origin(batch)`` returns topic, partition, the offset of the first
record and its leader epoch. Offsets increase by one from there. Within a batch of a compacted topic they may have gaps,
which only the ``_offset`` column of ``Consumer(..., log_columns=True)`` shows. Batches can be combined into a table
without changes, because Arrow does not compare metadata for that.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

_KEY = b"sparklog.origin"


class Origin(NamedTuple):
    """The position of a batch's first record."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int


def with_origin(batch: pa.RecordBatch, place: Origin) -> pa.RecordBatch:
    """Return ``batch`` with its origin."""
    # The topic comes last: the others are numbers, so a separator in its name does no harm.
    text = f"{place.partition},{place.offset},{place.leader_epoch},{place.topic}"
    return batch.replace_schema_metadata({_KEY: text.encode()})


def origin(batch: pa.RecordBatch) -> Origin:
    """Return the origin of a batch from a consumer. A slice has the origin of the whole batch.

    Raises:
        ValueError: the batch has no origin.
    """
    text = (batch.schema.metadata or {}).get(_KEY)
    if text is None:
        raise ValueError("this batch has no origin: it does not come from a Consumer")
    partition, offset, leader_epoch, topic = text.decode().split(",", 3)
    return Origin(topic, int(partition), int(offset), int(leader_epoch))
