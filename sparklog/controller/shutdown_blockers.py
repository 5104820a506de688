"""Who still counts on brokers that asked to be relieved: leaders at work that have them in their in-sync sets.

Asked in every step while there are such brokers, whose partitions become fewer by and by: so what was found at one look
is gone through first, and all that a broker hosts only where none of it is left. Mutable, owned by one ``Controller``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from sparklog.controller.cluster_state import ClusterState, Partition


class ShutdownBlockers:
    """``among`` is all there is to ask."""

    def __init__(self) -> None:
        #: By broker, those that counted on it when all it hosts was looked at last, but for those that do not any more.
        #: None: nobody does.
        self._left: dict[int, list[Partition] | None] = {}
        #: How many states had become known when that was found.
        self._seen = 0

    def among(self, leaving: Iterable[int], state: ClusterState, live: Container[int]) -> dict[int, bool]:
        """Whether leaders count on these brokers, which lead nothing. ``live`` are brokers at work.

        Who is counted on by nobody may be again: a leader may have taken it in before it heard that it leaves. That is
        looked for as states become known.
        """
        if self._seen != state.stores:
            self._seen = state.stores
            self._left = {broker_id: left or [] for broker_id, left in self._left.items()}
        self._left = {broker_id: self._look(broker_id, state, live) for broker_id in leaving}
        return {broker_id: left is not None for broker_id, left in self._left.items()}

    def _look(self, broker_id: int, state: ClusterState, live: Container[int]) -> list[Partition] | None:
        left = self._left.get(broker_id, [])
        if left is None:
            return None
        while left and not _counts(left[-1], broker_id, live):
            left.pop()
        if not left:
            left += (partition for partition in state.hosted(broker_id) if _counts(partition, broker_id, live))
        return left or None


def _counts(partition: Partition, broker_id: int, live: Container[int]) -> bool:
    stored = partition.stored
    return stored is not None and broker_id in stored.state.isr and stored.state.leader in live
