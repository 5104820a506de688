"""Execution of an append's plan.

It is carried out completely, or the log stays unchanged.

The segments are written first. Then follows the state derived from their batches: leader epochs, producers and
transactions, and the newest batches in memory. ``append_plan`` has decided what is written. Most single batches use
``append_fast_path`` instead of both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.record.marker import Marker
from sparklog.storage.append_plan import NO_MAXIMUM, LogTail, SegmentWrite, markers_of
from sparklog.storage.batch_cache import CachedBatch
from sparklog.storage.disk import is_full
from sparklog.storage.log_state import LogState


def tail(log: LogState, *, reopen_sealed: bool) -> LogTail:
    """Return the place of the next batch.

    ``reopen_sealed``: a follower continues a sealed segment if its leader did. A leader begins a new one.
    """
    last = log.chain.last
    if last is None:
        return LogTail(log.log_end_offset, log.epochs.last_epoch, -1, NO_MAXIMUM, -1, -1)
    # After batches of a cleaner the leader rolls, so that replicas are byte-identical again.
    appendable = reopen_sealed or not (last.sealed or last.cleaned)
    return LogTail(
        log.log_end_offset,
        log.epochs.last_epoch,
        last.data_size if appendable else -1,
        last.running_max,
        last.first_append_us,
        last.schema_id,
        last.cleaned,
    )


def carry_out(log: LogState, runs: Sequence[SegmentWrite], now_us: int) -> int:
    """Append the batches and return the number of their records.

    Raises:
        BrokerError: nothing was appended. CORRUPT_MESSAGE for an unreadable marker; KAFKA_STORAGE_ERROR if the disk is
            full.
        StorageError: the log directory must go offline.
    """
    markers = markers_of(runs)
    _write(log, runs)
    log.clean = log.untouched = False
    log.tombstone_window.last_progress_us = time.time_ns() // 1000
    if log.log_start_offset == log.log_end_offset:
        # An empty follower received its leader's first segment, which may begin below the log start.
        log.log_start_offset = min(log.log_start_offset, runs[0].headers[0].base_offset)
    records = _record(log, runs, now_us, markers)
    log.log_end_offset = runs[-1].headers[-1].next_offset
    if log.high_watermark > log.log_end_offset:  # noqa: PLR1730 - what is set is checkpointed
        log.high_watermark = log.log_end_offset
    return records


def _write(log: LogState, runs: Sequence[SegmentWrite]) -> None:
    directory = log.directory
    try:
        directory.prepare_for_append()
        log.chain.append(runs, directory.prelude)
    except (OSError, StorageError) as failure:
        raise failed(log, failure) from failure


def failed(log: LogState, failure: OSError | StorageError) -> BrokerError | StorageError:
    """Return the error to raise after a failed append: a BrokerError if the disk is full.

    Otherwise take the log directory offline and return a StorageError.
    """
    if isinstance(failure, StorageError):
        return log.services.offline(str(failure))
    if is_full(failure):
        log.segment_was_truncated()
        detail = f"{log.tp}: no room left in {log.directory.path.parent}: {failure}"
        return BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, detail)
    return log.services.offline(f"appending to {log.tp}: {failure}")


def _record(log: LogState, runs: Sequence[SegmentWrite], now_us: int, markers: Mapping[int, Marker]) -> int:
    """Update all state that is derived from the batches. Return the number of their records."""
    hot, own_hot, epochs, producers = log.services.hot, log.hot, log.epochs, log.producers
    records = 0
    begun, rolled = producers.transactions.begun, False
    for run in runs:
        rolled = rolled or run.new_segment
        if run.new_segment and run.headers[0].base_offset != log.first_segment_offset:
            producers.expire(now_us - log.services.producer_id_expiration_ms * 1000)
            log.seals.rolled(run.headers[0].base_offset, producers.state())
        for header, packed_header, body in zip(run.headers, run.packed, run.data, strict=True):
            base_offset = header.base_offset
            epochs.assign(header.leader_epoch, base_offset)
            producers.record(header, markers.get(base_offset) if markers else None)
            hot.add(own_hot, base_offset, CachedBatch(packed_header, body, header.next_offset))
            records += header.record_count
    # The ended segment may now be due for sealing or the log be too large, although no offset may move for a long time.
    if rolled or producers.transactions.begun != begun:
        log.services.moved.add(log.tp)
    return records
