"""When leaderships that have wandered off are to go back to the preferred leaders: every so often, so many at a time.

After a broker was away its partitions are led by others. Moving them back costs each a short pause, so they do not all
move in one moment. Mutable, owned by one ``Controller``. Source: Kafka's ``auto.leader.rebalance.enable``.
"""

from __future__ import annotations

#: Leaderships moved in one round, and the pause to the next one while there are more.
MAX_MOVED = 500
_NEXT_ROUND_MS = 1000


class Rebalance:
    """``interval_ms`` 0: never."""

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self.deadline_ms: int | None = None

    def start(self, now_ms: int) -> None:
        """A term begins: brokers may be about to return, and are given one interval."""
        if self._interval_ms:
            self.deadline_ms = now_ms + self._interval_ms

    def due(self, now_ms: int) -> bool:
        return self.deadline_ms is not None and now_ms >= self.deadline_ms

    def looked(self, now_ms: int, *, moved: int) -> None:
        pause_ms = min(_NEXT_ROUND_MS, self._interval_ms) if moved >= MAX_MOVED else self._interval_ms
        self.deadline_ms = now_ms + pause_ms
