"""The append of one batch on its own behind the last one of its segment, as nearly all are where latency counts.

Nothing has to be decided for it: no roll, no new epoch, no marker and no transaction, no time that the leader sets: of
a topic without an event-time column it sets every batch's (``NO_TIMESTAMP``), so only followers come here. What is
different in any way is left to ``append_plan`` and ``log_appends``, which would do with this one what is done here; a
test holds the two against each other. A plan and its lists would be most of what such an append costs.
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

#: A batch with any other flag is not a plain one.
_PLAIN = int(Flag.LZ4 | Flag.ZSTD)


def append_as_leader(log: LogState, header: BatchHeader, body: Buffer, *, leader_epoch: int, now_us: int) -> bool:
    """Append a checked batch, which is not in the log yet. False: nothing was done, it is not such a one.

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
    """Append a batch that the leader sent, verbatim; return its header. None: nothing was done; it is not such a one,
    or not sound.

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
    """The segment that such a batch would go to."""
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
    """``packed`` is final, of ``header`` only what a leader does not set."""
    base_offset = log.log_end_offset
    end_offset = base_offset + header.offset_span
    try:
        segment.append_plain(
            packed, body, base_offset=base_offset, end_offset=end_offset, running_max=running_max, append_us=append_us
        )
    except (OSError, StorageError) as failure:
        raise failed(log, failure) from failure
    log.clean = log.untouched = False
    log.absence.last_progress_us = time.time_ns() // 1000
    log.producers.record_plain(header, base_offset, append_us)
    log.services.hot.add(log.hot, base_offset, CachedBatch(packed, body, end_offset))
    log.log_end_offset = end_offset
