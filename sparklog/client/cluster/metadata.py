"""A client's metadata: brokers, topics and leaders.

This module is pure. Responses of different brokers may arrive out of order. So a response is merged into the known
metadata. For each partition the greatest leader epoch wins, and for each broker the greatest incarnation. Of two topics
with the same name the newer one wins. If a response does not have a known topic, the topic is dropped, unless the
response's controller epoch shows that the response is older. A broker that has no update from a controller yet knows no
topics, so its response does not prove that a topic does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_LEADER, BrokerEndpoint, TopicPartition, TopicSchema
from sparklog.protocol.messages import Metadata, MetadataReply, PartitionMetadata, TopicMetadata

#: The maximum number of pieces in which a response may come. Each piece has tens of thousands of partitions.
_MOST_PIECES = 1000


class Leader(NamedTuple):
    """The leader of a partition, and the leader epoch."""

    broker_id: int
    epoch: int


class ClientMetadata:
    """A client's cache of metadata: the brokers, the topics, and the partitions' leaders. Not thread-safe."""

    def __init__(self) -> None:
        self.cluster_id = ""
        self.controller_epoch = -1
        #: The number of changes: 0 until the first response is merged.
        self.version = 0
        #: The registered brokers by id.
        self.brokers: dict[int, BrokerEndpoint] = {}
        #: Brokers that are leaders but no longer registered. Such brokers may still serve requests although ZooKeeper
        #: and the controller have lost contact with them.
        self._departed: dict[int, BrokerEndpoint] = {}
        self._topics: dict[str, TopicMetadata] = {}
        #: The last state of dropped topics, so that the leader epochs do not decrease if a topic reappears.
        self._dropped: dict[str, TopicMetadata] = {}
        self._partitions: dict[TopicPartition, PartitionMetadata] = {}

    def endpoint(self, broker_id: int) -> BrokerEndpoint | None:
        """Return the address of a broker that is registered, or that was registered and still leads a partition."""
        return self.brokers.get(broker_id) or self._departed.get(broker_id)

    def is_stale(self, reply: MetadataReply) -> bool:
        """Return whether the broker that replied has no update from the newest controller that this client knows.

        A reply is also stale if its broker has no update from any controller. A topic that is not in a stale reply may
        exist. The result is the same before and after ``update``.
        """
        return reply.controller_epoch < max(self.controller_epoch, 0)

    def update(self, reply: MetadataReply) -> None:
        """Merge a response. A topic that the response reports as unknown is dropped, unless the response is stale."""
        self.version += 1
        if not self.cluster_id:
            self.cluster_id = reply.cluster_id
        stale = self.is_stale(reply)
        self.controller_epoch = max(self.controller_epoch, reply.controller_epoch)
        for topic in reply.topics:
            if topic.code != ErrorCode.NONE:
                if not stale:
                    self.drop(topic.name)
            else:
                self._update_topic(topic, stale=stale)
        self._update_brokers(reply.brokers, stale=stale)

    def drop(self, name: str) -> None:
        """Drop a topic that was deleted, or that this client no longer uses."""
        topic = self._topics.pop(name, None)
        if topic is None:
            return
        known = [self._partitions.pop(TopicPartition(name, part.partition), part) for part in topic.partitions]
        self._dropped[name] = msgspec.structs.replace(topic, partitions=tuple(known))

    def topic(self, name: str) -> TopicMetadata | None:
        return self._topics.get(name)

    def topic_names(self) -> list[str]:
        return sorted(self._topics)

    def partitions(self, name: str) -> list[TopicPartition]:
        """Return all known partitions of a topic, in order."""
        topic = self._topics.get(name)
        return [TopicPartition(name, part.partition) for part in topic.partitions] if topic else []

    def partition(self, tp: TopicPartition) -> PartitionMetadata | None:
        return self._partitions.get(tp)

    def leader(self, tp: TopicPartition) -> Leader | None:
        """Return the leader, or None if there is no leader or its address is unknown."""
        known = self._partitions.get(tp)
        if known is None or known.leader == NO_LEADER or self.endpoint(known.leader) is None:
            return None
        return Leader(known.leader, known.leader_epoch)

    def merge_leader(self, tp: TopicPartition, leader: int, epoch: int) -> bool:
        """Store the new leader of a partition that a former leader has named (KIP-951).

        Return whether the leader is new and its address is known.
        """
        known = self._partitions.get(tp)
        if known is None or epoch <= known.leader_epoch or self.endpoint(leader) is None:
            return False
        self.version += 1
        self._partitions[tp] = msgspec.structs.replace(known, leader=leader, leader_epoch=epoch)
        return True

    def schema(self, name: str, schema_id: int) -> TopicSchema | None:
        topic = self._topics.get(name)
        return next((schema for schema in topic.schemas if schema.schema_id == schema_id), None) if topic else None

    def group_by_leader(self, partitions: Iterable[TopicPartition]) -> dict[int | None, list[TopicPartition]]:
        """Group partitions by the broker id of their leader. Partitions without a known leader get the key None."""
        groups: dict[int | None, list[TopicPartition]] = {}
        for tp in partitions:
            leader = self.leader(tp)
            groups.setdefault(leader.broker_id if leader else None, []).append(tp)
        return groups

    def _update_brokers(self, brokers: Iterable[BrokerEndpoint], *, stale: bool) -> None:
        named = {broker.broker_id: broker for broker in brokers}
        for broker_id, broker in list(named.items()):
            known = self.brokers.get(broker_id)
            if known is not None and known.incarnation > broker.incarnation:
                named[broker_id] = known
        if stale:  # An older response may add a broker, but must not remove one that was registered later.
            self.brokers = {**self.brokers, **named}
        else:
            leaders = {part.leader for part in self._partitions.values()}
            known_ones = {**self._departed, **self.brokers}
            self._departed = {number: known_ones[number] for number in leaders & known_ones.keys()}
            self.brokers = named
        self._departed = {number: broker for number, broker in self._departed.items() if number not in self.brokers}

    def _update_topic(self, topic: TopicMetadata, *, stale: bool) -> None:
        known = self._topics.get(topic.name)
        other = known or self._dropped.get(topic.name)
        if other is not None and other.topic_id != topic.topic_id:
            ordered = topic.order > 0 and other.order > 0
            if topic.order < other.order if ordered else stale:
                return  # The broker that replied does not know the newer topic yet.
            self.drop(topic.name)
            known = None
        left = self._dropped.pop(topic.name, None)
        earlier = {part.partition: part for part in left.partitions} if left and left.topic_id == topic.topic_id else {}
        merged = []
        for partition in topic.partitions:
            tp = TopicPartition(topic.name, partition.partition)
            before = self._partitions.get(tp) or earlier.get(partition.partition)
            if before is not None:
                partition = _newer(before, partition)
            self._partitions[tp] = partition
            merged.append(partition)
        if known is not None:
            # Partitions and schemas are never removed. So keep those that the broker that replied does not know yet.
            merged += known.partitions[len(merged) :]
            if len(known.schemas) > len(topic.schemas):
                topic = msgspec.structs.replace(topic, schemas=known.schemas)
        order = max(topic.order, known.order) if known is not None else topic.order
        self._topics[topic.name] = msgspec.structs.replace(topic, partitions=tuple(merged), order=order)


class MetadataPieces:
    """A collector of a metadata response that may come in pieces.

    The caller sends ``request`` and passes the response to ``add``, until ``request`` is None. Then ``reply`` is
    complete.

    The metadata may change between two pieces. Such a change does no harm, because only the leader epoch decides which
    state of a partition is newer.
    """

    def __init__(self, request: Metadata) -> None:
        self.request: Metadata | None = request
        self._pieces = 0
        self._last: MetadataReply | None = None
        self._controller_epoch = -1
        self._topics: list[TopicMetadata] = []

    def add(self, piece: MetadataReply) -> None:
        """Add the response to ``request``.

        Raises:
            BrokerError: INVALID_REQUEST for too many pieces; a retriable error if a topic was recreated between two of
                its pieces.
        """
        assert self.request is not None, "it is whole"
        start = self.request.start
        topics = list(piece.topics)
        if start is not None and start[1] > 0:
            self._join_split_topic(start[0], topics)
        self._topics += topics
        # Use the lowest controller epoch of all pieces, because topics that the oldest piece does not have may exist.
        known = piece.controller_epoch if self._last is None else self._controller_epoch
        self._controller_epoch = min(known, piece.controller_epoch)
        self._last = piece
        self._pieces += 1
        if piece.next is not None and self._pieces >= _MOST_PIECES:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"metadata in more than {_MOST_PIECES} pieces")
        self.request = None if piece.next is None else msgspec.structs.replace(self.request, start=piece.next)

    def _join_split_topic(self, name: str, topics: list[TopicMetadata]) -> None:
        """Join the last topic of the previous piece with its continuation in ``topics``, if the topic still exists."""
        first = self._topics.pop()
        if not topics or topics[0].name != name or topics[0].code != ErrorCode.NONE:
            return  # The topic was deleted in the meantime.
        if topics[0].topic_id != first.topic_id:
            raise BrokerError(
                ErrorCode.LEADER_NOT_AVAILABLE, f"topic {name!r} was recreated between two pieces of its metadata"
            )
        topics[0] = msgspec.structs.replace(topics[0], partitions=first.partitions + topics[0].partitions)

    @property
    def reply(self) -> MetadataReply:
        assert self._last is not None and self.request is None, "it is not whole yet"
        if self._pieces == 1:
            return self._last
        return msgspec.structs.replace(
            self._last, topics=tuple(self._topics), controller_epoch=self._controller_epoch, next=None
        )


def _newer(known: PartitionMetadata, received: PartitionMetadata) -> PartitionMetadata:
    """Return the newer state of a partition.

    A leader epoch has only one leader. So a broker that reports the same epoch without a leader does not know about the
    election yet.
    """
    if known.leader_epoch > received.leader_epoch:
        return known
    if known.leader_epoch == received.leader_epoch and received.leader == NO_LEADER:
        return msgspec.structs.replace(received, leader=known.leader)
    return received


def topic_error(topic: TopicMetadata) -> BrokerError | None:
    """Return the error that a response has for a topic, or None."""
    if topic.code == ErrorCode.NONE:
        return None
    return BrokerError(topic.code, topic.detail or f"topic {topic.name!r}")
