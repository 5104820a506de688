"""What the controller knows: topics, partitions and who hosts them. Mutable, owned by one ``Controller``.

Nothing is decided here; the tables are kept consistent: every partition of a known topic is found under each of its
replicas, and an update message for it can be built at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from sparklog.config import topic_config
from sparklog.controller.effects import StateWrite
from sparklog.controller.events import TopicSnapshot
from sparklog.errors import ConfigError
from sparklog.model import NO_EPOCH, NO_LEADER, LeaderAndIsr, TopicPartition, TopicRecord, VersionedState
from sparklog.protocol.messages import PartitionDecision, TopicChange

#: Told to brokers of a partition none of whose replicas has ever been alive: so that they know it exists.
_NO_STATE = VersionedState(LeaderAndIsr(NO_LEADER, NO_EPOCH, (), NO_EPOCH), NO_EPOCH)


class Partition:
    """One partition: its node as last known, and what is under way for it."""

    __slots__ = ("broken", "pending", "replicas", "rereading", "stored", "suspects", "topic", "tp")

    def __init__(self, topic: Topic, number: int, replicas: tuple[int, ...]) -> None:
        self.tp = TopicPartition(topic.record.name, number)
        self.topic = topic
        self.replicas = replicas
        #: The node as last known; set by ``ClusterState.store`` only.
        self.stored: VersionedState | None = None
        #: The write under way. While there is one nothing else is decided.
        self.pending: StateWrite | None = None
        #: A read is under way whose result must be known before anything is decided.
        self.rereading = False
        #: Untrusted brokers whose claim to this ISR is from before they lost their page cache.
        self.suspects: set[int] = set()
        #: Brokers that said they cannot open this replica.
        self.broken: set[int] = set()

    def told(self, stored: VersionedState | None) -> PartitionDecision:
        found = stored or _NO_STATE
        return PartitionDecision(
            self.tp.topic, self.topic.record.topic_id, self.tp.partition, found.state, found.version, self.replicas
        )


class Topic:
    """One topic. ``deleting``: its nodes are being removed, nothing is decided for it any more."""

    __slots__ = ("announced", "deleting", "partitions", "record", "unclean")

    def __init__(self, record: TopicRecord) -> None:
        self.record = record
        self.partitions: list[Partition] = []
        self.unclean = False
        self.deleting = False
        #: Brokers are told of a topic once its partitions have their first states, all in one update.
        self.announced = False

    @property
    def change(self) -> TopicChange:
        record = self.record
        return TopicChange(
            record.name, record.topic_id, record.schemas, record.key_columns, record.event_time, record.config
        )


class ClusterState:
    """Topics by name, and partitions by the brokers that host them."""

    def __init__(self, topic_defaults: dict[str, str]) -> None:
        self._defaults = topic_defaults
        self.topics: dict[str, Topic] = {}
        self._hosted: dict[int, dict[Partition, None]] = {}
        self._led: Counter[int] = Counter()

    def hosted(self, broker_id: int) -> Iterable[Partition]:
        return self._hosted.get(broker_id, ())

    def leads(self, broker_id: int) -> bool:
        """Whether any partition's node names this broker as its leader."""
        return self._led[broker_id] > 0

    def store(self, partition: Partition, stored: VersionedState) -> None:
        """The partition's node is known to hold this."""
        if partition.stored is not None:
            self._led[partition.stored.state.leader] -= 1
        partition.stored = stored
        self._led[stored.state.leader] += 1

    def partition(self, tp: TopicPartition) -> Partition | None:
        topic = self.topics.get(tp.topic)
        if topic is None or not 0 <= tp.partition < len(topic.partitions):
            return None
        return topic.partitions[tp.partition]

    def partitions(self) -> Iterator[Partition]:
        for topic in self.topics.values():
            yield from topic.partitions

    def put_topic(self, snapshot: TopicSnapshot) -> tuple[Topic, list[Partition]]:
        """Add a topic, or bring a known one (same id) up to date. Returns it and its partitions that are new."""
        record = snapshot.record
        topic = self.topics.get(record.name)
        if topic is None:
            topic = self.topics[record.name] = Topic(record)
        topic.record = record
        topic.unclean = self._unclean(record)
        fresh = []
        for number in range(len(topic.partitions), len(record.assignment)):
            partition = Partition(topic, number, record.assignment[number])
            if number in snapshot.states:
                self.store(partition, snapshot.states[number])
            topic.partitions.append(partition)
            fresh.append(partition)
            for broker_id in partition.replicas:
                self._hosted.setdefault(broker_id, {})[partition] = None
        return topic, fresh

    def drop_topic(self, name: str) -> Topic | None:
        topic = self.topics.pop(name, None)
        if topic is not None:
            for partition in topic.partitions:
                if partition.stored is not None:
                    self._led[partition.stored.state.leader] -= 1
                for broker_id in partition.replicas:
                    self._hosted[broker_id].pop(partition, None)
        return topic

    def _unclean(self, record: TopicRecord) -> bool:
        try:
            return topic_config(record.config, self._defaults).unclean_leader_election
        except ConfigError:
            # Written by a release with other settings. Losing records is never the answer to a doubt.
            return False
