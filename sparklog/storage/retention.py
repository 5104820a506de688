"""The segments of a log that retention deletes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SealedSegment(NamedTuple):
    """The facts of a sealed segment that retention needs."""

    size_bytes: int
    #: The newest record's time, us.
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
    """Return the number of the oldest sealed segments to delete.

    By age: a segment whose newest record is older than ``retention_ms``, if all earlier ones are deleted too. By size:
    the oldest, while the log without them still has ``retention_bytes``. -1 disables either. Unsealed segments stay,
    because they may hold uncommitted records. A segment that ends above ``read_to`` (if given) also stays, whatever its
    age and the log's size, until it is older than ``retention_hard_ms``.
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
    """Return when ``deletable`` may next find a segment while the log does not change, or None for never.

    ``oldest`` is the first sealed segment. The time is in us since the epoch; 0: now.
    """
    if 0 <= retention_bytes <= log_size_bytes - oldest.size_bytes:
        return 0
    return oldest.max_timestamp_us + retention_ms * 1000 + 1 if retention_ms >= 0 else None


def _older(sealed: Sequence[SealedSegment], now_us: int, age_ms: int) -> int:
    """Return how many of the first segments are older than ``age_ms``; none if it is -1."""
    count = 0
    if age_ms >= 0:
        oldest_kept_us = now_us - age_ms * 1000
        while count < len(sealed) and sealed[count].max_timestamp_us < oldest_kept_us:
            count += 1
    return count
