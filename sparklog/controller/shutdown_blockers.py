"""Leaders that still need brokers in controlled shutdown: live leaders with these brokers in their ISRs.

The controller checks this in every step while such brokers exist, and their partitions decrease gradually. The check
therefore starts with the partitions that the last check found. It examines all partitions of a broker only when none of
those is left. Mutable, owned by one ``Controller``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from sparklog.controller.cluster_state import ClusterPartition, ClusterState


class ShutdownBlockers:
    """The partitions that block the shutdown of brokers; ``among`` is the only query."""

    def __init__(self) -> None:
        #: By broker, the partitions that needed it at the last full check, without those that no longer do. None: no
        #: partition needs it.
        self._left: dict[int, list[ClusterPartition] | None] = {}
        #: The number of stored states at that check.
        self._seen = 0

    def among(self, leaving: Iterable[int], state: ClusterState, live: Container[int]) -> dict[int, bool]:
        """Return for each of these brokers, which lead nothing, whether leaders need it.

        ``live`` are the live brokers.

        A broker that no leader needs may be needed again: a leader may have added it before the leader received the
        news of its shutdown. The check runs again when states become known.
        """
        if self._seen != state.stored_count:
            self._seen = state.stored_count
            self._left = {broker_id: left or [] for broker_id, left in self._left.items()}
        self._left = {broker_id: self._check(broker_id, state, live) for broker_id in leaving}
        return {broker_id: left is not None for broker_id, left in self._left.items()}

    def _check(self, broker_id: int, state: ClusterState, live: Container[int]) -> list[ClusterPartition] | None:
        left = self._left.get(broker_id, [])
        if left is None:
            return None
        while left and not _blocks(left[-1], broker_id, live):
            left.pop()
        if not left:
            left += (partition for partition in state.hosted(broker_id) if _blocks(partition, broker_id, live))
        return left or None


def _blocks(partition: ClusterPartition, broker_id: int, live: Container[int]) -> bool:
    stored = partition.stored
    return stored is not None and broker_id in stored.state.isr and stored.state.leader in live
