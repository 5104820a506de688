"""The partitions that block a controlled shutdown: a live leader still has the stopping broker in the ISR.

The controller checks this in every step while brokers shut down, and the number of these partitions falls gradually.
Each check therefore starts with the partitions that the last check found. A check examines all partitions of a broker
only when none of the remembered partitions blocks the shutdown any more. The objects of this module are not
thread-safe: they are parts of ``Controller``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from sparklog.controller.cluster_state import ClusterPartition, ClusterState


class ShutdownBlockers:
    """A tracker of the partitions that block the controlled shutdown of brokers. Use only its method ``among``."""

    def __init__(self) -> None:
        #: For each stopping broker, the partitions that blocked its shutdown at the last full check and may still do
        #: so. None means that no partition blocks the shutdown.
        self._left: dict[int, list[ClusterPartition] | None] = {}
        #: ``ClusterState.stored_count`` at the last check.
        self._seen = 0

    def among(self, leaving: Iterable[int], state: ClusterState, live: Container[int]) -> dict[int, bool]:
        """Return for each ``leaving`` broker whether a live leader still has it in its ISR.

        The ``leaving`` brokers lead no partition. ``live`` are the live brokers.

        A broker that no leader needs may become needed again, because a leader may have added it to its ISR before the
        leader learned of the shutdown. So the check runs again after new states become known.
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
