"""Tests of a reader's position: its place in the log's history, verification and failures."""

from __future__ import annotations

import pytest

from sparklog.client.consumer.partition_cursor import LogPosition, PartitionCursor
from sparklog.client.errors import ClientTimeout, LogTruncated
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH
from tests.client.reading import TP

CORRUPT = BrokerError(ErrorCode.CORRUPT_MESSAGE, "damaged")


def cursor(position: int = 10, last_epoch: int = NO_EPOCH) -> PartitionCursor:
    return PartitionCursor(TP, "id1", position, last_epoch=last_epoch)


def fail(failing: PartitionCursor, code: ErrorCode, now: float, *, timeout_s: float = 30.0) -> None:
    failing.on_error(BrokerError(code, "on purpose"), now, pause_ms=100.0, timeout_s=timeout_s, grace_s=1.5)


def test_a_bound_epoch_is_replaced_if_the_log_reaches_the_position() -> None:
    moved = cursor(last_epoch=5)
    assert moved.log_position == LogPosition(10, 5, True)
    moved.on_diverging((3, 10))
    assert moved.log_position == LogPosition(10, 3, False)


@pytest.mark.parametrize(("is_read", "end_offset"), [(True, 10), (True, 9), (False, 9)])
def test_a_log_without_a_record_before_the_position_was_truncated(is_read: bool, end_offset: int) -> None:
    moved = cursor(last_epoch=5)
    if is_read:
        moved.move(10, 5)
    with pytest.raises(LogTruncated, match=f"read up to offset 10, the log diverges at offset {end_offset}"):
        moved.on_diverging((3, end_offset))
    assert moved.log_position == LogPosition(10, 5, not is_read)


def test_verification_is_requested_once_for_each_offset() -> None:
    damaged = cursor()
    assert damaged.request_verification(CORRUPT, 40)
    assert damaged.to_verify == range(10, 40)
    damaged.move(20)
    assert not damaged.request_verification(CORRUPT, 40), "the broker verified this batch"
    damaged.move(40)
    assert damaged.request_verification(CORRUPT, 50)


@pytest.mark.parametrize("error", [ValueError("other"), BrokerError(ErrorCode.SCHEMA_MISMATCH, "other")])
def test_only_damaged_batches_are_verified(error: Exception) -> None:
    assert not cursor().request_verification(error, 40)


def test_a_retriable_error_delays_the_next_fetch() -> None:
    failing = cursor()
    fail(failing, ErrorCode.NOT_LEADER_OR_FOLLOWER, 7.0)
    assert (failing.failures, failing.retry_at, failing.failing_s(8.0)) == (1, 7.1, 1.0)
    failing.end_failures()
    assert (failing.failures, failing.retry_at, failing.failing_s(8.0)) == (0, 0.0, 0.0)


def test_a_lasting_error_names_the_position() -> None:
    with pytest.raises(BrokerError, match="t-0 at offset 10: on purpose"):
        fail(cursor(), ErrorCode.OFFSET_OUT_OF_RANGE, 7.0)


def test_an_unknown_topic_is_an_error_after_the_grace_period() -> None:
    failing = cursor()
    for now in (7.0, 8.5):
        fail(failing, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, now)
    with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        fail(failing, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 8.6)


def test_failures_end_in_a_timeout() -> None:
    failing = cursor()
    for now in (7.0, 9.0):
        fail(failing, ErrorCode.NETWORK_EXCEPTION, now, timeout_s=2.0)
    with pytest.raises(ClientTimeout, match="t-0 at offset 10: not possible for 2 s, last: NETWORK_EXCEPTION"):
        fail(failing, ErrorCode.NETWORK_EXCEPTION, 9.1, timeout_s=2.0)


def test_empty_responses_are_timed_from_the_first() -> None:
    waiting = cursor()
    assert waiting.on_empty("nothing", 7.0) == 0.0
    assert waiting.on_empty("nothing", 9.0) == 2.0
