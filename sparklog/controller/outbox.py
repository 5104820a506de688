"""The changes that each broker has yet to receive, and the handling of the brokers' responses.

The objects of this module are not thread-safe: they are parts of ``Controller``, with one ``BrokerLink`` per broker
incarnation. A new topic is announced to brokers when none of its partitions has a write or read in flight any more.
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

#: The number of partition states in flight to all brokers at which no other full update starts. These states take about
#: 15 MB.
_MAX_STATES_IN_FLIGHT = 200_000
_PATIENCE_MS = 2000
#: While brokers wait to stop, ISR changes are sent to other brokers with at most this delay. There are thousands of
#: these changes, and only the leaders, which wrote them, act on them.
_DEFER_MS = 2000
#: The maximum delay of ISR changes after the last stopping broker was released. That broker still closes its logs,
#: perhaps on the processors of the brokers that receive the changes.
_CLOSING_MS = 300


class BrokerReplies(NamedTuple):
    """The meaning of one broker's response to an update.

    ``broken`` are partitions whose replica the broker cannot open, so that the replica must not lead. ``outdated`` are
    partitions whose leader epoch was already used earlier, as the broker's logs prove. If the broker follows a later
    controller, ``superseded`` is its error text; otherwise it is empty.
    """

    reports: tuple[ControllerReport, ...] = ()
    broken: tuple[ClusterPartition, ...] = ()
    outdated: tuple[ClusterPartition, ...] = ()
    superseded: str = ""


class Outbox:
    """The changes that brokers have yet to receive, with one ``BrokerLink`` per broker.

    ``due`` returns the updates to send now.
    """

    def __init__(self, *, controller_id: str, controller_epoch: int) -> None:
        self._controller_id = controller_id
        self._controller_epoch = controller_epoch
        self._links: dict[int, BrokerLink] = {}
        self._brokers: tuple[BrokerEndpoint, ...] = ()
        #: Untrusted brokers, by id. They are hidden from all other brokers.
        self._suspects: Mapping[int, BrokerEndpoint] = {}
        self._handovers = HandoverNotifications(self._links)
        self._updates = 0
        #: Brokers that request a controlled shutdown and lead no partition. The value is whether a leader still needs
        #: the broker in its ISR.
        self._leaving: dict[int, bool] = {}
        #: The time at which deferred changes are sent even if brokers still wait to stop, or None if no change is
        #: deferred.
        self._deferred_until_ms: int | None = None
        #: Whether no broker waits to stop any more, so that the deferred changes are sent soon.
        self._no_broker_leaves = False
        #: New topics that brokers have not been sent yet.
        self._unannounced: dict[ClusterTopic, None] = {}
        #: The time to check again whether a waiting full update may start, or None if none waits.
        self._retry_full_at_ms: int | None = None

    def broker_arrived(self, registration: BrokerRegistration) -> None:
        """Add a broker that is new to this term or has a new incarnation. It receives a full update."""
        self._links[registration.broker_id] = BrokerLink(registration)
        self._handovers.brokers_changed()

    def broker_failed(self, broker_id: int) -> None:
        self._links.pop(broker_id, None)
        self._handovers.brokers_changed()

    def set_brokers(self, brokers: tuple[BrokerEndpoint, ...], *, suspects: Mapping[int, BrokerEndpoint]) -> None:
        """Set the table of ``brokers`` to send to all brokers.

        ``suspects`` are untrusted brokers. The table omits them, but the table that a suspect receives contains that
        suspect.
        """
        if (brokers, suspects) == (self._brokers, self._suspects):
            return
        before = {broker_id: self._table(broker_id) for broker_id in self._links}
        self._brokers, self._suspects = brokers, suspects
        for broker_id, link in self._links.items():
            if self._table(broker_id) != before[broker_id]:
                link.brokers_changed()

    def topic_created(self, topic: ClusterTopic) -> None:
        """Queue a new topic. ``announce`` sends it when no write or read of its partitions is in flight."""
        self._unannounced[topic] = None

    def announce(self) -> None:
        for topic in list(self._unannounced):
            # Check from the end: results arrive in order, so the last partitions are the ones that still wait.
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
        """Notify brokers that a topic no longer exists. Brokers delete its logs only if it was ``deleted``."""
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
        """Set the brokers that request a controlled shutdown and lead no partition.

        The value for each broker says whether a leader still needs it in an ISR.
        """
        if leaving == self._leaving:
            return
        for broker_id in {*leaving, *self._leaving}:
            link = self._links.get(broker_id)
            if link is not None:
                link.set_released(leaving.get(broker_id) is False)
        self._leaving = dict(leaving)

    def has_current_brokers(self, broker_id: int) -> bool:
        """Return whether the broker has accepted the current table of live brokers; True for an unknown broker."""
        link = self._links.get(broker_id)
        return link is None or link.has_current_brokers

    def isrs_changed(self, partitions: Iterable[ClusterPartition], now_ms: int) -> None:
        """Notify brokers of partitions in which only the ISR has changed.

        The leader is not notified, because it made the change itself.
        """
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
        """Notify brokers, in the order of ``HandoverNotifications``, that stopping leaders have successors."""
        self._handovers.begin([(partition, old) for partition, old in moved if partition.topic.announced], now_ms)

    def has_sent(self, partition: ClusterPartition) -> bool:
        """Return whether every known broker with a replica of the partition has accepted the newest state."""
        if self._handovers.is_in_progress(partition):
            return False
        links = (self._links.get(broker_id) for broker_id in partition.replicas)
        return not any(link is not None and link.has_news_of(partition) for link in links)

    def due(self, state: ClusterState, now_ms: int, *, more_coming: bool) -> list[SendUpdate]:
        """Return the updates to send now.

        ``more_coming`` means that writes are in flight, whose results brokers will have to receive as well. Updates
        that are not urgent may then wait.
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
        event loop would block while it builds them. An update to a broker that does not respond soon is not counted.
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
        """Return the table of live brokers for this broker.

        An untrusted broker that leads partitions must find itself in its table: it ignores a table without itself as
        outdated. Otherwise two untrusted brokers would each wait for the other to remove it from an ISR.
        """
        own = self._suspects.get(broker_id)
        return self._brokers if own is None else (*self._brokers, own)

    @property
    def deadline_ms(self) -> int | None:
        held = self._retry_full_at_ms
        retries = [
            link.retry_at_ms
            for link in self._links.values()
            # A link whose full update waits for others is checked at ``_retry_full_at_ms``.
            if link.in_flight is None and (held is None or not link.is_full_due)
        ]
        times = [held, *retries, self._handovers.deadline_ms, self._deferred_until_ms]
        return min((time for time in times if time is not None), default=None)

    @property
    def idle(self) -> bool:
        """Return whether no change is left to send and every broker has responded."""
        return not self._unannounced and self._handovers.idle and all(link.idle for link in self._links.values())

    # --- responses -------------------------------------------------------------------------------------------------

    def on_lost(self, broker_id: int, update_id: int, now_ms: int) -> None:
        """Record that an update got no response. Its content is sent again later."""
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
                # The response comes from a new incarnation that is about to register, or from a bug. Retry slowly.
                link.on_lost(event.update_id, now_ms, full=True)
                self._handovers.brokers_changed()
                detail = f"broker {event.broker_id}: {event.code} {event.detail}"
                return BrokerReplies((ControllerReport("controller.updates.refused", detail),))


def _not_followed(
    event: UpdateReplied, state: ClusterState
) -> tuple[list[ControllerReport], list[ClusterPartition], list[ClusterPartition], list[ClusterPartition]]:
    """Sort the parts of an update that a broker did not carry out.

    Returns four lists: reports; partitions whose replica cannot be opened; partitions whose state is sent again,
    because it failed for another reason; and partitions that need a higher leader epoch.
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
