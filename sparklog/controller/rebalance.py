"""The times at which leaderships return to the preferred leaders: once per interval, a limited number at a time.

After an absence of a broker, other brokers lead its partitions. A return causes a short pause for each partition, so
they do not all return at once. Mutable, owned by one ``Controller``. Source: Kafka's ``auto.leader.rebalance.enable``.
"""

from __future__ import annotations

#: Leaderships moved in one round, and the pause before the next round if there are more.
MAX_MOVED = 500
_NEXT_ROUND_MS = 1000


class Rebalance:
    """The schedule of rounds; ``interval_ms`` 0 disables it."""

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self.deadline_ms: int | None = None

    def start(self, now_ms: int) -> None:
        """Start a term, and give brokers one interval to return."""
        if self._interval_ms:
            self.deadline_ms = now_ms + self._interval_ms

    def due(self, now_ms: int) -> bool:
        return self.deadline_ms is not None and now_ms >= self.deadline_ms

    def on_round(self, now_ms: int, *, moved: int) -> None:
        pause_ms = min(_NEXT_ROUND_MS, self._interval_ms) if moved >= MAX_MOVED else self._interval_ms
        self.deadline_ms = now_ms + pause_ms
