"""What an append will write, decided before a byte is written: final headers, and where segments roll.

Pure. The leader's plan fills in the leader's header fields and decides about rolls; the follower's plan checks what the
leader sent against the end of its own log and takes it verbatim, rolls included. Either plan is carried out whole or
not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sparklog.config import TopicConfig
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.checksum import crc32c
from sparklog.record.codec import NO_TIMESTAMP
from sparklog.record.header import HEADER_BYTES, BatchHeader, Flag, unpack_header
from sparklog.record.marker import Marker, decode_marker
from sparklog.storage.disk import Buffer

#: Running maximum timestamp before the first batch of a segment.
NO_MAXIMUM = -(2**63)

#: Plain numbers: every batch is asked, and ``&`` of an enum makes a new member each time.
_FIRST, _PROJECTED, _CONTROL = int(Flag.FIRST_OF_SEGMENT), int(Flag.PROJECTED), int(Flag.CONTROL)

#: Bytes in front of the first batch of a segment, by schema id. BrokerError when the id is not known here.
PreludeLength = Callable[[int], int]


class LogTail(NamedTuple):
    """The end of a log, as far as a plan depends on it."""

    log_end_offset: int
    last_epoch: int
    #: of the last segment: -1 when there is none, or when it is sealed and only a new one can be appended to
    position: int
    running_max: int
    first_append_us: int
    schema_id: int


class Run(NamedTuple):
    """Batches for one segment. ``packed`` and ``data`` are what to write; together, not item by item."""

    new_segment: bool
    headers: list[BatchHeader]
    packed: list[Buffer]
    data: list[Buffer]


def plan_leader_append(
    tail: LogTail,
    batches: Sequence[tuple[BatchHeader, Buffer]],
    *,
    leader_epoch: int,
    now_us: int,
    config: TopicConfig,
    prelude_length: PreludeLength,
) -> list[Run]:
    """Assign offsets and positions to checked batches.

    A segment rolls when the next batch would take it over ``segment.bytes``, when its first batch is older than
    ``segment.ms``, when the schema id changes (an Arrow file has one schema), and after a sealed one.

    Raises:
        BrokerError: CORRUPT_MESSAGE when a body is not as long as its header says; SCHEMA_OUTDATED for an unknown id.
    """
    end, _, position, running_max, first_append_us, schema_id = tail
    log_append_time = config.timestamp_type == "LogAppendTime"
    runs: list[Run] = []
    for header, body in batches:
        stored = header.stored_bytes
        if len(body) != stored:
            raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"batch body: {len(body)} bytes found, {stored} expected")
        roll = (
            position < 0
            or position + stored > config.segment_bytes
            or header.schema_id != schema_id
            or now_us - first_append_us > config.segment_ms * 1000
        )
        if roll:
            schema_id = header.schema_id
            position = prelude_length(schema_id)
            running_max, first_append_us = NO_MAXIMUM, now_us
        if log_append_time or header.min_timestamp == header.max_timestamp == NO_TIMESTAMP:
            min_timestamp = max_timestamp = now_us
        else:
            min_timestamp, max_timestamp = header.min_timestamp, header.max_timestamp
        running_max = max(running_max, max_timestamp)
        final = BatchHeader(
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
        )
        if roll or not runs:
            runs.append(Run(roll, [], [], []))
        run = runs[-1]
        run.headers.append(final)
        run.packed.append(final.pack())
        run.data.append(body)
        end += header.offset_span
        position += stored
    return runs


def plan_follower_append(
    tail: LogTail, packed: bytes | memoryview, *, bodies: memoryview, prelude_length: PreludeLength
) -> list[Run]:
    """Check a leader's batches against the end of this log: CRCs, offsets, epochs, positions, rolls.

    An empty log takes any first batch that begins a segment at or below its end offset: the leader's first segment
    may begin below its log start offset.

    Raises:
        BrokerError: CORRUPT_MESSAGE naming found and expected; SCHEMA_OUTDATED for an unknown schema id.
    """
    end, last_epoch, position, running_max, _, _ = tail
    empty = last_epoch < 0
    runs: list[Run] = []
    at = 0
    if len(packed) % HEADER_BYTES:
        raise _corrupt(end, "bytes of headers", found=len(packed), expected=f"a multiple of {HEADER_BYTES}")
    for header_at in range(0, len(packed), HEADER_BYTES):
        header = unpack_header(packed, header_at)
        if header.flags & _PROJECTED:
            raise _corrupt(end, "flags", found=repr(Flag(header.flags)), expected="a batch with all its columns")
        first = bool(header.flags & _FIRST)
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
        stored = header.stored_bytes
        body = bodies[at : at + stored]
        if len(body) != stored or header.offset_span < 1:
            raise _corrupt(end, "bytes of body", found=len(body), expected=stored)
        crc = crc32c(body)
        if crc != header.body_crc:
            raise _corrupt(end, "CRC32C", found=f"{crc:#010x}", expected=f"{header.body_crc:#010x}")
        if first or not runs:
            runs.append(Run(first, [], [], []))
        run = runs[-1]
        run.headers.append(header)
        run.packed.append(packed[header_at : header_at + HEADER_BYTES])
        run.data.append(body)
        empty = False
        last_epoch = header.leader_epoch
        end += header.offset_span
        position += stored
        at += stored
    if at != len(bodies):
        raise _corrupt(end, "bytes of bodies", found=len(bodies), expected=at)
    return runs


def markers_of(runs: Sequence[Run]) -> dict[int, Marker]:
    """What the markers among these batches say, by base offset; to be read before anything is written.

    Raises:
        BrokerError: CORRUPT_MESSAGE for a marker that cannot be read.
    """
    return {
        header.base_offset: decode_marker(header, body)
        for run in runs
        for header, body in zip(run.headers, run.data, strict=True)
        if header.flags & _CONTROL
    }


def _corrupt(offset: int, what: str, *, found: object, expected: object) -> BrokerError:
    return BrokerError(
        ErrorCode.CORRUPT_MESSAGE, f"batch for offset {offset}: {what} {found} found, {expected} expected"
    )
