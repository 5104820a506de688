"""What all brokers have still to be told. Mutable, owned by one ``Controller``; one ``BrokerLink`` an incarnation."""

from __future__ import annotations

from collections.abc import Iterable

from sparklog.controller.broker_link import BrokerLink
from sparklog.controller.cluster_state import ClusterState, Partition, Topic
from sparklog.controller.effects import SendUpdate
from sparklog.model import BrokerEndpoint, BrokerRegistration


class Outbox:
    """Facts go to every link; ``due`` gives the updates that may be sent now."""

    def __init__(self, *, controller_id: str, controller_epoch: int) -> None:
        self._controller_id = controller_id
        self._controller_epoch = controller_epoch
        self._links: dict[int, BrokerLink] = {}
        self._brokers: tuple[BrokerEndpoint, ...] = ()
        self._updates = 0

    def link(self, broker_id: int) -> BrokerLink | None:
        return self._links.get(broker_id)

    def broker_arrived(self, registration: BrokerRegistration) -> None:
        """A new incarnation knows nothing: it gets everything first."""
        self._links[registration.broker_id] = BrokerLink(registration)

    def broker_failed(self, broker_id: int) -> None:
        self._links.pop(broker_id, None)

    def set_brokers(self, brokers: tuple[BrokerEndpoint, ...]) -> None:
        if brokers != self._brokers:
            self._brokers = brokers
            for link in self._links.values():
                link.brokers_changed()

    def topic_changed(self, topic: Topic, partitions: Iterable[Partition]) -> None:
        partitions = list(partitions)
        for link in self._links.values():
            link.topic_changed(topic)
            link.partitions_changed(partitions)

    def topic_deleted(self, topic: Topic) -> None:
        for link in self._links.values():
            link.topic_deleted(topic)

    def partitions_changed(self, partitions: Iterable[Partition]) -> None:
        told = [partition for partition in partitions if partition.topic.announced]
        if told:
            for link in self._links.values():
                link.partitions_changed(told)

    def due(self, state: ClusterState, now_ms: int, *, more_coming: bool) -> list[SendUpdate]:
        """What may be sent now. ``more_coming``: writes are under way whose results will have to be told as well."""
        ready = [link for link in self._links.values() if link.ready(now_ms, more_coming=more_coming)]
        return [self._build(link, state, now_ms) for link in ready]

    def _build(self, link: BrokerLink, state: ClusterState, now_ms: int) -> SendUpdate:
        self._updates += 1
        update = link.build(
            self._updates,
            state,
            now_ms=now_ms,
            controller_id=self._controller_id,
            controller_epoch=self._controller_epoch,
            brokers=self._brokers,
        )
        return SendUpdate(link.registration.endpoint, self._updates, update)

    @property
    def deadline_ms(self) -> int | None:
        retries = [link.retry_at_ms for link in self._links.values() if link.in_flight is None]
        return min((time for time in retries if time is not None), default=None)

    @property
    def idle(self) -> bool:
        """Everybody has been told everything, and has answered."""
        return all(link.idle for link in self._links.values())
