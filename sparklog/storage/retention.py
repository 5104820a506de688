"""Which segments of a log are old enough to go. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SealedSegment(NamedTuple):
    """What retention has to know of a sealed segment."""

    size_bytes: int
    #: newest record, us
    max_timestamp_us: int


def deletable(
    sealed: Sequence[SealedSegment], *, log_size_bytes: int, now_us: int, retention_ms: int, retention_bytes: int
) -> int:
    """How many of the oldest sealed segments are to be deleted.

    By age: a segment whose newest record is older than ``retention_ms``, as long as all before it go as well. By size:
    the oldest, as long as the log without them still has ``retention_bytes``. -1 switches either off. Segments that are
    not sealed stay: they may hold what is not committed.
    """
    expired = 0
    if retention_ms >= 0:
        oldest_kept_us = now_us - retention_ms * 1000
        while expired < len(sealed) and sealed[expired].max_timestamp_us < oldest_kept_us:
            expired += 1
    surplus = 0
    if retention_bytes >= 0:
        left = log_size_bytes
        while surplus < len(sealed) and left - sealed[surplus].size_bytes >= retention_bytes:
            left -= sealed[surplus].size_bytes
            surplus += 1
    return max(expired, surplus)
