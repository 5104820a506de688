"""The news that each broker has yet to receive, and the responses of brokers.

Mutable, owned by one ``Controller``, with one ``BrokerLink`` per incarnation. A new topic is announced after each of
its partitions has its first state, or cannot have one yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sparklog.controller.broker_link import BrokerLink
from sparklog.controller.cluster_state import ClusterPartition, ClusterState, ClusterTopic
from sparklog.controller.effects import ControllerReport, SendUpdate
from sparklog.controller.events import UpdateReplied
from sparklog.controller.handover_notifications import HandoverNotifications
from sparklog.errors import ErrorCode
from sparklog.model import BrokerEndpoint, BrokerRegistration, TopicPartition

#: The number of partition states in flight to all brokers above which no further full update starts: about 15 MB.
_MAX_STATES_IN_FLIGHT = 200_000
_PATIENCE_MS = 2000
#: While brokers wait to stop, other brokers receive ISR changes with at most this delay. There are thousands of these
#: changes, and no broker acts on them but the leaders, which wrote them.
_DEFER_MS = 2000
#: The delay after no broker waits to stop any more. A released broker closes its logs, perhaps on the same processors.
_CLOSING_MS = 300


class BrokerReplies(NamedTuple):
    """The meaning of a broker's response.

    ``broken`` are partitions whose replica it cannot open, which must not lead. ``outdated`` are partitions whose
    leader epoch was assigned before, as its logs prove. ``superseded`` is the broker's error text if it obeys a later
    controller; otherwise it is empty.
    """

    reports: tuple[ControllerReport, ...] = ()
    broken: tuple[ClusterPartition, ...] = ()
    outdated: tuple[ClusterPartition, ...] = ()
    superseded: str = ""


class Outbox:
    """The pending news for all brokers: each link collects facts, and ``due`` returns the updates to send now."""

    def __init__(self, *, controller_id: str, controller_epoch: int) -> None:
        self._controller_id = controller_id
        self._controller_epoch = controller_epoch
        self._links: dict[int, BrokerLink] = {}
        self._brokers: tuple[BrokerEndpoint, ...] = ()
        #: Brokers that are hidden from the others, by id.
        self._suspects: Mapping[int, BrokerEndpoint] = {}
        self._handovers = HandoverNotifications(self._links)
        self._updates = 0
        #: Brokers that request a controlled shutdown and lead nothing, with whether a leader still needs them in its
        #: ISR.
        self._leaving: dict[int, bool] = {}
        #: The time at which deferred news is sent even if brokers still wait to stop. None: no news is deferred.
        self._deferred_until_ms: int | None = None
        #: Whether that time was set because no broker waits to stop any more.
        self._no_broker_leaves = False
        #: New topics that are not announced yet.
        self._unannounced: dict[ClusterTopic, None] = {}
        #: The time to check again for full updates that wait for others to finish; None: none waits.
        self._retry_full_at_ms: int | None = None

    def broker_arrived(self, registration: BrokerRegistration) -> None:
        """Add a broker with a new incarnation, or one that is new to this term. It receives everything."""
        self._links[registration.broker_id] = BrokerLink(registration)
        self._handovers.brokers_changed()

    def broker_failed(self, broker_id: int) -> None:
        self._links.pop(broker_id, None)
        self._handovers.brokers_changed()

    def set_brokers(self, brokers: tuple[BrokerEndpoint, ...], *, suspects: Mapping[int, BrokerEndpoint]) -> None:
        """Send ``brokers`` to all brokers. Each of ``suspects``, by id, also receives itself."""
        if (brokers, suspects) == (self._brokers, self._suspects):
            return
        before = {broker_id: self._table(broker_id) for broker_id in self._links}
        self._brokers, self._suspects = brokers, suspects
        for broker_id, link in self._links.items():
            if self._table(broker_id) != before[broker_id]:
                link.brokers_changed()

    def topic_created(self, topic: ClusterTopic) -> None:
        """Add a topic that ``announce`` sends when its states are complete."""
        self._unannounced[topic] = None

    def announce(self) -> None:
        for topic in list(self._unannounced):
            # Check from the end: results arrive in order, so the missing ones are there.
            if any(p.pending is not None or p.rereading for p in reversed(topic.partitions)):
                continue
            del self._unannounced[topic]
            topic.announced = True
            self.topic_changed(topic, topic.partitions)

    def topic_changed(self, topic: ClusterTopic, partitions: Iterable[ClusterPartition]) -> None:
        partitions = list(partitions)
        for link in self._links.values():
            link.topic_changed(topic)
            link.partitions_changed(partitions)

    def topic_gone(self, topic: ClusterTopic, *, deleted: bool) -> None:
        """Notify brokers that the topic is gone. Brokers delete its logs only if it was ``deleted``."""
        self._unannounced.pop(topic, None)
        for partition in topic.partitions:
            self._handovers.drop(partition)
        for link in self._links.values():
            link.topic_gone(topic, deleted=deleted)

    def partitions_changed(self, partitions: Iterable[ClusterPartition]) -> None:
        announced = [partition for partition in partitions if partition.topic.announced]
        if announced:
            for link in self._links.values():
                link.partitions_changed(announced)

    def set_leaving(self, leaving: Mapping[int, bool]) -> None:
        """Set the brokers that request a controlled shutdown and lead nothing, and whether leaders still need them."""
        if leaving == self._leaving:
            return
        for broker_id in {*leaving, *self._leaving}:
            link = self._links.get(broker_id)
            if link is not None:
                link.set_released(leaving.get(broker_id) is False)
        self._leaving = dict(leaving)

    def has_current_brokers(self, broker_id: int) -> bool:
        """Return whether the broker has accepted the table of live brokers. True for a broker without a connection."""
        link = self._links.get(broker_id)
        return link is None or link.has_current_brokers

    def isrs_changed(self, partitions: Iterable[ClusterPartition], now_ms: int) -> None:
        """Notify the other brokers of partitions whose leaders report a change of only the ISR."""
        by_leader: dict[tuple[int, int], list[ClusterPartition]] = {}
        for partition in partitions:
            stored = partition.stored
            if stored is not None and partition.topic.announced:
                by_leader.setdefault((stored.state.leader, stored.leader_incarnation), []).append(partition)
        if by_leader and self._leaving and self._deferred_until_ms is None:
            self._deferred_until_ms = now_ms + _DEFER_MS
        for link in self._links.values():
            notify = link.defer if self._leaving else link.partitions_changed
            for leader, led in by_leader.items():
                if leader != (link.registration.broker_id, link.registration.incarnation):
                    notify(led)

    def _send_deferred(self, now_ms: int) -> None:
        if self._deferred_until_ms is None:
            return
        if not self._leaving and not self._no_broker_leaves:
            self._deferred_until_ms = min(self._deferred_until_ms, now_ms + _CLOSING_MS)
        self._no_broker_leaves = not self._leaving
        if now_ms < self._deferred_until_ms:
            return
        self._deferred_until_ms, self._no_broker_leaves = None, False
        for link in self._links.values():
            link.send_deferred()

    def leaders_moved(self, moved: Iterable[tuple[ClusterPartition, int]], now_ms: int) -> None:
        """Note partitions whose stopping leader has a successor. See ``HandoverNotifications``."""
        self._handovers.begin([(partition, old) for partition, old in moved if partition.topic.announced], now_ms)

    def has_sent(self, partition: ClusterPartition) -> bool:
        """Return whether each reachable broker with a replica has accepted the newest state."""
        if self._handovers.is_in_progress(partition):
            return False
        links = (self._links.get(broker_id) for broker_id in partition.replicas)
        return not any(link is not None and link.has_news_of(partition) for link in links)

    def due(self, state: ClusterState, now_ms: int, *, more_coming: bool) -> list[SendUpdate]:
        """Return the updates to send now.

        ``more_coming`` means that writes are in flight whose results brokers need as well.
        """
        self._retry_full_at_ms = None
        self._send_deferred(now_ms)
        self._handovers.notify_next(now_ms)
        return [
            self._build(link, state, now_ms)
            for link in self._links.values()
            if link.ready(now_ms, more_coming=more_coming) and not (link.is_full_due and self._is_full_at_limit(now_ms))
        ]

    def _is_full_at_limit(self, now_ms: int) -> bool:
        """Return whether another full update has to wait.

        A hundred full updates at once, with hundreds of thousands of partitions each, would need gigabytes, and the
        event loop would block while it builds them. A broker that does not respond soon does not count.
        """
        recent = [link for link in self._links.values() if link.is_in_flight_since(now_ms - _PATIENCE_MS)]
        full = sum(link.in_flight_count for link in recent) >= _MAX_STATES_IN_FLIGHT
        if full:
            self._retry_full_at_ms = now_ms + _PATIENCE_MS
        return full

    def _build(self, link: BrokerLink, state: ClusterState, now_ms: int) -> SendUpdate:
        self._updates += 1
        update = link.build(
            self._updates,
            state,
            now_ms=now_ms,
            controller_id=self._controller_id,
            controller_epoch=self._controller_epoch,
            brokers=self._table(link.registration.broker_id),
        )
        return SendUpdate(link.registration.endpoint, self._updates, update)

    def _table(self, broker_id: int) -> tuple[BrokerEndpoint, ...]:
        """Return the live brokers that this broker receives.

        An untrusted broker that leads finds itself in its table. It treats a table without itself as an old one, and
        two untrusted brokers would each wait for the other to remove it from an ISR.
        """
        own = self._suspects.get(broker_id)
        return self._brokers if own is None else (*self._brokers, own)

    @property
    def deadline_ms(self) -> int | None:
        held = self._retry_full_at_ms
        retries = [
            link.retry_at_ms
            for link in self._links.values()
            # A link that is due but waits for others is checked together with them.
            if link.in_flight is None and (held is None or not link.is_full_due)
        ]
        times = [held, *retries, self._handovers.deadline_ms, self._deferred_until_ms]
        return min((time for time in times if time is not None), default=None)

    @property
    def idle(self) -> bool:
        """Return whether every broker has received everything and has responded."""
        return not self._unannounced and self._handovers.idle and all(link.idle for link in self._links.values())

    # --- responses -------------------------------------------------------------------------------------------------

    def on_lost(self, broker_id: int, update_id: int, now_ms: int) -> None:
        """Note that an update got no response. It is sent again later."""
        link = self._links.get(broker_id)
        if link is not None:
            link.on_lost(update_id, now_ms)

    def on_reply(self, event: UpdateReplied, state: ClusterState, now_ms: int) -> BrokerReplies:
        link = self._links.get(event.broker_id)
        if link is None or link.in_flight != event.update_id:
            return BrokerReplies()
        match event.code:
            case ErrorCode.NONE:
                if link.sends_full:
                    self._handovers.brokers_changed()
                else:
                    self._handovers.on_accepted(link.sent_partitions)
                reports, broken, again, outdated = _not_followed(event, state)
                if again:
                    link.on_partial_response(again, now_ms)
                else:
                    link.on_accepted()
                return BrokerReplies(tuple(reports), tuple(broken), tuple(outdated))
            case ErrorCode.STALE_CONTROLLER_EPOCH:
                return BrokerReplies(superseded=f"broker {event.broker_id}: {event.detail}")
            case _:
                # The response is from an incarnation that is about to register, or a bug caused it. Retry slowly.
                link.on_lost(event.update_id, now_ms, full=True)
                self._handovers.brokers_changed()
                detail = f"broker {event.broker_id}: {event.code} {event.detail}"
                return BrokerReplies((ControllerReport("controller.updates.refused", detail),))


def _not_followed(
    event: UpdateReplied, state: ClusterState
) -> tuple[list[ControllerReport], list[ClusterPartition], list[ClusterPartition], list[ClusterPartition]]:
    """Return the parts of an update that a broker did not perform.

    The parts are reports; replicas that cannot be opened; states to send again, which failed for other reasons; and
    partitions that need a higher leader epoch.
    """
    reports: list[ControllerReport] = []
    broken: list[ClusterPartition] = []
    again: list[ClusterPartition] = []
    outdated: list[ClusterPartition] = []
    for topic, number, code, detail in event.failed:
        words = f"broker {event.broker_id}: {topic}-{number}: {detail}"
        reports.append(ControllerReport("controller.replicas.failed", words, 1, grave=True))
        partition = state.partition(TopicPartition(topic, number))
        if partition is not None:
            by_code: dict[int, list[ClusterPartition]] = {
                ErrorCode.KAFKA_STORAGE_ERROR: broken,
                ErrorCode.FENCED_LEADER_EPOCH: outdated,
            }
            by_code.get(code, again).append(partition)
    return reports, broken, again, outdated
