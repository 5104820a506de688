"""The position of a consumed batch, which is stored in the metadata of the batch's schema.

So a consumer can return plain ``pyarrow.RecordBatch``es. ``origin(batch)`` returns topic, partition, and the offset and
leader epoch of the first record. The offset increases by one for each record. In a compacted topic there may be gaps
between the offsets of a batch, and only the ``_offset`` column of ``Consumer(..., log_columns=True)`` shows them.
Batches can be combined into a table, because Arrow ignores this metadata when it combines them.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

_KEY = b"sparklog.origin"


class Origin(NamedTuple):
    """The origin of a batch: its topic and partition, and the offset and leader epoch of its first record."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int


def with_origin(batch: pa.RecordBatch, place: Origin) -> pa.RecordBatch:
    """Return ``batch`` with ``place`` as its origin, in the metadata of its schema."""
    # The topic comes last, so that a comma in its name does no harm.
    text = f"{place.partition},{place.offset},{place.leader_epoch},{place.topic}"
    return batch.replace_schema_metadata({_KEY: text.encode()})


def origin(batch: pa.RecordBatch) -> Origin:
    """Return the topic and partition of a consumer's batch, and the offset and leader epoch of its first record.

    A slice of a batch has the origin of the whole batch.

    Raises:
        ValueError: the batch has no origin.
    """
    text = (batch.schema.metadata or {}).get(_KEY)
    if text is None:
        raise ValueError("this batch has no origin: it does not come from a Consumer")
    partition, offset, leader_epoch, topic = text.decode().split(",", 3)
    return Origin(topic, int(partition), int(offset), int(leader_epoch))
