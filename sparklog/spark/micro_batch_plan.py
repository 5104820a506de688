"""The planning of a micro-batch: the comparison of a query's position with the current logs, and the ranges to read.

A partition that is new to the query is read from its beginning. These count as losses: a topic that was deleted or
recreated, deleted records that the query has not read, and a log that ends before the query's position. Offsets that
never had a record are no loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sparklog.errors import ConfigError
from sparklog.model import NO_EPOCH, OffsetRange, TopicPartition
from sparklog.spark.limits import spread
from sparklog.spark.stream_offset import Position, StreamOffset


class Withheld(NamedTuple):
    """The offsets of one partition's log when a batch is planned.

    ``start`` is the earliest offset. Readers can read the offsets below ``readable``. ``end`` is the end of all
    committed records, including records of open transactions.
    """

    topic_id: str
    start: int
    readable: int
    end: int
    epoch: int


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The offsets at which the next batch of a query begins, and a message for each loss of records.

    ``begins`` has the offset of each partition. ``begun`` has only the offsets that differ from the end of the last
    batch, such as those of new partitions.
    """

    begins: Mapping[TopicPartition, Position]
    begun: Mapping[TopicPartition, Position]
    losses: tuple[str, ...]


def first_position(offsets: Mapping[TopicPartition, int], held: Mapping[TopicPartition, Withheld]) -> StreamPosition:
    """Return the position of a new query, whose first batch begins at ``offsets``."""
    begun = {tp: Position(held[tp].topic_id, offset) for tp, offset in offsets.items()}
    return StreamPosition(begun, begun, ())


def next_position(
    last: Mapping[TopicPartition, Position],
    held: Mapping[TopicPartition, Withheld],
    *,
    unseen: Collection[TopicPartition] = (),
) -> StreamPosition:
    """Return the position at which the next batch of a query begins, and the losses of records since the last batch.

    ``last`` has the positions at the end of the last batch. ``held`` has the current offsets of the logs. ``unseen``
    are partitions that exist but that the queried broker does not know yet. They keep their position.
    """
    begins, begun, losses = {}, {}, []
    for tp in sorted(set(last) | set(held)):
        before, now = last.get(tp), held.get(tp)
        if now is None:
            assert before is not None
            if tp in unseen:
                begins[tp] = before
            else:
                losses.append(
                    f"{tp} was deleted, or the query no longer reads it; it was read up to offset {before.offset}"
                )
            continue
        found, loss = _begin(tp, before, now)
        begins[tp] = found
        if found != before:
            begun[tp] = found
        if loss:
            losses.append(loss)
    return StreamPosition(begins, begun, tuple(losses))


def _begin(tp: TopicPartition, before: Position | None, now: Withheld) -> tuple[Position, str]:
    earliest = Position(now.topic_id, now.start)
    if before is None:
        return earliest, f"{tp} is new, and its offsets 0 to {now.start} are already deleted" if now.start else ""
    if before.topic_id != now.topic_id:
        return earliest, f"{tp}: the topic was deleted and created again; it was read up to offset {before.offset}"
    if before.offset < now.start:
        return earliest, f"{tp}: offsets {before.offset} to {now.start} were deleted"
    if before.offset > now.end:
        lost = f"{tp}: the log was truncated to {now.end}, but was read up to offset {before.offset}"
        return Position(now.topic_id, now.end, NO_EPOCH), lost
    return before, ""


def waiting(position: StreamPosition, held: Mapping[TopicPartition, Withheld]) -> dict[TopicPartition, OffsetRange]:
    """Return, for each partition, the range of offsets that the next batch could read. A range may be empty."""
    return {
        tp: OffsetRange(begin.offset, max(begin.offset, held[tp].readable if tp in held else 0))
        for tp, begin in position.begins.items()
    }


def end_of_batch(
    position: StreamPosition, held: Mapping[TopicPartition, Withheld], *, limit: int | None
) -> StreamOffset:
    """Return the end of the batch that begins at ``position`` and has about ``limit`` offsets.

    If ``limit`` is None, the batch has all available offsets.
    """
    ends = spread(waiting(position, held), limit)
    positions = {}
    for tp, begin in position.begins.items():
        moved = ends[tp] != begin.offset
        positions[tp] = Position(begin.topic_id, ends[tp], held[tp].epoch if moved else begin.epoch)
    return StreamOffset(positions, position.begun)


class BatchRange(NamedTuple):
    """A non-empty range of offsets ``[begin.offset, end)`` of one partition."""

    partition: TopicPartition
    begin: Position
    end: int


def batch_ranges(start: StreamOffset | None, end: StreamOffset) -> list[BatchRange]:
    """Return the ranges of offsets that the batch from ``start`` to ``end`` reads.

    They depend only on these two arguments, so a replay of the batch reads the same records. ``start`` is None for the
    first batch: ``end`` then has the start offsets too.

    Raises:
        ConfigError: the checkpoint is inconsistent: a partition has no start offset, its end is before its start, or
            the topic ids of its start and end differ.
    """
    before = start.positions if start is not None else {}
    ranges = []
    for tp in sorted(end.positions):
        begin, last = end.begun.get(tp) or before.get(tp), end.positions[tp]
        if begin is None or begin.topic_id != last.topic_id or begin.offset > last.offset:
            raise ConfigError(f"checkpoint: {tp} ends at {last}, which does not follow from a start of {begin}")
        if begin.offset < last.offset:
            ranges.append(BatchRange(tp, begin, last.offset))
    return ranges


def held_back(
    held: Mapping[TopicPartition, Withheld], target: Mapping[TopicPartition, Withheld]
) -> dict[TopicPartition, Withheld]:
    """Return the current offsets of the logs, limited to records and partitions that existed at the start of a query.

    A query with the trigger AvailableNow reads only these records. ``held`` has the current offsets of the logs.
    ``target`` has the offsets at the start of the query.
    """
    capped = {}
    for tp, now in held.items():
        then = target.get(tp)
        if then is None:
            continue
        readable = min(now.readable, then.readable) if then.topic_id == now.topic_id else now.start
        capped[tp] = now._replace(readable=readable)
    return capped
