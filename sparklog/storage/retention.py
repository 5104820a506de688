"""Which segments of a log are old enough to go. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SealedSegment(NamedTuple):
    """What retention has to know of a sealed segment."""

    size_bytes: int
    #: newest record, us
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
    """How many of the oldest sealed segments are to be deleted.

    By age: a segment whose newest record is older than ``retention_ms``, as long as all before it go as well. By size:
    the oldest, as long as the log without them still has ``retention_bytes``. -1 switches either off. Segments that are
    not sealed stay: they may hold what is not committed. What ends above ``read_to`` (if it is given) stays as well,
    whatever its age and the log's size, until it is older than ``retention_hard_ms``.
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
    """When ``deletable`` may first find something while the log stays as it is, ``oldest`` being the first of its
    sealed segments; us since the epoch, 0: now. None: never."""
    if 0 <= retention_bytes <= log_size_bytes - oldest.size_bytes:
        return 0
    return oldest.max_timestamp_us + retention_ms * 1000 + 1 if retention_ms >= 0 else None


def _older(sealed: Sequence[SealedSegment], now_us: int, age_ms: int) -> int:
    """How many of the first are older; none when the age is -1."""
    count = 0
    if age_ms >= 0:
        oldest_kept_us = now_us - age_ms * 1000
        while count < len(sealed) and sealed[count].max_timestamp_us < oldest_kept_us:
            count += 1
    return count
