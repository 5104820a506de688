"""The append of a single plain batch after the last one of its segment: the usual case when latency matters.

Such a batch needs no decision: no roll, no new epoch, no marker and no transaction. It also needs no time from the
leader. In a topic without an event-time column the leader sets each batch's time (``NO_TIMESTAMP``), so there only
followers use this path. Every other batch is left to ``append_plan`` and ``log_appends``. They would do the same with a
plain batch; a test compares the two. The plan and its lists would be most of the cost of such an append.
"""

from __future__ import annotations

import time

from sparklog.errors import StorageError
from sparklog.record.checksum import crc32c
from sparklog.record.codec import NO_TIMESTAMP
from sparklog.record.header import HEADER_BYTES, BatchHeader, Flag, pack_placed, unpack_header
from sparklog.storage.batch_cache import CachedBatch
from sparklog.storage.disk import Buffer
from sparklog.storage.log_appends import failed
from sparklog.storage.log_state import LogState
from sparklog.storage.segment import Segment

#: A batch with any other flag is not plain.
_PLAIN = int(Flag.LZ4 | Flag.ZSTD)


def append_as_leader(log: LogState, header: BatchHeader, body: Buffer, *, leader_epoch: int, now_us: int) -> bool:
    """Append a checked batch that is not in the log yet.

    Return False, without any effect, if it is not plain.

    Raises:
        BrokerError, StorageError: as ``log_appends.carry_out``.
    """
    segment, config = _growing(log), log.config
    if (
        segment is None
        or header.flags & ~_PLAIN
        or header.offset_array_length
        or header.length != len(body)
        or header.schema_id != segment.schema_id
        or leader_epoch != log.epochs.last_epoch
        or segment.data_size + header.length > config.segment_bytes
        or now_us - segment.first_append_us > config.segment_ms * 1000
        or header.max_timestamp == NO_TIMESTAMP
        or config.compacted
        or config.timestamp_type == "LogAppendTime"
    ):
        return False
    latest = header.max_timestamp
    running_max = segment.running_max if segment.running_max > latest else latest
    packed = pack_placed(
        header,
        base_offset=log.log_end_offset,
        position=segment.data_size,
        running_max=running_max,
        append_time=now_us,
        leader_epoch=leader_epoch,
    )
    _append(log, segment, header, packed, body, running_max=running_max, append_us=now_us)
    return True


def append_as_follower(log: LogState, packed: bytes | memoryview, body: memoryview) -> BatchHeader | None:
    """Append a batch from the leader unchanged and return its header.

    Return None, without any effect, if it is not plain or not sound.

    Raises:
        BrokerError, StorageError: as ``log_appends.carry_out``; BrokerError as ``unpack_header``.
    """
    segment = _growing(log)
    if segment is None or len(packed) != HEADER_BYTES:
        return None
    header = unpack_header(packed)
    latest = header.max_timestamp
    running_max = segment.running_max if segment.running_max > latest else latest
    if (
        header.flags & ~_PLAIN
        or header.offset_array_length
        or header.length != len(body)
        or header.offset_span < 1
        or header.base_offset != log.log_end_offset
        or header.position != segment.data_size
        or header.running_max != running_max
        or header.schema_id != segment.schema_id
        or header.leader_epoch != log.epochs.last_epoch
        or header.body_crc != crc32c(body)
    ):
        return None
    _append(log, segment, header, packed, body, running_max=running_max, append_us=header.append_time)
    return header


def _growing(log: LogState) -> Segment | None:
    """Return the segment that a plain batch is appended to, or None."""
    segments = log.chain.segments
    if not segments or log.closed:
        return None
    last = segments[-1]
    return None if last.sealed or last.cleaned or log.log_start_offset == last.end_offset else last


def _append(
    log: LogState,
    segment: Segment,
    header: BatchHeader,
    packed: Buffer,
    body: Buffer,
    *,
    running_max: int,
    append_us: int,
) -> None:
    """Append the batch. ``packed`` is final; of ``header`` this reads only fields that the leader does not set."""
    base_offset = log.log_end_offset
    end_offset = base_offset + header.offset_span
    try:
        segment.append_plain(
            packed, body, base_offset=base_offset, end_offset=end_offset, running_max=running_max, append_us=append_us
        )
    except (OSError, StorageError) as failure:
        raise failed(log, failure) from failure
    log.clean = log.untouched = False
    log.tombstone_window.last_progress_us = time.time_ns() // 1000
    log.producers.record_plain(header, base_offset, append_us)
    log.services.hot.add(log.hot, base_offset, CachedBatch(packed, body, end_offset))
    log.log_end_offset = end_offset
