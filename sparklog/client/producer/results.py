"""The results of a producer's writes: the positions of records and tables in the log.

This module is pure.
"""

from __future__ import annotations

from typing import NamedTuple

from sparklog.model import OffsetRange


class RecordMetadata(NamedTuple):
    """The position of an accepted record in the log.

    ``offset`` is -1 if the broker does not return it: with acks=0, or for a duplicate so old that the broker has
    forgotten its offset.
    """

    topic: str
    partition: int
    offset: int
    timestamp_us: int


class WrittenRange(NamedTuple):
    """The offsets ``[start, end)`` of rows in one partition. Both are -1 if the broker does not return them."""

    partition: int
    offsets: OffsetRange


class WriteResult(NamedTuple):
    """The result of ``Producer.write``: the positions of a table's rows in the log.

    A partition may have several ranges, with records of other producers between them.
    """

    topic: str
    record_count: int
    ranges: tuple[WrittenRange, ...]


class BatchOutcome(NamedTuple):
    """The outcome of one batch: its base offset if it was acknowledged, or else its error."""

    partition: int
    base_offset: int
    record_count: int
    error: BaseException | None = None
