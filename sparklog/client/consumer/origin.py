"""Where a consumed batch comes from: carried in the metadata of its schema, so that a batch stays a plain Arrow batch.

A consumer hands out ``pyarrow.RecordBatch`` and nothing else. ``origin(batch)`` tells topic, partition, the offset of
the first record and the leader epoch it was written in; offsets count up by one from there (within a batch of a
compacted topic they may have gaps, which only the ``_offset`` column of ``Consumer(..., log_columns=True)`` shows).
Batches can be put together into a table as they are: Arrow does not compare metadata for that.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

_KEY = b"sparklog.origin"


class Origin(NamedTuple):
    """The place of a batch's first record."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int


def with_origin(batch: pa.RecordBatch, place: Origin) -> pa.RecordBatch:
    """``batch`` with its origin."""
    # The topic comes last: the others are numbers, so no name can be mistaken for a separator.
    text = f"{place.partition},{place.offset},{place.leader_epoch},{place.topic}"
    return batch.replace_schema_metadata({_KEY: text.encode()})


def origin(batch: pa.RecordBatch) -> Origin:
    """The origin of a batch that a consumer handed out; slices keep that of the whole.

    Raises:
        ValueError: the batch carries none.
    """
    text = (batch.schema.metadata or {}).get(_KEY)
    if text is None:
        raise ValueError("this batch carries no origin: it does not come from a Consumer")
    partition, offset, leader_epoch, topic = text.decode().split(",", 3)
    return Origin(topic, int(partition), int(offset), int(leader_epoch))
