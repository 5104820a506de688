"""What one broker incarnation has still to be told: an outbox that holds names, not messages.

An update is built from the cluster's state at the moment it can be sent, so a broker that is slow or away gets the
newest decision only, and a lost update is simply told again: brokers order decisions by node version. The first
update of an incarnation is full. At most one update is under way.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sparklog.controller.cluster_state import ClusterState, Partition, Topic
from sparklog.model import NO_LEADER, BrokerEndpoint, BrokerRegistration, VersionedState
from sparklog.protocol.messages import ControlUpdate, PartitionDecision

_RETRY_FIRST_MS = 50
_RETRY_MAX_MS = 1000
#: Between updates to one broker while more decisions are being written: thousands of them in a failure become some
#: hundred updates, and no decision waits longer than this. Nothing waits when nothing more is coming.
_PACE_MS = 10


class BrokerLink:
    """Owner: one ``Controller``. Made for one incarnation and dropped with it."""

    def __init__(self, registration: BrokerRegistration) -> None:
        self.registration = registration
        self.retry_at_ms: int | None = None
        self.in_flight: int | None = None
        #: Decisions in the update under way.
        self.telling = 0
        self._sent_at_ms: int | None = None
        self._failures = 0
        self._sent_full = False
        self._sent_brokers = False
        self._sent_topics: set[str] = set()
        self._sent_partitions: dict[Partition, None] = {}
        self._sent_deleted: dict[tuple[str, str], None] = {}
        self._full = True
        self._brokers = True
        self._topics: set[str] = set()
        self._partitions: dict[Partition, None] = {}
        self._deleted: dict[tuple[str, str], None] = {}
        #: News of these that have time.
        self._put_off: dict[Partition, None] = {}
        #: Whether nobody counts on this broker, which asked for that.
        self._relieved = False
        #: What it was told of that; None: nobody knows whether it has heard.
        self._told_relieved: bool | None = False

    # --- what there is to tell -------------------------------------------------------------------------------------

    def brokers_changed(self) -> None:
        self._brokers = True

    def partitions_changed(self, partitions: Iterable[Partition]) -> None:
        if not self._full:
            self._partitions.update(dict.fromkeys(partitions))

    def put_off(self, partitions: Iterable[Partition]) -> None:
        """There is news of these, which is told when ``told_after_all`` says so, or there is more."""
        if not self._full:
            self._put_off.update(dict.fromkeys(partitions))

    def told_after_all(self) -> None:
        put_off, self._put_off = self._put_off, {}
        self.partitions_changed(put_off)

    def relieved(self, relieved: bool) -> None:
        self._relieved = relieved

    def topic_changed(self, topic: Topic) -> None:
        if not self._full:
            self._topics.add(topic.record.name)

    def topic_gone(self, topic: Topic, *, deleted: bool) -> None:
        """Tell the broker that a topic is gone: by name where it was ``deleted``, and otherwise by an update that tells
        everything and does not name the topic. Such a broker sets its logs aside."""
        for partition in topic.partitions:
            self._partitions.pop(partition, None)
            self._put_off.pop(partition, None)
            self._sent_partitions.pop(partition, None)
        self._topics.discard(topic.record.name)
        self._sent_topics.discard(topic.record.name)
        if topic.announced and not deleted:
            self._full = True
        elif topic.announced:
            # Named even when a full update is due: that one may be under way already, built before.
            self._deleted[topic.record.name, topic.record.topic_id] = None

    def ready(self, now_ms: int, *, more_coming: bool) -> bool:
        """Something is to be told and may be sent now; else ``retry_at_ms`` says when, if that is a matter of time."""
        if self.in_flight is not None or not self._waiting:
            return False
        if self._failures == 0:
            # A death lets leaders shrink their ISRs; who is relieved waits for nothing else.
            urgent = self._full or self._brokers or self._relieved != self._told_relieved
            paced = more_coming and not urgent and self._sent_at_ms is not None
            self.retry_at_ms = (self._sent_at_ms or 0) + _PACE_MS if paced else None
        return self.retry_at_ms is None or now_ms >= self.retry_at_ms

    @property
    def _waiting(self) -> bool:
        return (
            self._full
            or self._brokers
            or self._relieved != self._told_relieved
            or bool(self._topics or self._partitions or self._deleted)
        )

    @property
    def shown_brokers(self) -> bool:
        """The broker has taken in which brokers are there to count on."""
        return not (self._full or self._brokers or (self.in_flight is not None and self._sent_brokers))

    def owes(self, partition: Partition) -> bool:
        """There is news of this partition that the broker has not taken in."""
        return partition in self._partitions or (self.in_flight is not None and partition in self._sent_partitions)

    @property
    def told(self) -> Iterable[Partition]:
        """What the update under way tells of; nothing where that is everything."""
        return self._sent_partitions

    @property
    def told_everything(self) -> bool:
        """The update under way is of everything."""
        return self.in_flight is not None and self._sent_full

    @property
    def due_in_full(self) -> bool:
        """The next update is to tell everything."""
        return self._full

    def under_way_since(self, time_ms: int) -> bool:
        """An update is under way that was sent later than that."""
        return self.in_flight is not None and self._sent_at_ms is not None and self._sent_at_ms > time_ms

    @property
    def idle(self) -> bool:
        return self.in_flight is None and not self._waiting and not self._put_off

    # --- one update ------------------------------------------------------------------------------------------------

    def build(
        self,
        update_id: int,
        state: ClusterState,
        *,
        now_ms: int,
        controller_id: str,
        controller_epoch: int,
        brokers: tuple[BrokerEndpoint, ...],
    ) -> ControlUpdate:
        """The update to send now; what it holds counts as told once ``answered``. ``update_id`` grows with each
        update of the term, and orders them for the broker: one that was given up may arrive after its repetition."""
        if self._full:
            topics = [topic for topic in state.topics.values() if topic.announced]
            partitions = [partition for topic in topics for partition in topic.partitions]
            deleted = dict(self._deleted)
            later: dict[Partition, None] = {}
            later_topics: set[str] = set()
            self._put_off.clear()
        else:
            deleted = dict(self._deleted)
            # A topic created again waits one update, so that its predecessor is gone from the broker's disk first.
            names = {name for name, _ in deleted}
            later = {p: None for p in self._partitions if p.tp.topic in names} if names else {}
            later_topics = self._topics & names
            topics = [state.topics[name] for name in sorted(self._topics - later_topics) if name in state.topics]
            partitions = [p for p in self._partitions if p not in later] if later else list(self._partitions)
            if self._put_off:
                for partition in partitions:
                    self._put_off.pop(partition, None)
        self._sent_full, self._sent_brokers = self._full, self._brokers or self._full
        self._sent_topics = {topic.record.name for topic in topics}
        self._sent_partitions = {} if self._full else dict.fromkeys(partitions)
        self._sent_deleted = deleted
        self._full = self._brokers = False
        self._told_relieved = self._relieved
        self._topics, self._partitions, self._deleted = later_topics, later, {}
        self.in_flight, self.retry_at_ms, self._sent_at_ms = update_id, None, now_ms
        self.telling = len(partitions)
        return ControlUpdate(
            cid=0,
            controller_id=controller_id,
            controller_epoch=controller_epoch,
            incarnation=self.registration.incarnation,
            full=self._sent_full and not state.incomplete,  # a broker deletes what a full update does not name
            brokers=brokers if self._sent_brokers else None,
            topics=tuple(topic.change for topic in topics),
            partitions=tuple(self._told(partition) for partition in partitions),
            deleted=tuple(deleted),
            sequence=update_id,
            relieved=self._relieved,
        )

    def _told(self, partition: Partition) -> PartitionDecision:
        """A leader epoch given to an earlier incarnation of this broker is never told to this one: it would resume
        the epoch, perhaps with a shorter log. Until the controller has raised it the broker hears of no leader."""
        stored = partition.stored
        if (
            stored is not None
            and stored.state.leader == self.registration.broker_id
            and stored.leader_incarnation != self.registration.incarnation
        ):
            state = msgspec.structs.replace(stored.state, leader=NO_LEADER)
            return partition.told(VersionedState(state, stored.version))
        return partition.told(stored)

    def answered(self) -> None:
        """The update under way is with the broker, all of it."""
        self._failures = 0
        self._taken()

    def answered_in_part(self, again: list[Partition], now_ms: int) -> None:
        """The broker has it, but could not follow the decisions on ``again``: they are told again later."""
        self._taken()
        self.partitions_changed(again)
        for partition in again:
            self.topic_changed(partition.topic)
        self._back_off(now_ms)

    def _taken(self) -> None:
        self.in_flight = None
        self._forget_sent()

    def lost(self, update_id: int, now_ms: int, *, full: bool = False) -> None:
        """Tell it again later; all of it when ``full``."""
        if update_id != self.in_flight:
            return
        self.in_flight = None
        self._full = self._full or self._sent_full or full
        self._told_relieved = None
        self._brokers = self._brokers or self._sent_brokers
        self._deleted = {**self._sent_deleted, **self._deleted}
        if not self._full:
            self._topics |= self._sent_topics
            self._partitions = {**self._sent_partitions, **self._partitions}
        self._forget_sent()
        self._back_off(now_ms)

    def _back_off(self, now_ms: int) -> None:
        self.retry_at_ms = now_ms + min(_RETRY_MAX_MS, _RETRY_FIRST_MS << min(self._failures, 10))
        self._failures += 1

    def _forget_sent(self) -> None:
        self._sent_topics, self._sent_partitions, self._sent_deleted = set(), {}, {}
