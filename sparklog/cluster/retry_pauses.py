"""The pauses between retries of an operation that may fail until an operator fixes the cause."""

from __future__ import annotations

from collections.abc import Iterator

FIRST_S = 0.2
LONGEST_S = 10.0


def growing_pauses(first_s: float = FIRST_S) -> Iterator[float]:
    """Yield pauses in seconds without end: each is twice the previous one, up to ten seconds."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(LONGEST_S, 2 * pause_s)
