"""ZooKeeper as the replication protocol uses it: versioned partition nodes, registrations, incarnations.

Each method is one atomic operation of the real server (a multi where it checks several nodes). Delay and loss of
requests and replies are the callers' business: they come through ``SimWorld.send``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sparklog.model import LeaderAndIsr, TopicPartition, VersionedState


class Registration(NamedTuple):
    """An ephemeral broker node. ``trusted`` is false when the page cache was lost since the last clean state."""

    incarnation: int
    trusted: bool


@dataclass(frozen=True, slots=True)
class BadVersion:
    """The compare-and-set lost; this is what the node holds."""

    found: VersionedState


class SimZk:
    """Mutable, shared by all simulated processes. ``on_write`` sees each new partition state, for the checker."""

    def __init__(self, on_write: Callable[[TopicPartition, VersionedState, VersionedState], None]) -> None:
        self.nodes: dict[TopicPartition, VersionedState] = {}
        self.registered: dict[int, Registration] = {}
        #: brokers whose logs nobody vouches for until a controller has taken note
        self.untrusted: set[int] = set()
        #: last incarnation of each broker whose process was seen to end
        self.retired: dict[int, int] = {}
        self.controller_epoch = 0
        self._incarnations: dict[int, int] = {}
        self._on_write = on_write

    def create(self, tp: TopicPartition, state: LeaderAndIsr) -> None:
        self.nodes[tp] = VersionedState(state, 0)

    def read(self, tp: TopicPartition) -> VersionedState:
        return self.nodes[tp]

    def register(self, broker_id: int, *, lost_page_cache: bool) -> int:
        """One multi: the next incarnation, and the ephemeral node that names it. ``lost_page_cache``: since the last
        registration; the mark stays until a controller has taken note."""
        if lost_page_cache:
            self.untrusted.add(broker_id)
        incarnation = self._incarnations.get(broker_id, 0) + 1
        self._incarnations[broker_id] = incarnation
        self.registered[broker_id] = Registration(incarnation, broker_id not in self.untrusted)
        return incarnation

    def trust(self, broker_id: int, incarnation: int) -> None:
        """Forget that the page cache was lost, unless yet another incarnation has registered."""
        if self.incarnation(broker_id) == incarnation:
            self.untrusted.discard(broker_id)

    def incarnation(self, broker_id: int) -> int:
        """The last registered one, whether its session lives or not; 0 before the first."""
        return self._incarnations.get(broker_id, 0)

    def expire(self, broker_id: int, incarnation: int) -> None:
        """The session of that incarnation ended."""
        registration = self.registered.get(broker_id)
        if registration is not None and registration.incarnation == incarnation:
            del self.registered[broker_id]

    def retire(self, broker_id: int, incarnation: int) -> None:
        """Whoever saw the process end deletes its registration, and leaves a mark that says so."""
        registration = self.registered.get(broker_id)
        if registration is not None and registration.incarnation == incarnation:
            del self.registered[broker_id]
            self.retired[broker_id] = incarnation

    def write_state(
        self,
        tp: TopicPartition,
        state: LeaderAndIsr,
        expected_version: int,
        *,
        leader_incarnation: int,
        added: tuple[tuple[int, int], ...] = (),
    ) -> VersionedState | BadVersion:
        """Compare-and-set, in a multi that checks the incarnation of each added broker."""
        before = self.nodes[tp]
        if before.version != expected_version or any(self.incarnation(b) != i for b, i in added):
            return BadVersion(before)
        after = VersionedState(state, before.version + 1, leader_incarnation)
        self.nodes[tp] = after
        self._on_write(tp, before, after)
        return after
