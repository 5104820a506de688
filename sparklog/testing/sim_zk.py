"""The simulated ZooKeeper: a process with sessions, versioned partition nodes, registrations and requests.

Each method is one atomic operation of a real server (a multi if it checks several nodes). The data survives a restart
of the server. ``SimSession`` models the delay and loss of requests and responses, and the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparklog.controller.effects import StateWrite
from sparklog.controller.events import ElectionRequested, TruncationRefused
from sparklog.model import LeaderAndIsr, TopicPartition, TopicRecord, TopicStates, VersionedState
from sparklog.testing.sim_network import ZK, SimNetwork
from sparklog.testing.sim_process import SimProcess

SESSION_MS = 400
_LOOK_MS = 50
#: The expected version of a node that does not exist and will be created.
_CREATE = -1
#: One of this number of notifications names no partitions.
_TOO_MUCH = 10


class Registration(NamedTuple):
    """The content of a broker's ephemeral node: the broker's incarnation and its session."""

    incarnation: int
    session_id: int


@dataclass(frozen=True, slots=True)
class BadVersion:
    """The result of a write whose expected version was wrong.

    ``found`` is the content of the node, or None if there is no node.
    """

    found: VersionedState | None


@dataclass(frozen=True, slots=True)
class NodeGone:
    """The result of a write that had no effect because the topic with that id is deleted."""


@dataclass(frozen=True, slots=True)
class EpochLost:
    """The result of a write that had no effect because another controller has been elected."""


class Levels(NamedTuple):
    """The content of all nodes that a controller watches, at one moment."""

    controller_session: int
    registered: dict[int, int]
    #: By broker: the logs that may lack records. An empty set means all logs.
    untrusted: dict[int, frozenset[TopicPartition]]
    retired: frozenset[int]
    stopping: dict[int, int]
    #: The metadata of each topic, with the version of its node.
    topics: dict[str, tuple[TopicRecord, int]]
    deletions: dict[str, str]
    elections: dict[str, ElectionRequested]
    #: By notification: the states that leaders have reported as written. If empty, any partition may have changed.
    isr_changes: dict[int, tuple[TopicStates, ...]]
    refusals: tuple[TruncationRefused, ...]


Written = Callable[[TopicPartition, VersionedState | None, VersionedState], None]


class SimZk(SimProcess):
    """The simulated ZooKeeper server, which all simulated processes share. A part of ``SimCluster``.

    For the checkers, it calls ``on_write`` with each new partition state, and ``on_topic`` with new metadata of a
    topic.
    """

    def __init__(self, world: SimNetwork, on_write: Written, on_topic: Callable[[TopicRecord], None]) -> None:
        super().__init__(ZK, world)
        self.nodes: dict[TopicPartition, VersionedState] = {}
        self.topics: dict[str, TopicRecord] = {}
        self.topic_versions: dict[str, int] = {}
        self.deletions: dict[str, str] = {}
        self.elections: dict[str, ElectionRequested] = {}
        self.registered: dict[int, Registration] = {}
        #: The untrusted brokers that no controller has recorded yet, with the logs that may lack records. An empty set
        #: means all logs.
        self.untrusted: dict[int, frozenset[TopicPartition]] = {}
        #: The last incarnation of each broker whose process has ended, as a supervisor has seen.
        self.retired: dict[int, int] = {}
        #: The brokers that have asked the controller to move their leaderships, with their incarnation.
        self.stopping: dict[int, int] = {}
        self.isr_changes: dict[int, tuple[TopicStates, ...]] = {}
        #: By broker and partition: the session of the broker, and the refused truncation.
        self.refusals: dict[tuple[int, TopicPartition], tuple[int, TruncationRefused]] = {}
        self.controller_epoch = 0
        self.controller_session = -1
        #: The name of the controller whose term began last.
        self.last_elected = ""
        self._incarnations: dict[int, int] = {}
        self._on_write = on_write
        self._on_topic = on_topic
        self._heard: dict[int, int] = {}
        self._over: set[int] = set()
        self._sessions = 0
        self._notifications = 0
        #: The number of each broker's last notification.
        self._notified: dict[int, int] = {}

    # --- sessions -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server. The sessions survive a restart, and their timeouts begin again."""
        self.begin()
        self._heard = dict.fromkeys(self._heard, self.now_ms)
        self.later(_LOOK_MS, self._look)

    def next_session(self) -> int:
        self._sessions += 1
        return self._sessions

    def touch(self, session_id: int) -> bool:
        """Record a request of the session; return whether the session exists."""
        if session_id in self._over:
            return False
        self._heard[session_id] = self.now_ms
        return True

    def end_session(self, session_id: int) -> None:
        """End the session and delete its ephemeral nodes."""
        self._over.add(session_id)
        self._heard.pop(session_id, None)
        for broker, registration in list(self.registered.items()):
            if registration.session_id == session_id:
                self._unregister(broker)
        if self.controller_session == session_id:
            self.controller_session = -1
        self.refusals = {key: found for key, found in self.refusals.items() if found[0] != session_id}

    def _unregister(self, broker_id: int) -> None:
        del self.registered[broker_id]
        self.stopping.pop(broker_id, None)

    def _look(self) -> None:
        for session_id, heard_ms in list(self._heard.items()):
            if self.now_ms - heard_ms > SESSION_MS:
                self.world.note(f"zk: session {session_id} expires")
                self.world.happened["session expired"] += 1
                self.end_session(session_id)
        self.later(_LOOK_MS, self._look)

    # --- brokers ------------------------------------------------------------------------------------------------

    def register(
        self,
        broker_id: int,
        session_id: int,
        *,
        after: int,
        lost_page_cache: bool,
        lost_logs: frozenset[TopicPartition] = frozenset(),
    ) -> int | None:
        """Register the next incarnation of a broker, and its ephemeral node, in one multi.

        A repeated call of the same session returns the same incarnation. Return None if the last incarnation is not
        ``after``. ``lost_page_cache`` and ``lost_logs`` are the losses since ``after``. With a loss, the broker counts
        as untrusted until a controller has recorded the loss.
        """
        held = self.registered.get(broker_id)
        if held is not None and held.session_id == session_id:
            return held.incarnation
        if self.incarnation(broker_id) != after:
            return None
        if lost_page_cache:
            self.untrusted[broker_id] = frozenset()
        elif lost_logs and self.untrusted.get(broker_id, lost_logs):
            self.untrusted[broker_id] = self.untrusted.get(broker_id, frozenset()) | lost_logs
        incarnation = self._incarnations.get(broker_id, 0) + 1
        self._incarnations[broker_id] = incarnation
        self.registered[broker_id] = Registration(incarnation, session_id)
        self.stopping.pop(broker_id, None)
        return incarnation

    def ask_to_stop(self, broker_id: int, incarnation: int) -> None:
        """Record that this incarnation of the broker asks the controller to move its leaderships."""
        registration = self.registered.get(broker_id)
        if registration is not None and registration.incarnation == incarnation:
            self.stopping[broker_id] = incarnation

    def withdraw_stop(self, broker_id: int) -> None:
        self.stopping.pop(broker_id, None)

    def trust(self, broker_id: int, incarnation: int) -> None:
        """Delete the record that the broker is untrusted, unless a later incarnation has registered."""
        if self.incarnation(broker_id) == incarnation:
            self.untrusted.pop(broker_id, None)

    def incarnation(self, broker_id: int) -> int:
        """Return the incarnation with which the broker last registered; 0 if it never has."""
        return self._incarnations.get(broker_id, 0)

    def absent(self) -> dict[int, int]:
        """Return, by broker, the last incarnations of brokers that are not registered now, except untrusted ones."""
        away = self._incarnations.keys() - self.registered.keys() - self.untrusted.keys()
        return {broker_id: self._incarnations[broker_id] for broker_id in sorted(away)}

    def retire(self, broker_id: int, incarnation: int) -> None:
        """Delete the registration of a broker process that has ended, and store that the process has ended."""
        registration = self.registered.get(broker_id)
        if registration is not None and registration.incarnation == incarnation:
            self._unregister(broker_id)
            self.retired[broker_id] = incarnation
            self.world.happened["retired by the supervisor"] += 1

    # --- controllers --------------------------------------------------------------------------------------------

    def elect(self, session_id: int) -> int | None:
        """Create ``/controller`` for this session and return a new controller epoch.

        Return None if another session has the node. If this session already has it, return the current epoch.
        """
        if self.controller_session not in {-1, session_id}:
            return None
        if self.controller_session == -1:
            self.controller_session = session_id
            self.controller_epoch += 1
        return self.controller_epoch

    def levels(self) -> Levels:
        live = self.registered
        return Levels(
            self.controller_session,
            {broker: live[broker].incarnation for broker in sorted(live)},
            dict(self.untrusted),
            self._retired(),
            dict(self.stopping),
            {name: (record, self.topic_versions[name]) for name, record in self.topics.items()},
            dict(self.deletions),
            dict(self.elections),
            dict(self.isr_changes),
            self._refusals(),
        )

    def shows(self, levels: Levels) -> bool:
        """Return whether the nodes still have the content ``levels``."""
        live = levels.registered
        return (
            self.controller_session == levels.controller_session
            and self.isr_changes == levels.isr_changes
            and len(self.registered) == len(live)
            and all(live.get(broker) == found.incarnation for broker, found in self.registered.items())
            and self.untrusted == levels.untrusted
            and self.stopping == levels.stopping
            and self.deletions == levels.deletions
            and self.elections == levels.elections
            and self.topics.keys() == levels.topics.keys()
            and all(
                self.topics[name] is record and self.topic_versions[name] == version
                for name, (record, version) in levels.topics.items()
            )
            and self._retired() == levels.retired
            and self._refusals() == levels.refusals
        )

    def _retired(self) -> frozenset[int]:
        live = self.registered
        return frozenset(b for b, last in self.retired.items() if b not in live and self.incarnation(b) == last)

    def _refusals(self) -> tuple[TruncationRefused, ...]:
        return tuple(refusal for _, refusal in self.refusals.values())

    def refuse_truncation(self, session_id: int, refusal: TruncationRefused) -> None:
        """Record that a replica refuses to truncate, because it has committed records that its leader lacks.

        The record is deleted when the session ends.
        """
        self.refusals[refusal.broker_id, refusal.tp] = session_id, refusal

    def accept_truncation(self, broker_id: int, tp: TopicPartition) -> None:
        self.refusals.pop((broker_id, tp), None)

    def notify(self, broker_id: int, told: tuple[TopicStates, ...]) -> None:
        """Add a leader's report of written ISRs to its earlier reports, and store them under a new number.

        Sometimes the report counts as too large for a node. Then the stored report names no partitions.
        """
        earlier = self.isr_changes.pop(self._notified.get(broker_id, -1), None)
        self._notifications += 1
        self._notified[broker_id] = self._notifications
        too_much = earlier == () or self._notifications % _TOO_MUCH == 0
        self.isr_changes[self._notifications] = () if too_much else (*(earlier or ()), *told)

    def delete_notifications(self, numbers: Iterable[int], controller_epoch: int) -> None:
        if controller_epoch == self.controller_epoch:
            for number in numbers:
                self.isr_changes.pop(number, None)

    # --- topics -------------------------------------------------------------------------------------------------

    def put_topic(self, record: TopicRecord) -> None:
        """Create a topic, or replace its metadata."""
        known = self.topics.get(record.name)
        same = known is not None and known.topic_id == record.topic_id
        self.topic_versions[record.name] = self.topic_versions[record.name] + 1 if same else 0
        self.topics[record.name] = record
        self._on_topic(record)

    def write_topic(self, record: TopicRecord, expected_version: int, writes: Sequence[StateWrite]) -> bool:
        """Write a topic's metadata and states of its partitions atomically. Return False if a version differs."""
        if not self.has_topic(record.name, record.topic_id) or self.topic_versions[record.name] != expected_version:
            return False
        nodes = [self.nodes.get(write.tp) for write in writes]
        if any(n is None or n.version != w.expected_version for n, w in zip(nodes, writes, strict=True)):
            return False
        for write in writes:
            self.write_state(
                write.tp,
                write.state,
                write.expected_version,
                topic_id=record.topic_id,
                leader_incarnation=write.leader_incarnation,
            )
        self.put_topic(record)
        return True

    def has_topic(self, name: str, topic_id: str) -> bool:
        return name in self.topics and self.topics[name].topic_id == topic_id

    def delete_topic(self, name: str, topic_id: str, controller_epoch: int) -> bool:
        """Delete the topic's nodes and its deletion request. Idempotent.

        Return False if there is a newer controller epoch.
        """
        if controller_epoch != self.controller_epoch:
            return False
        if self.has_topic(name, topic_id):
            del self.topics[name]
            self.nodes = {tp: node for tp, node in self.nodes.items() if tp.topic != name}
        self.drop_deletion(name, topic_id)
        return True

    def drop_deletion(self, name: str, topic_id: str) -> None:
        if self.deletions.get(name) == topic_id:
            del self.deletions[name]

    def read(self, tp: TopicPartition) -> VersionedState | None:
        return self.nodes.get(tp)

    def states(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, VersionedState | None]:
        return {tp: self.nodes.get(tp) for tp in partitions}

    def write_state(
        self,
        tp: TopicPartition,
        state: LeaderAndIsr,
        expected_version: int,
        *,
        topic_id: str,
        leader_incarnation: int,
        added: tuple[tuple[int, int], ...] = (),
    ) -> VersionedState | BadVersion | NodeGone:
        """Write a partition's state in a multi.

        The multi checks the node's version, the topic id, and the incarnations of the brokers ``added`` to the ISR.
        """
        if not self.has_topic(tp.topic, topic_id):
            return NodeGone()
        before = self.nodes.get(tp)
        version = _CREATE if before is None else before.version
        if version != expected_version or any(self.incarnation(b) != i for b, i in added):
            return BadVersion(before)
        after = VersionedState(state, version + 1, leader_incarnation)
        self.nodes[tp] = after
        self._on_write(tp, before, after)
        return after
