"""The ISR of one partition in its leader's memory: committed, or with one change in flight.

    CommittedIsr --expand--> PendingExpand --written--> CommittedIsr
    CommittedIsr --shrink--> PendingShrink --written--> CommittedIsr
                             (either)      --refused--> CommittedIsr as before

While a change is in flight, the leader does not know which of the two sets ZooKeeper has, and the next leader may come
from either set. So a record is committed when all brokers in the *maximal* ISR, the union of both sets, have the
record. An added broker is in the maximal ISR at once. A removed broker is in it until the removal is written.
Constructors refuse illegal states: an ISR without its leader, an empty ISR, a broker named twice, two changes at a
time. Source: KIP-497 (maximal ISR).
"""

from __future__ import annotations

import msgspec


class CommittedIsr(msgspec.Struct, frozen=True, gc=False):
    """The ISR that this leader last knew to be in ZooKeeper, while no change of it is in flight."""

    leader: int
    committed: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.leader not in self.committed:
            raise ValueError(f"ISR {self.committed} lacks its leader {self.leader}")
        if len(set(self.committed)) != len(self.committed):
            raise ValueError(f"ISR {self.committed} names a broker twice")

    @property
    def maximal(self) -> tuple[int, ...]:
        return self.committed

    def expand(self, added: tuple[tuple[int, int], ...], *, expected_version: int) -> PendingExpand:
        """Return the state of the ISR in which the brokers in ``added`` are being added.

        ``added`` has (broker, incarnation) pairs. ``expected_version`` is the version that the partition's node must
        have when the change is written.
        """
        return PendingExpand(self, added, expected_version)

    def shrink(self, removed: tuple[int, ...], *, expected_version: int) -> PendingShrink:
        """Return the state of the ISR in which the brokers in ``removed`` are being removed.

        The leader must not be in ``removed``.
        """
        return PendingShrink(self, removed, expected_version)


class PendingExpand(msgspec.Struct, frozen=True, gc=False):
    """The ISR while the addition of brokers is being written to ZooKeeper.

    The write succeeds only if each added broker still has the incarnation that has fetched from the leader.
    """

    before: CommittedIsr
    added: tuple[tuple[int, int], ...]
    expected_version: int
    #: Whether the write got no response, so that it may or may not have been applied.
    outcome_unknown: bool = False

    def __post_init__(self) -> None:
        ids = {broker for broker, _ in self.added}
        if not ids or len(ids) != len(self.added):
            raise ValueError(f"addition {self.added} is empty or names a broker twice")
        if not ids.isdisjoint(self.before.committed):
            raise ValueError(f"addition {self.added} names members of {self.before.committed}")

    @property
    def committed(self) -> tuple[int, ...]:
        return self.before.committed

    @property
    def proposed(self) -> tuple[int, ...]:
        return self.before.committed + tuple(broker for broker, _ in self.added)

    @property
    def maximal(self) -> tuple[int, ...]:
        return self.proposed

    def written(self) -> CommittedIsr:
        return CommittedIsr(self.before.leader, self.proposed)

    def lost_response(self, unknown: bool) -> PendingExpand:
        return msgspec.structs.replace(self, outcome_unknown=unknown)


class PendingShrink(msgspec.Struct, frozen=True, gc=False):
    """The ISR while the removal of brokers is being written to ZooKeeper.

    The removed brokers count as members until the write has succeeded.
    """

    before: CommittedIsr
    removed: tuple[int, ...]
    expected_version: int
    #: Whether the write got no response, so that it may or may not have been applied.
    outcome_unknown: bool = False
    added: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        removed, committed = self.removed, self.before.committed
        # A loop instead of sets: when a broker fails, thousands of these objects are created, and sets would take most
        # of the time.
        proper = 0 < len(removed) < len(committed)
        for broker in removed:
            proper = proper and broker in committed
        if not proper:
            raise ValueError(f"removal {self.removed} is empty or not a proper subset of {self.before.committed}")
        if self.before.leader in self.removed:
            raise ValueError(f"removal {self.removed} names the leader {self.before.leader}")
        if self.added:
            raise ValueError("a removal adds no broker")

    @property
    def committed(self) -> tuple[int, ...]:
        return self.before.committed

    @property
    def proposed(self) -> tuple[int, ...]:
        removed = self.removed
        return tuple([broker for broker in self.before.committed if broker not in removed])

    @property
    def maximal(self) -> tuple[int, ...]:
        return self.before.committed

    def written(self) -> CommittedIsr:
        return CommittedIsr(self.before.leader, self.proposed)

    def lost_response(self, unknown: bool) -> PendingShrink:
        return msgspec.structs.replace(self, outcome_unknown=unknown)


PendingIsr = PendingExpand | PendingShrink
IsrState = CommittedIsr | PendingExpand | PendingShrink
