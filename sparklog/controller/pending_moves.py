"""Leaderships that move from stopping brokers, a limited number at a time.

Mutable, owned by one ``Controller``. A partition accepts no writes from the time at which its old leader receives the
news until the new leader has it. Thousands of moves at once keep the brokers' event loops from the news, and the moves
wait for one another. So no more are in flight than brokers handle quickly. The next ones start when half of them have
been sent to the brokers, so that meanwhile ZooKeeper has writes to perform. No move waits for a broker that does not
respond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from sparklog.controller.cluster_state import ClusterPartition

_AT_ONCE = 500
_PATIENCE_MS = 500


class PendingMoves:
    def __init__(self) -> None:
        #: Moves that are decided and may not have reached the brokers.
        self._started: dict[ClusterPartition, None] = {}
        self._queued: dict[ClusterPartition, None] = {}
        self._started_at_ms = 0

    @property
    def idle(self) -> bool:
        return not self._queued

    @property
    def deadline_ms(self) -> int | None:
        return self._started_at_ms + _PATIENCE_MS if self._queued else None

    def queue(self, partitions: Iterable[ClusterPartition]) -> None:
        """Queue partitions to be moved; ``next_ready`` returns them later."""
        self._queued.update(dict.fromkeys(partitions))

    def begin(self, partition: ClusterPartition, now_ms: int) -> bool:
        """Return whether the partition may be moved now; otherwise queue it for ``next_ready``."""
        if len(self._started) >= _AT_ONCE:
            self._queued[partition] = None
            return False
        self._queued.pop(partition, None)
        self._started[partition] = None
        self._started_at_ms = now_ms
        return True

    def forget(self, partition: ClusterPartition) -> None:
        self._started.pop(partition, None)
        self._queued.pop(partition, None)

    def next_ready(self, now_ms: int, has_sent: Callable[[ClusterPartition], bool]) -> list[ClusterPartition]:
        """Return the queued partitions that may start now.

        They start after most of the earlier ones are written and ``has_sent``, or have timed out.
        """
        if not self._queued or now_ms >= self._started_at_ms + _PATIENCE_MS:
            self._started.clear()
        else:
            self._drop_sent(has_sent)
        if len(self._started) > _AT_ONCE // 2:
            return []
        chosen = list(islice(self._queued, _AT_ONCE - len(self._started)))
        for partition in chosen:
            del self._queued[partition]
        return chosen

    def _drop_sent(self, has_sent: Callable[[ClusterPartition], bool]) -> None:
        """Drop the started moves that brokers have received, up to the first that they have not."""
        done = []
        for partition in self._started:
            if partition.pending is not None or not has_sent(partition):
                break
            done.append(partition)
        for partition in done:
            del self._started[partition]
