"""The metadata of the cluster, from the controller's updates, for this broker and its clients.

This module is pure. States of a partition may arrive in any order; the version of its ZooKeeper node tells which one is
newest. A leader's own ISR write enters the cache at once, so the controller's later update about it changes nothing.
Replicas and reassignments are those of the controller's last update. The cache decides nothing: a partition's
``Replica`` decides what this broker may do with the partition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from sparklog.config import TopicConfig, topic_config
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import (
    DEFAULT_LISTENER,
    NO_LEADER,
    BrokerEndpoint,
    LeaderAndIsr,
    TopicPartition,
    check_topic_name,
    is_internal,
)
from sparklog.protocol.messages import (
    ControlUpdate,
    MetadataReply,
    PartitionDecision,
    PartitionMetadata,
    TopicChange,
    TopicMetadata,
)

_FORGOTTEN_KEPT = 10_000
#: The limit of one reply to a client, in partitions. A reply of this size takes about 20 ms of the broker's event loop,
#: and has 0.5 MB.
_PIECE = 20_000
#: The number of schema bytes that counts as one partition of ``_PIECE``.
_PARTITION_BYTES = 25


@dataclass(slots=True)
class CachedTopic:
    """The metadata of one topic, as of its last update.

    ``config`` combines the topic's own settings with the cluster's defaults.
    """

    change: TopicChange
    config: TopicConfig
    partitions: dict[int, PartitionDecision] = field(default_factory=dict)
    #: The topic's cached entry in Metadata replies, with schemas; dropped when the topic changes.
    built: TopicMetadata | None = None


class MetadataCache:
    """A cache of the cluster's metadata in one broker: its live brokers, topics and partitions.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self, cluster_id: str, topic_defaults: Mapping[str, str], inter_broker: str = DEFAULT_LISTENER
    ) -> None:
        """Create an empty cache. ``inter_broker`` is the listener through which brokers connect to each other."""
        self.cluster_id = cluster_id
        self.controller_epoch = -1
        self.brokers: tuple[BrokerEndpoint, ...] = ()
        self.incarnations: Mapping[int, int] = {}
        #: The ids of brokers of release 0.1.0, which cannot prove their identity.
        self.unproven: frozenset[int] = frozenset()
        self._endpoints: dict[int, BrokerEndpoint] = {}
        self._inter_broker = inter_broker
        #: For each listener, the live brokers with their addresses of the listener; filled on demand.
        self._shown: dict[str, dict[int, BrokerEndpoint]] = {}
        self._topic_defaults = topic_defaults
        self._topics: dict[str, CachedTopic] = {}
        #: The names of the topics by topic id.
        self._names: dict[str, str] = {}
        #: The ids of deleted topics, the newest last; at most ``_FORGOTTEN_KEPT``.
        self.forgotten: dict[str, None] = {}
        #: Partitions with a reassignment in progress.
        self.moving: dict[TopicPartition, PartitionDecision] = {}
        #: Whether the controller has confirmed that no ISR contains this broker. A stopping broker requests this
        #: confirmation.
        self.relieved = False
        #: A counter that grows whenever ``moving`` changes.
        self.moves_seen = 0
        #: (controller epoch, sequence) of the newest applied update
        self._newest = (-1, -1)

    # --- questions ---

    def topic(self, name: str) -> CachedTopic | None:
        return self._topics.get(name)

    def topics(self) -> Iterable[str]:
        return self._topics

    def name_of(self, topic_id: str) -> str | None:
        """Return the name of the topic with this id; None if there is no such topic."""
        return self._names.get(topic_id)

    def partition(self, tp: TopicPartition) -> PartitionDecision | None:
        topic = self._topics.get(tp.topic)
        return topic.partitions.get(tp.partition) if topic else None

    def endpoint(self, broker_id: int) -> BrokerEndpoint | None:
        """Return a live broker with the addresses of all its listeners; None if there is no such broker."""
        return self._endpoints.get(broker_id)

    def peer(self, broker_id: int) -> BrokerEndpoint | None:
        """Return a live broker with its address for other brokers; None if there is no such broker."""
        return self.shown(self._inter_broker).get(broker_id)

    def shown(self, listener: str) -> dict[int, BrokerEndpoint]:
        """Return each live broker that has this listener, with its address of the listener. The keys are broker ids.

        Source: Kafka's KIP-103, where a client gets the addresses of the listener that it is connected to.
        """
        found = self._shown.get(listener)
        if found is None:
            addresses = (broker.at(listener) for broker in self.brokers)
            found = self._shown[listener] = {address.broker_id: address for address in addresses if address is not None}
        return found

    def metadata(
        self,
        cid: int,
        names: tuple[str, ...] | None,
        *,
        listener: str = DEFAULT_LISTENER,
        schemas: bool,
        internal: bool = False,
        start: tuple[str, int] | None = None,
    ) -> MetadataReply:
        """Return one reply to a Metadata request: the topics from ``start`` on, up to the size limit of a reply.

        The addresses of brokers are those of ``listener``, through which the client has sent the request.

        An unknown or invalid name gets an entry with an error. The reply has internal topics if the request names them,
        or if it asks for all topics and ``internal`` is set.

        Raises:
            BrokerError: INVALID_REQUEST if ``start`` is not one of the requested topics.
        """
        topics: list[TopicMetadata] = []
        brokers = tuple(self.shown(listener).values())
        room = _PIECE

        def reply(following: tuple[str, int] | None = None) -> MetadataReply:
            return MetadataReply(cid, self.cluster_id, self.controller_epoch, brokers, tuple(topics), next=following)

        for name in self._chosen(names, start, internal=internal):
            if room <= 0:
                return reply((name, 0))
            first = start[1] if start is not None and start[0] == name else 0
            topic = self._describe(name, schemas=schemas)
            parts = topic.partitions[first : first + room]
            whole = len(parts) == len(topic.partitions)
            topics.append(topic if whole else msgspec.structs.replace(topic, partitions=parts))
            if first + len(parts) < len(topic.partitions):
                return reply((name, first + len(parts)))
            room -= _cost(topics[-1])
        return reply()

    def _chosen(self, names: tuple[str, ...] | None, start: tuple[str, int] | None, *, internal: bool) -> list[str]:
        """Return the requested topics from ``start`` on.

        If all topics are requested, the topic of ``start`` may have been deleted meanwhile.
        """
        named = (
            sorted(name for name in self._topics if internal or not is_internal(name))
            if names is None
            else list(dict.fromkeys(names))
        )
        if start is None:
            return named
        if start[1] < 0 or (names is not None and start[0] not in named):
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"metadata from {start[0]!r}, {start[1]} on: not requested")
        return named[bisect_left(named, start[0]) if names is None else named.index(start[0]) :]

    def _describe(self, name: str, *, schemas: bool) -> TopicMetadata:
        topic = self._topics.get(name)
        if topic is None:
            bad = check_topic_name(name)
            if bad:
                return TopicMetadata(ErrorCode.INVALID_TOPIC_EXCEPTION, name, detail=bad)
            return TopicMetadata(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name, detail=f"this broker knows no topic {name!r}"
            )
        if topic.built is None:
            topic.built = _built(topic)
        return topic.built if schemas else msgspec.structs.replace(topic.built, schemas=())

    # --- updates ---

    def is_overtaken(self, update: ControlUpdate) -> bool:
        """Return whether this broker has already applied a later update from the same or a newer controller.

        An overtaken update could not damage partition states, which have versions. But its list of live brokers is
        outdated, and an overtaken full update lacks newer partitions.
        """
        return (update.controller_epoch, update.sequence) < self._newest

    def apply(self, update: ControlUpdate) -> None:
        """Apply an update whose controller epoch and incarnation were checked. Ignore an overtaken update.

        Raises:
            ConfigError: this version does not know a topic's setting. No part of the update is applied.
        """
        if self.is_overtaken(update):
            return
        configs = [topic_config(change.config, self._topic_defaults) for change in update.topics]
        self._newest = (update.controller_epoch, update.sequence)
        self.controller_epoch = max(self.controller_epoch, update.controller_epoch)
        self.relieved = update.relieved
        if update.brokers is not None:
            self._set_brokers(update.brokers)
        if update.full:
            self._keep_only(update)
        for change, config in zip(update.topics, configs, strict=True):
            self._set_topic(change, config)
        for decision in update.partitions:
            self._set_partition(decision)
        for name, topic_id in update.deleted:
            known = self._topics.get(name)
            if known is not None and known.change.topic_id == topic_id:
                self._note_deleted(known)
                del self._topics[name]
        self._drop_moves()

    def state_written(self, tp: TopicPartition, state: LeaderAndIsr, *, version: int, topic_id: str) -> None:
        """Store a newer partition state that this broker wrote to ZooKeeper as leader, or read from ZooKeeper."""
        known = self.partition(tp)
        if known is not None and known.topic_id == topic_id and version > known.version:
            self._set_partition(msgspec.structs.replace(known, state=state, version=version))

    def _set_brokers(self, brokers: tuple[BrokerEndpoint, ...]) -> None:
        self.brokers = brokers
        self._shown = {}
        self._endpoints = {broker.broker_id: broker for broker in brokers}
        self.incarnations = {broker.broker_id: broker.incarnation for broker in brokers}
        self.unproven = frozenset(broker.broker_id for broker in brokers if not broker.proves)

    def _keep_only(self, update: ControlUpdate) -> None:
        """Drop topics and partitions that a full update does not name."""
        named = {(decision.topic, decision.partition) for decision in update.partitions}
        topics = {change.name for change in update.topics}
        for name in self._topics.keys() - topics:
            self._note_deleted(self._topics[name])
        self._topics = {name: topic for name, topic in self._topics.items() if name in topics}
        for name, topic in self._topics.items():
            topic.partitions = {p: state for p, state in topic.partitions.items() if (name, p) in named}
            topic.built = None

    def _set_topic(self, change: TopicChange, config: TopicConfig) -> None:
        known = self._topics.get(change.name)
        same = known is not None and known.change.topic_id == change.topic_id
        if known is not None and not same:
            self._note_deleted(known)
        self._names[change.topic_id] = change.name
        self._topics[change.name] = CachedTopic(change, config, known.partitions if known and same else {})

    def _note_deleted(self, topic: CachedTopic) -> None:
        self._names.pop(topic.change.topic_id, None)
        self.forgotten[topic.change.topic_id] = None
        if len(self.forgotten) > _FORGOTTEN_KEPT:
            del self.forgotten[next(iter(self.forgotten))]

    def _set_partition(self, decision: PartitionDecision) -> None:
        topic = self._topics.get(decision.topic)
        if topic is None or topic.change.topic_id != decision.topic_id:
            return
        known = topic.partitions.get(decision.partition)
        if known is not None and decision.version < known.version:
            decision = msgspec.structs.replace(decision, state=known.state, version=known.version)
        elif known is not None and _hides_leader(decision.state, known.state):
            led = msgspec.structs.replace(decision.state, leader=known.state.leader)
            decision = msgspec.structs.replace(decision, state=led)
        if decision != known:
            topic.partitions[decision.partition] = decision
            topic.built = None
            self._note_move(decision)

    def _note_move(self, decision: PartitionDecision) -> None:
        tp = TopicPartition(decision.topic, decision.partition)
        if decision.target:
            self.moving[tp] = decision
        elif self.moving.pop(tp, None) is None:
            return
        self.moves_seen += 1

    def _drop_moves(self) -> None:
        """Drop the reassignments of partitions that no longer exist."""
        gone = [tp for tp, decision in self.moving.items() if self.partition(tp) is not decision]
        for tp in gone:
            del self.moving[tp]
        self.moves_seen += bool(gone)


def _hides_leader(told: LeaderAndIsr, known: LeaderAndIsr) -> bool:
    """Return whether an update names no leader although the known leader still leads.

    After a broker registers again, the controller names no leader for partitions that the broker's earlier incarnation
    led. The broker leads them until there is a new leader epoch, so clients must still find it. If a partition has
    really lost its leader, its leader epoch is new.
    """
    return told.leader == NO_LEADER != known.leader and told.leader_epoch == known.leader_epoch


def _cost(topic: TopicMetadata) -> int:
    """Return how much of a reply's limit the topic uses, in partitions."""
    return 1 + len(topic.partitions) + sum(len(schema.message) for schema in topic.schemas) // _PARTITION_BYTES


def _built(topic: CachedTopic) -> TopicMetadata:
    change = topic.change
    partitions = tuple(
        PartitionMetadata(number, known.state.leader, known.state.leader_epoch, known.replicas, known.state.isr)
        for number, known in sorted(topic.partitions.items())
    )
    return TopicMetadata(
        ErrorCode.NONE,
        change.name,
        change.topic_id,
        partitions,
        change.schemas,
        change.key_columns,
        change.event_time,
        change.config,
        order=change.order,
    )
