"""The moves of leaderships away from stopping brokers, a limited number at a time.

The objects of this module are not thread-safe: they are parts of ``Controller``. While a leadership moves, its
partition may accept no writes for a short time. If thousands moved at once, the brokers' event loops would take long to
process the updates, and each partition would wait for all moves. So only as many moves are in flight as brokers handle
quickly. The next moves start when half of the earlier moves have reached the brokers, so that ZooKeeper always has
writes to perform. No move waits for a broker that does not respond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from sparklog.controller.cluster_state import ClusterPartition

_AT_ONCE = 500
_PATIENCE_MS = 500


class PendingMoves:
    def __init__(self) -> None:
        #: Moves that are decided and may not have reached the brokers yet.
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
        """Queue partitions whose leadership must move. ``next_ready`` returns them later."""
        self._queued.update(dict.fromkeys(partitions))

    def begin(self, partition: ClusterPartition, now_ms: int) -> bool:
        """Start the move of a partition's leadership, or queue it if too many are in flight.

        Return whether it starts.
        """
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
        """Return the queued partitions whose moves may start now.

        They may start when at least half of the earlier moves have been written and sent to the brokers (``has_sent``),
        or after a timeout.
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
        """Forget the started moves that brokers have received, up to the first move that they have not received."""
        done = []
        for partition in self._started:
            if partition.pending is not None or not has_sent(partition):
                break
            done.append(partition)
        for partition in done:
            del self._started[partition]
