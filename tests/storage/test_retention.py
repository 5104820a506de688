"""Tests of the segments that are old enough to be deleted: a pure decision."""

from __future__ import annotations

import pytest

from sparklog.storage.retention import SealedSegment, deletable, due_us

SEGMENTS = [SealedSegment(100, 10_000), SealedSegment(100, 30_000), SealedSegment(100, 20_000)]


@pytest.mark.parametrize(
    ("now_us", "retention_ms", "retention_bytes", "expected"),
    [
        (50_000, -1, -1, 0),
        (15_000, 5, -1, 0),
        (15_001, 5, -1, 1),
        # the third is older than the second, but is deleted only after it
        (30_000, 5, -1, 1),
        (35_001, 5, -1, 3),
        (0, -1, 350, 0),
        (0, -1, 250, 1),
        (0, -1, 249, 1),
        (0, -1, 150, 2),
        (0, -1, 0, 3),
        (15_001, 5, 150, 2),
    ],
)
def test_segments_are_deletable_by_age_and_size(
    now_us: int, retention_ms: int, retention_bytes: int, expected: int
) -> None:
    """The log has 50 bytes in its active segment besides the three sealed ones."""
    found = deletable(
        SEGMENTS, log_size_bytes=350, now_us=now_us, retention_ms=retention_ms, retention_bytes=retention_bytes
    )
    assert found == expected
    due = due_us(SEGMENTS[0], log_size_bytes=350, retention_ms=retention_ms, retention_bytes=retention_bytes)
    assert (due is not None and due <= now_us) == (expected > 0), "retention is not due earlier"


@pytest.mark.parametrize(
    ("read_to", "hard_ms", "expected"),
    [(None, -1, 3), (0, -1, 0), (9, -1, 0), (10, -1, 1), (25, -1, 2), (99, -1, 3), (0, 0, 3), (10, 10**9, 1)],
)
def test_unread_records_wait_for_the_hard_retention_limit(read_to: int | None, hard_ms: int, expected: int) -> None:
    sealed = [SealedSegment(100, 1_000, 10), SealedSegment(100, 2_000, 20), SealedSegment(100, 3_000, 30)]
    found = deletable(
        sealed,
        log_size_bytes=300,
        now_us=1_000_000,
        retention_ms=1,
        retention_bytes=-1,
        read_to=read_to,
        retention_hard_ms=hard_ms,
    )
    assert found == expected
