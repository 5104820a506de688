"""The rules by which retention chooses the segments of a log to delete.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SealedSegment(NamedTuple):
    """The properties of a sealed segment on which retention depends."""

    size_bytes: int
    #: The greatest timestamp of a record, in microseconds.
    max_timestamp_us: int
    end_offset: int = 0


def deletable(
    sealed: Sequence[SealedSegment],
    *,
    log_size_bytes: int,
    now_us: int,
    retention_ms: int,
    retention_bytes: int,
    read_to: int | None = None,
    retention_hard_ms: int = -1,
) -> int:
    """Return how many of the oldest sealed segments to delete.

    - By age: the oldest segments, as long as a segment's newest record is older than ``retention_ms``.
    - By size: the oldest segments, as long as the rest of the log has at least ``retention_bytes``.

    -1 disables a rule. Unsealed segments are not deleted, because they may have uncommitted records. If ``read_to`` is
    given, a segment that ends above this offset is kept too, until the segment is older than ``retention_hard_ms``.
    """
    expired = _older(sealed, now_us, retention_ms)
    surplus = 0
    if retention_bytes >= 0:
        left = log_size_bytes
        while surplus < len(sealed) and left - sealed[surplus].size_bytes >= retention_bytes:
            left -= sealed[surplus].size_bytes
            surplus += 1
    most = max(expired, surplus)
    if read_to is None:
        return most
    read = 0
    while read < most and sealed[read].end_offset <= read_to:
        read += 1
    return min(most, max(read, _older(sealed, now_us, retention_hard_ms)))


def due_us(oldest: SealedSegment, *, log_size_bytes: int, retention_ms: int, retention_bytes: int) -> int | None:
    """Return the next time at which ``deletable`` will return a segment if the log does not change. None means never.

    ``oldest`` is the first sealed segment. The time is in microseconds since the epoch, or 0 if a segment is deletable
    now.
    """
    if 0 <= retention_bytes <= log_size_bytes - oldest.size_bytes:
        return 0
    return oldest.max_timestamp_us + retention_ms * 1000 + 1 if retention_ms >= 0 else None


def _older(sealed: Sequence[SealedSegment], now_us: int, age_ms: int) -> int:
    """Return how many segments, from the oldest on, are older than ``age_ms``. Return 0 if ``age_ms`` is -1."""
    count = 0
    if age_ms >= 0:
        oldest_kept_us = now_us - age_ms * 1000
        while count < len(sealed) and sealed[count].max_timestamp_us < oldest_kept_us:
            count += 1
    return count
