"""Plans of appends, decided before a byte is written: final headers, and the places where segments roll.

This module is pure. The leader's plan sets the header fields that only the leader can set, and decides where segments
roll. The follower's plan checks the leader's batches against the end of the local log. The follower keeps the batches
unchanged and rolls where the leader rolled. A plan is carried out completely or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from sparklog.config import TopicConfig
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.checksum import crc32c
from sparklog.record.codec import NO_TIMESTAMP
from sparklog.record.header import HEADER_BYTES, BatchHeader, Flag, unpack_header
from sparklog.record.marker import Marker, decode_marker
from sparklog.storage.disk import Buffer

#: The running maximum timestamp before the first batch of a segment.
NO_MAXIMUM = -(2**63)

#: The flags as plain ints, because they are tested for every batch, and ``&`` of an enum makes a new member each time.
_FIRST, _PROJECTED, _CONTROL = int(Flag.FIRST_OF_SEGMENT), int(Flag.PROJECTED), int(Flag.CONTROL)
_CLEANED = int(Flag.CLEANED)

#: A function that returns the number of bytes before the first batch of a segment, by schema id. It raises BrokerError
#: for an unknown id.
PreludeLength = Callable[[int], int]
#: A function that returns the rest of a stored batch, from an offset inside the batch to the end of the batch.
CutFront = Callable[[BatchHeader, memoryview, int], tuple[BatchHeader, Buffer]]


class AppendPoint(msgspec.Struct, frozen=True, gc=False):
    """The state at the end of a log from which the plan of an append begins."""

    log_end_offset: int
    last_epoch: int
    #: The position in the last segment's file at which the next batch begins; -1 if the append needs a new segment.
    position: int
    running_max: int
    first_append_us: int
    schema_id: int
    #: Whether the last batch has another position than in the leader's segment. Later batches of the segment then also
    #: have other positions.
    cleaned: bool = False


class SegmentWrite(msgspec.Struct, frozen=True):
    """The batches that an append writes to one segment.

    ``packed`` are the bytes of the headers, for the index. ``data`` are the bytes of the bodies, for the data file.
    """

    new_segment: bool
    headers: list[BatchHeader]
    packed: list[Buffer]
    data: list[Buffer]
    #: The content of the markers among the batches, by base offset.
    markers: dict[int, Marker]


def plan_leader_append(
    point: AppendPoint,
    batches: Sequence[tuple[BatchHeader, Buffer]],
    *,
    leader_epoch: int,
    now_us: int,
    config: TopicConfig,
    prelude_length: PreludeLength,
    placed: bool = False,
) -> list[SegmentWrite]:
    """Plan a leader's append: assign offsets, positions and segments to checked batches.

    ``placed`` means that the batches keep the offsets and times of the log that they were archived from. Then the first
    batch must begin at this log's end, and each other batch at the end of the batch before it. A batch begins a new
    segment in four cases:

    - the batch would make the segment larger than ``segment.bytes``;
    - the segment is older than ``segment.ms``, or older than ``max.compaction.lag.ms`` in a compacted topic;
    - the batch has another schema id than the segment, because an Arrow file has one schema;
    - the batch is the first one of this append, and the log has no segment that it may continue (``point.position`` is
      -1).

    Raises:
        BrokerError: CORRUPT_MESSAGE if a body's length differs from its header, or for an unreadable marker;
            SCHEMA_OUTDATED for an unknown schema id; OFFSET_OUT_OF_RANGE for a placed batch that does not begin at the
            log's end.
    """
    end, position, running_max = point.log_end_offset, point.position, point.running_max
    first_append_us, schema_id = point.first_append_us, point.schema_id
    log_append_time = config.timestamp_type == "LogAppendTime"
    segment_ms = config.segment_ms
    if config.compacted:  # compaction skips the active segment, so it must roll in time
        segment_ms = min(segment_ms, config.max_compaction_lag_ms)
    runs: list[SegmentWrite] = []
    for header, body in batches:
        stored = header.stored_bytes
        if len(body) != stored:
            raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"batch body: {len(body)} bytes found, {stored} expected")
        if placed and header.base_offset != end:
            raise BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, f"batch for {header.base_offset}, the log ends at {end}")
        roll = (
            position < 0
            or position + stored > config.segment_bytes
            or header.schema_id != schema_id
            or now_us - first_append_us > segment_ms * 1000
        )
        if roll:
            schema_id = header.schema_id
            position = prelude_length(schema_id)
            running_max, first_append_us = NO_MAXIMUM, now_us
        if not placed and (log_append_time or header.min_timestamp == header.max_timestamp == NO_TIMESTAMP):
            min_timestamp = max_timestamp = now_us
        else:
            min_timestamp, max_timestamp = header.min_timestamp, header.max_timestamp
        running_max = max(running_max, max_timestamp)
        # Built as the class does it, but without a Python call, because this runs for every batch.
        final = tuple.__new__(
            BatchHeader,
            (
                end,
                position,
                max_timestamp,
                running_max,
                now_us,
                header.producer_id,
                min_timestamp,
                header.offset_span,
                header.record_count,
                header.length,
                header.body_crc,
                leader_epoch,
                schema_id,
                header.first_sequence,
                header.offset_array_length,
                header.producer_epoch,
                header.flags | _FIRST if roll else header.flags & ~_FIRST,
            ),
        )
        if roll or not runs:
            runs.append(SegmentWrite(roll, [], [], [], {}))
        run = runs[-1]
        if final.flags & _CONTROL:
            run.markers[end] = decode_marker(final, body)
        run.headers.append(final)
        run.packed.append(final.pack())
        run.data.append(body)
        end += header.offset_span
        position += stored
    return runs


def plan_follower_append(
    point: AppendPoint,
    packed: bytes | memoryview,
    *,
    bodies: memoryview,
    prelude_length: PreludeLength,
    cut_front: CutFront | None = None,
) -> list[SegmentWrite]:
    """Plan a follower's append: check that the leader's batches continue this log.

    The checks cover checksums, offsets, leader epochs, file positions and running maximum timestamps.

    A batch that the leader has compacted (``Flag.CLEANED``) may begin below the end of this log, because this log may
    have copied records before the compaction. Then ``cut_front`` removes the records that this log already has. The
    batch's position in the leader's segment may be wrong in this log's segment, so the batch gets the next free
    position there. The later batches of the leader's segment then get new positions too.

    An empty log accepts any first batch that begins a segment at or below the log's end offset, because the leader's
    first segment may begin below the leader's log start offset.

    Raises:
        BrokerError: CORRUPT_MESSAGE if a batch fails a check or a marker is unreadable; SCHEMA_OUTDATED for an unknown
            schema id.
    """
    end, position, running_max = point.log_end_offset, point.position, point.running_max
    last_epoch, schema_id = point.last_epoch, point.schema_id
    empty = last_epoch < 0
    own_place = point.cleaned
    runs: list[SegmentWrite] = []
    at = 0
    if len(packed) % HEADER_BYTES:
        raise _corrupt(end, "bytes of headers", found=len(packed), expected=f"a multiple of {HEADER_BYTES}")
    for header_at in range(0, len(packed), HEADER_BYTES):
        sent = header = unpack_header(packed, header_at)
        packed_header = packed[header_at : header_at + HEADER_BYTES]
        flags, stored = header.flags, header.stored_bytes
        body = bodies[at : at + stored]
        at += len(body)
        if flags & _PROJECTED:
            raise _corrupt(end, "flags", found=repr(Flag(flags)), expected="a batch with all its columns")
        if flags & _FIRST and header.base_offset == end:
            own_place = False
        _check_body(end, header, body, stored)
        if (flags & _CLEANED or own_place) and not empty:
            header, body = _reposition(
                header, body, end=end, position=position, running_max=running_max, schema_id=schema_id,
                prelude_length=prelude_length, cut_front=cut_front,
            )  # fmt: skip
            if header is not sent:
                packed_header = memoryview(header.pack())
                flags, stored = header.flags, header.stored_bytes
        first = bool(flags & _FIRST)
        if first:
            position = prelude_length(header.schema_id)
            running_max = NO_MAXIMUM
            if empty and header.base_offset <= end:
                end = header.base_offset
        if header.base_offset != end:
            raise _corrupt(end, "base offset", found=header.base_offset, expected=end)
        if header.position != position:
            raise _corrupt(end, "position", found=header.position, expected=position)
        if header.leader_epoch < last_epoch:
            raise _corrupt(end, "leader epoch", found=header.leader_epoch, expected=f"{last_epoch} or later")
        running_max = max(running_max, header.max_timestamp)
        if header.running_max != running_max:
            raise _corrupt(end, "running maximum timestamp", found=header.running_max, expected=running_max)
        if first or not runs:
            runs.append(SegmentWrite(first, [], [], [], {}))
        run = runs[-1]
        if flags & _CONTROL:
            run.markers[end] = decode_marker(header, body)
        run.headers.append(header)
        run.packed.append(packed_header)
        run.data.append(body)
        empty = False
        last_epoch = header.leader_epoch
        schema_id = header.schema_id
        end += header.offset_span
        position += stored
    if at != len(bodies):
        raise _corrupt(end, "bytes of bodies", found=len(bodies), expected=at)
    return runs


def _check_body(end: int, header: BatchHeader, body: memoryview, stored: int) -> None:
    if len(body) != stored or header.offset_span < 1:
        raise _corrupt(end, "bytes of body", found=len(body), expected=stored)
    crc = crc32c(body)
    if crc != header.body_crc:
        raise _corrupt(end, "CRC32C", found=f"{crc:#010x}", expected=f"{header.body_crc:#010x}")


def _reposition(
    header: BatchHeader,
    body: memoryview,
    *,
    end: int,
    position: int,
    running_max: int,
    schema_id: int,
    prelude_length: PreludeLength,
    cut_front: CutFront | None,
) -> tuple[BatchHeader, memoryview]:
    """Return a compacted batch with its position in this log. It is unchanged if the position is the leader's."""
    first = bool(header.flags & _FIRST)
    if header.base_offset < end < header.next_offset and cut_front is not None:
        header, rest = cut_front(header, body, end)
        body = memoryview(rest)
        first = False
    # The leader may have rolled below this log's end. Then this log rolls at the first batch with another schema.
    if not first and (position < 0 or header.schema_id != schema_id):
        first = True
    if first:
        position, running_max = prelude_length(header.schema_id), NO_MAXIMUM
    flags = (header.flags | _FIRST if first else header.flags & ~_FIRST) | _CLEANED
    placed = header._replace(position=position, running_max=max(running_max, header.max_timestamp), flags=flags)
    return (header, body) if placed == header else (placed, body)


def _corrupt(offset: int, what: str, *, found: object, expected: object) -> BrokerError:
    return BrokerError(
        ErrorCode.CORRUPT_MESSAGE, f"batch for offset {offset}: {what} {found} found, {expected} expected"
    )
