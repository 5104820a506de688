"""The changes that one broker incarnation has yet to receive. They are kept as names of topics and partitions.

An update is built from the cluster's state when it can be sent, so a slow or absent broker receives only the newest
state. A lost update may be sent again, because brokers order states by node version. The first update to an incarnation
is full: it has all topics and partitions. At most one update is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sparklog.controller.cluster_state import ClusterPartition, ClusterState, ClusterTopic
from sparklog.model import NO_LEADER, BrokerEndpoint, BrokerRegistration, VersionedState
from sparklog.protocol.messages import ControlUpdate, PartitionDecision

_RETRY_FIRST_MS = 50
_RETRY_MAX_MS = 1000
#: The pause between updates to one broker while more states are being written. Thousands of states after a failure
#: become a few hundred updates, and no state waits longer than this pause. If no writes are in flight there is no
#: pause.
_PACE_MS = 10


class BrokerLink:
    """The queue of changes to send to one broker incarnation, with the update in flight. A part of ``Controller``."""

    def __init__(self, registration: BrokerRegistration) -> None:
        self.registration = registration
        self.retry_at_ms: int | None = None
        self.in_flight: int | None = None
        #: The number of partition states in the update in flight.
        self.in_flight_count = 0
        self._sent_at_ms: int | None = None
        self._failures = 0
        self._sent_full = False
        self._sent_brokers = False
        self._sent_topics: set[str] = set()
        self._sent_partitions: dict[ClusterPartition, None] = {}
        self._sent_deleted: dict[tuple[str, str], None] = {}
        self._full = True
        self._brokers = True
        self._topics: set[str] = set()
        self._partitions: dict[ClusterPartition, None] = {}
        self._deleted: dict[tuple[str, str], None] = {}
        #: Partitions whose changes may be sent later.
        self._deferred: dict[ClusterPartition, None] = {}
        #: Whether the broker requested a controlled shutdown and no leader needs it any more.
        self._released = False
        #: The value of ``_released`` in the last update; None if it is unknown whether the broker has received that
        #: update.
        self._sent_released: bool | None = False

    # --- pending news ----------------------------------------------------------------------------------------------

    def brokers_changed(self) -> None:
        self._brokers = True

    def partitions_changed(self, partitions: Iterable[ClusterPartition]) -> None:
        if not self._full:
            self._partitions.update(dict.fromkeys(partitions))

    def defer(self, partitions: Iterable[ClusterPartition]) -> None:
        """Queue changes of partitions that may be sent later: after ``send_deferred``, or in a full update.

        A deferred change is also sent if another change of its partition is sent.
        """
        if not self._full:
            self._deferred.update(dict.fromkeys(partitions))

    def send_deferred(self) -> None:
        deferred, self._deferred = self._deferred, {}
        self.partitions_changed(deferred)

    def set_released(self, released: bool) -> None:
        self._released = released

    def topic_changed(self, topic: ClusterTopic) -> None:
        if not self._full:
            self._topics.add(topic.record.name)

    def topic_gone(self, topic: ClusterTopic, *, deleted: bool) -> None:
        """Notify the broker that a topic no longer exists.

        If the topic was ``deleted``, the next update names it as deleted. Otherwise a full update without the topic
        follows, and the broker moves the topic's logs aside.
        """
        for partition in topic.partitions:
            self._partitions.pop(partition, None)
            self._deferred.pop(partition, None)
            self._sent_partitions.pop(partition, None)
        self._topics.discard(topic.record.name)
        self._sent_topics.discard(topic.record.name)
        if topic.announced and not deleted:
            self._full = True
        elif topic.announced:
            # Name the topic even if a full update is due: an update that was built earlier may be in flight.
            self._deleted[topic.record.name, topic.record.topic_id] = None

    def ready(self, now_ms: int, *, more_coming: bool) -> bool:
        """Return whether there are changes, and an update with them may be sent now.

        If the link only has to wait for the end of a pause, ``retry_at_ms`` is that end.
        """
        if self.in_flight is not None or not self._waiting:
            return False
        if self._failures == 0:
            # Leaders shrink their ISRs when they learn that a broker is dead, and a released broker waits only for its
            # release.
            urgent = self._full or self._brokers or self._released != self._sent_released
            paced = more_coming and not urgent and self._sent_at_ms is not None
            self.retry_at_ms = (self._sent_at_ms or 0) + _PACE_MS if paced else None
        return self.retry_at_ms is None or now_ms >= self.retry_at_ms

    @property
    def _waiting(self) -> bool:
        return (
            self._full
            or self._brokers
            or self._released != self._sent_released
            or bool(self._topics or self._partitions or self._deleted)
        )

    @property
    def has_current_brokers(self) -> bool:
        """Return whether the broker has accepted the current table of live brokers."""
        return not (self._full or self._brokers or (self.in_flight is not None and self._sent_brokers))

    def has_news_of(self, partition: ClusterPartition) -> bool:
        """Return whether a change of this partition is queued or in flight.

        Deferred changes and full updates do not count.
        """
        return partition in self._partitions or (self.in_flight is not None and partition in self._sent_partitions)

    @property
    def sent_partitions(self) -> Iterable[ClusterPartition]:
        """Return the partitions whose states are in the update in flight, or no partitions if it is a full update."""
        return self._sent_partitions

    @property
    def sends_full(self) -> bool:
        """Return whether an update is in flight and is full, that is, contains all topics and partitions."""
        return self.in_flight is not None and self._sent_full

    @property
    def is_full_due(self) -> bool:
        """Return whether the next update will be full, that is, will contain all topics and partitions."""
        return self._full

    def is_in_flight_since(self, time_ms: int) -> bool:
        """Return whether an update is in flight that was sent after ``time_ms``."""
        return self.in_flight is not None and self._sent_at_ms is not None and self._sent_at_ms > time_ms

    @property
    def idle(self) -> bool:
        return self.in_flight is None and not self._waiting and not self._deferred

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
        """Return the update to send now. Its content counts as received only after ``on_accepted``.

        ``update_id`` rises with each update of the controller term. The broker orders updates by this id, because an
        update that the controller considers lost may arrive after its repetition.
        """
        if self._full:
            topics = [topic for topic in state.topics.values() if topic.announced]
            partitions = [partition for topic in topics for partition in topic.partitions]
            deleted = dict(self._deleted)
            later: dict[ClusterPartition, None] = {}
            later_topics: set[str] = set()
            self._deferred.clear()
        else:
            deleted = dict(self._deleted)
            # A recreated topic is sent one update later, so that the broker first deletes the files of the old topic.
            names = {name for name, _ in deleted}
            later = {p: None for p in self._partitions if p.tp.topic in names} if names else {}
            later_topics = self._topics & names
            topics = [state.topics[name] for name in sorted(self._topics - later_topics) if name in state.topics]
            partitions = [p for p in self._partitions if p not in later] if later else list(self._partitions)
            if self._deferred:
                for partition in partitions:
                    self._deferred.pop(partition, None)
        self._sent_full, self._sent_brokers = self._full, self._brokers or self._full
        self._sent_topics = {topic.record.name for topic in topics}
        self._sent_partitions = {} if self._full else dict.fromkeys(partitions)
        self._sent_deleted = deleted
        self._full = self._brokers = False
        self._sent_released = self._released
        self._topics, self._partitions, self._deleted = later_topics, later, {}
        self.in_flight, self.retry_at_ms, self._sent_at_ms = update_id, None, now_ms
        self.in_flight_count = len(partitions)
        return ControlUpdate(
            cid=0,
            controller_id=controller_id,
            controller_epoch=controller_epoch,
            incarnation=self.registration.incarnation,
            full=self._sent_full and not state.incomplete,  # A broker deletes what a full update does not contain.
            brokers=brokers if self._sent_brokers else None,
            topics=tuple(topic.change for topic in topics),
            partitions=tuple(self._decision_for(partition) for partition in partitions),
            deleted=tuple(deleted),
            sequence=update_id,
            relieved=self._released,
        )

    def _decision_for(self, partition: ClusterPartition) -> PartitionDecision:
        """Return the state to send, without a leader if its epoch belongs to an earlier incarnation of this broker.

        The new incarnation would resume leadership in the same epoch, perhaps with a shorter log. The broker receives a
        leader after the controller has raised the epoch.
        """
        stored = partition.stored
        if (
            stored is not None
            and stored.state.leader == self.registration.broker_id
            and stored.leader_incarnation != self.registration.incarnation
        ):
            state = msgspec.structs.replace(stored.state, leader=NO_LEADER)
            return partition.decision(VersionedState(state, stored.version))
        return partition.decision(stored)

    def on_accepted(self) -> None:
        """Record that the broker has accepted the whole update in flight."""
        self._failures = 0
        self._end_flight()

    def on_partial_response(self, again: list[ClusterPartition], now_ms: int) -> None:
        """Record that the broker accepted the update except the states of ``again``, and queue these states."""
        self._end_flight()
        self.partitions_changed(again)
        for partition in again:
            self.topic_changed(partition.topic)
        self._back_off(now_ms)

    def _end_flight(self) -> None:
        self.in_flight = None
        self._drop_sent()

    def on_lost(self, update_id: int, now_ms: int, *, full: bool = False) -> None:
        """Record that the update was lost. Its content is sent again later, or a full update if ``full`` is true."""
        if update_id != self.in_flight:
            return
        self.in_flight = None
        self._full = self._full or self._sent_full or full
        self._sent_released = None
        self._brokers = self._brokers or self._sent_brokers
        self._deleted = {**self._sent_deleted, **self._deleted}
        if not self._full:
            self._topics |= self._sent_topics
            self._partitions = {**self._sent_partitions, **self._partitions}
        self._drop_sent()
        self._back_off(now_ms)

    def _back_off(self, now_ms: int) -> None:
        self.retry_at_ms = now_ms + min(_RETRY_MAX_MS, _RETRY_FIRST_MS << min(self._failures, 10))
        self._failures += 1

    def _drop_sent(self) -> None:
        self._sent_topics, self._sent_partitions, self._sent_deleted = set(), {}, {}
