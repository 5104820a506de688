"""What all brokers have still to be told, and what they say to it. Mutable, owned by one ``Controller``; one
``BrokerLink`` an incarnation.

A topic is told of once each of its partitions has its first state, or cannot have one yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sparklog.controller.broker_link import BrokerLink
from sparklog.controller.cluster_state import ClusterState, Partition, Topic
from sparklog.controller.effects import Report, SendUpdate
from sparklog.controller.events import UpdateAnswered
from sparklog.controller.handover_notifications import HandoverNotifications
from sparklog.errors import ErrorCode
from sparklog.model import BrokerEndpoint, BrokerRegistration, TopicPartition

#: Decisions under way to all brokers beyond which none is begun to be told everything: some 15 MB.
_MOST_TOLD = 200_000
_PATIENCE_MS = 2000
#: While brokers wait to be relieved, others hear of ISRs alone so much later, at most: there are thousands, and nobody
#: but the leaders, who wrote them, acts on them.
_PUT_OFF_MS = 2000
#: And so much later once none waits any more: who was relieved has its logs to close, perhaps on the same processors.
_CLOSING_MS = 300


class BrokerReplies(NamedTuple):
    """What a broker's answer means. ``broken``: partitions whose replica it cannot open, which must not lead.
    ``outdated``: partitions whose leader epoch was given before, as its logs prove. ``superseded``: it obeys a later
    controller, in its words; empty: no."""

    reports: tuple[Report, ...] = ()
    broken: tuple[Partition, ...] = ()
    outdated: tuple[Partition, ...] = ()
    superseded: str = ""


class Outbox:
    """Facts go to every link; ``due`` gives the updates that may be sent now."""

    def __init__(self, *, controller_id: str, controller_epoch: int) -> None:
        self._controller_id = controller_id
        self._controller_epoch = controller_epoch
        self._links: dict[int, BrokerLink] = {}
        self._brokers: tuple[BrokerEndpoint, ...] = ()
        #: Brokers that are hidden from the others, by id.
        self._suspects: Mapping[int, BrokerEndpoint] = {}
        self._hand_overs = HandoverNotifications(self._links)
        self._updates = 0
        #: Brokers that asked to be relieved and lead nothing: whether anybody still counts on them.
        self._leaving: dict[int, bool] = {}
        #: When news that was put off is told, even if brokers still wait to be relieved; None: none was.
        self._put_off_until_ms: int | None = None
        #: Whether that is because nobody waits to be relieved any more.
        self._all_left = False
        #: New topics that brokers have not been told of.
        self._unannounced: dict[Topic, None] = {}
        #: Brokers wait to be told everything until others have been.
        self._look_again_at_ms: int | None = None

    def broker_arrived(self, registration: BrokerRegistration) -> None:
        """A new incarnation, or one that this term tells for the first time, knows nothing: it gets everything."""
        self._links[registration.broker_id] = BrokerLink(registration)
        self._hand_overs.brokers_changed()

    def broker_failed(self, broker_id: int) -> None:
        self._links.pop(broker_id, None)
        self._hand_overs.brokers_changed()

    def set_brokers(self, brokers: tuple[BrokerEndpoint, ...], *, suspects: Mapping[int, BrokerEndpoint]) -> None:
        """``brokers`` are told to all; each of ``suspects``, by id, is told of itself besides."""
        if (brokers, suspects) == (self._brokers, self._suspects):
            return
        before = {broker_id: self._table(broker_id) for broker_id in self._links}
        self._brokers, self._suspects = brokers, suspects
        for broker_id, link in self._links.items():
            if self._table(broker_id) != before[broker_id]:
                link.brokers_changed()

    def topic_created(self, topic: Topic) -> None:
        """It is told of by ``announce``, when it is time."""
        self._unannounced[topic] = None

    def announce(self) -> None:
        for topic in list(self._unannounced):
            # From the end: answers come in order, so that is where one is still missing.
            if any(p.pending is not None or p.rereading for p in reversed(topic.partitions)):
                continue
            del self._unannounced[topic]
            topic.announced = True
            self.topic_changed(topic, topic.partitions)

    def topic_changed(self, topic: Topic, partitions: Iterable[Partition]) -> None:
        partitions = list(partitions)
        for link in self._links.values():
            link.topic_changed(topic)
            link.partitions_changed(partitions)

    def topic_gone(self, topic: Topic, *, deleted: bool) -> None:
        """The topic is not there any more. Brokers delete its logs only where it was ``deleted``."""
        self._unannounced.pop(topic, None)
        for partition in topic.partitions:
            self._hand_overs.forget(partition)
        for link in self._links.values():
            link.topic_gone(topic, deleted=deleted)

    def partitions_changed(self, partitions: Iterable[Partition]) -> None:
        told = [partition for partition in partitions if partition.topic.announced]
        if told:
            for link in self._links.values():
                link.partitions_changed(told)

    def set_leaving(self, leaving: Mapping[int, bool]) -> None:
        """Brokers that asked to be relieved and lead nothing, with whether leaders still count on them."""
        if leaving == self._leaving:
            return
        for broker_id in {*leaving, *self._leaving}:
            link = self._links.get(broker_id)
            if link is not None:
                link.relieved(leaving.get(broker_id) is False)
        self._leaving = dict(leaving)

    def shown_brokers(self, broker_id: int) -> bool:
        """Return whether the broker has accepted the table of live brokers. True for a broker without a connection."""
        link = self._links.get(broker_id)
        return link is None or link.shown_brokers

    def isrs_changed(self, partitions: Iterable[Partition], now_ms: int) -> None:
        """Leaders have changed nothing but the ISR, as they say themselves: the others are to hear of it."""
        by_leader: dict[tuple[int, int], list[Partition]] = {}
        for partition in partitions:
            stored = partition.stored
            if stored is not None and partition.topic.announced:
                by_leader.setdefault((stored.state.leader, stored.leader_incarnation), []).append(partition)
        if by_leader and self._leaving and self._put_off_until_ms is None:
            self._put_off_until_ms = now_ms + _PUT_OFF_MS
        for link in self._links.values():
            tell = link.put_off if self._leaving else link.partitions_changed
            for leader, led in by_leader.items():
                if leader != (link.registration.broker_id, link.registration.incarnation):
                    tell(led)

    def _tell_after_all(self, now_ms: int) -> None:
        if self._put_off_until_ms is None:
            return
        if not self._leaving and not self._all_left:
            self._put_off_until_ms = min(self._put_off_until_ms, now_ms + _CLOSING_MS)
        self._all_left = not self._leaving
        if now_ms < self._put_off_until_ms:
            return
        self._put_off_until_ms, self._all_left = None, False
        for link in self._links.values():
            link.told_after_all()

    def leaders_moved(self, moved: Iterable[tuple[Partition, int]], now_ms: int) -> None:
        """Note partitions whose stopping leader has a successor. See ``HandoverNotifications``."""
        self._hand_overs.begin([(partition, old) for partition, old in moved if partition.topic.announced], now_ms)

    def told(self, partition: Partition) -> bool:
        """Every broker that has a replica, and can be told, has taken in its newest state."""
        if self._hand_overs.under_way(partition):
            return False
        links = (self._links.get(broker_id) for broker_id in partition.replicas)
        return not any(link is not None and link.owes(partition) for link in links)

    def due(self, state: ClusterState, now_ms: int, *, more_coming: bool) -> list[SendUpdate]:
        """What may be sent now. ``more_coming``: writes are under way whose results will have to be told as well."""
        self._look_again_at_ms = None
        self._tell_after_all(now_ms)
        self._hand_overs.tell(now_ms)
        return [
            self._build(link, state, now_ms)
            for link in self._links.values()
            if link.ready(now_ms, more_coming=more_coming) and not (link.due_in_full and self._full_hands(now_ms))
        ]

    def _full_hands(self, now_ms: int) -> bool:
        """Whether another update that tells everything has to wait: a hundred of them at the same time, of hundreds of
        thousands of partitions each, would take gigabytes, and the term would stand still while they are made. A broker
        that does not answer soon holds up nobody."""
        recent = [link for link in self._links.values() if link.under_way_since(now_ms - _PATIENCE_MS)]
        full = sum(link.telling for link in recent) >= _MOST_TOLD
        if full:
            self._look_again_at_ms = now_ms + _PATIENCE_MS
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
        """The live brokers as this one is told of them. A suspect that leads finds itself there: it takes a table that
        lacks it for an older one, and two suspects would each wait for the other to take it out of an ISR."""
        own = self._suspects.get(broker_id)
        return self._brokers if own is None else (*self._brokers, own)

    @property
    def deadline_ms(self) -> int | None:
        held = self._look_again_at_ms
        retries = [
            link.retry_at_ms
            for link in self._links.values()
            # Whose time has come and who has to wait for others is looked at with these.
            if link.in_flight is None and (held is None or not link.due_in_full)
        ]
        times = [held, *retries, self._hand_overs.deadline_ms, self._put_off_until_ms]
        return min((time for time in times if time is not None), default=None)

    @property
    def idle(self) -> bool:
        """Everybody has been told everything, and has answered."""
        return not self._unannounced and self._hand_overs.idle and all(link.idle for link in self._links.values())

    # --- answers -------------------------------------------------------------------------------------------------

    def lost(self, broker_id: int, update_id: int, now_ms: int) -> None:
        """No answer came to this update: it is told again later."""
        link = self._links.get(broker_id)
        if link is not None:
            link.lost(update_id, now_ms)

    def answered(self, event: UpdateAnswered, state: ClusterState, now_ms: int) -> BrokerReplies:
        link = self._links.get(event.broker_id)
        if link is None or link.in_flight != event.update_id:
            return BrokerReplies()
        match event.code:
            case ErrorCode.NONE:
                if link.told_everything:
                    self._hand_overs.brokers_changed()
                else:
                    self._hand_overs.heard(link.told)
                reports, broken, again, outdated = _not_followed(event, state)
                if again:
                    link.answered_in_part(again, now_ms)
                else:
                    link.answered()
                return BrokerReplies(tuple(reports), tuple(broken), tuple(outdated))
            case ErrorCode.STALE_CONTROLLER_EPOCH:
                return BrokerReplies(superseded=f"broker {event.broker_id}: {event.detail}")
            case _:
                # Another incarnation than was registered answers (it is about to register), or a bug: again, slowly.
                link.lost(event.update_id, now_ms, full=True)
                self._hand_overs.brokers_changed()
                detail = f"broker {event.broker_id}: {event.code} {event.detail}"
                return BrokerReplies((Report("controller.updates.refused", detail),))


def _not_followed(
    event: UpdateAnswered, state: ClusterState
) -> tuple[list[Report], list[Partition], list[Partition], list[Partition]]:
    """Return reports; replicas that cannot be opened; decisions to be told again, which failed for other reasons; and
    partitions that need a higher leader epoch."""
    reports: list[Report] = []
    broken: list[Partition] = []
    again: list[Partition] = []
    outdated: list[Partition] = []
    for topic, number, code, detail in event.failed:
        words = f"broker {event.broker_id}: {topic}-{number}: {detail}"
        reports.append(Report("controller.replicas.failed", words, 1, grave=True))
        partition = state.partition(TopicPartition(topic, number))
        if partition is not None:
            by_code: dict[int, list[Partition]] = {
                ErrorCode.KAFKA_STORAGE_ERROR: broken,
                ErrorCode.FENCED_LEADER_EPOCH: outdated,
            }
            by_code.get(code, again).append(partition)
    return reports, broken, again, outdated
