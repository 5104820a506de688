"""What the controller knows: topics, partitions and who hosts them. Mutable, owned by one ``Controller``.

Nothing is decided here; the tables are kept consistent: every partition of a known topic is found under each of its
replicas, and an update message for it can be built at any time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from sparklog.config import topic_config
from sparklog.controller import reassignments
from sparklog.controller.effects import StateWrite, WriteTopic
from sparklog.controller.events import TopicSnapshot
from sparklog.errors import ConfigError
from sparklog.model import NO_EPOCH, NO_LEADER, LeaderAndIsr, Reassignment, TopicPartition, TopicRecord, VersionedState
from sparklog.protocol.messages import PartitionDecision, TopicChange

#: More than any partition has.
MAX_REPLICAS = 1000

#: Told to brokers of a partition none of whose replicas has ever been alive: so that they know it exists.
_NO_STATE = VersionedState(LeaderAndIsr(NO_LEADER, NO_EPOCH, (), NO_EPOCH), NO_EPOCH)


class Partition:
    """One partition: its node as last known, and what is under way for it."""

    __slots__ = (
        "_told",
        "broken",
        "found",
        "move",
        "outdated",
        "pending",
        "replicas",
        "rereading",
        "restored",
        "stored",
        "suspects",
        "topic",
        "tp",
        "void",
    )

    def __init__(self, topic: Topic, number: int) -> None:
        self.tp = TopicPartition(topic.record.name, number)
        self.topic = topic
        #: As the topic's record has them, as is ``move``, the change under way; set by ``ClusterState`` only.
        self.replicas: tuple[int, ...] = ()
        self.move: Reassignment | None = None
        #: The node as last known; set by ``ClusterState.store`` only.
        self.stored: VersionedState | None = None
        #: The write under way. While there is one nothing else is decided.
        self.pending: StateWrite | None = None
        #: A read is under way whose result must be known before anything is decided.
        self.rereading = False
        #: Read, and not taken before the topic's record is read as well.
        self.found: VersionedState | None = None
        #: Untrusted brokers whose claim to this ISR is from before they lost their page cache.
        self.suspects: set[int] = set()
        #: Those of them that doubt this log and not all of theirs: the leader is told to take them out of the ISR.
        self.void: set[int] = set()
        #: Leader epoch and high watermark of the last replica that this term elected because it refused a cut.
        self.restored = (NO_EPOCH, -1)
        #: Brokers that said they cannot open this replica.
        self.broken: set[int] = set()
        #: The highest leader epoch that was given before ZooKeeper was put back from an older copy, as far as a log
        #: proves it: the next one is higher.
        self.outdated = NO_EPOCH
        self._told: PartitionDecision | None = None

    @property
    def busy(self) -> bool:
        """Nothing is decided now; there will be another look when an answer comes, if the topic is not going."""
        return self.topic.deleting or self.pending is not None or self.rereading

    @property
    def unfit(self) -> set[int]:
        """Brokers whose replica is not to lead."""
        return self.suspects | self.broken

    def told(self, stored: VersionedState | None) -> PartitionDecision:
        found = stored or _NO_STATE
        name, topic_id = self.tp.topic, self.topic.record.topic_id
        move = self.move
        void = tuple(m for m in found.state.isr if m in self.void and m != found.state.leader) if self.void else ()
        if move is None and void:
            return PartitionDecision(
                name, topic_id, self.tp.partition, found.state, found.version, self.replicas, leaving=void
            )
        if move is None:
            # A hundred brokers are told the same of each partition.
            last = self._told
            same = last is not None and last.state is found.state and last.version == found.version
            if last is None or not same or last.replicas is not self.replicas:
                last = PartitionDecision(name, topic_id, self.tp.partition, found.state, found.version, self.replicas)
                self._told = last
            return last
        return PartitionDecision(
            name,
            topic_id,
            self.tp.partition,
            found.state,
            found.version,
            self.replicas,
            move.target,
            move.original,
            tuple(dict.fromkeys((*void, *_leaving(self, move, found)))),
            move.throttle_bytes,
        )


def _leaving(partition: Partition, move: Reassignment, stored: VersionedState) -> tuple[int, ...]:
    return reassignments.leaving(partition.replicas, move, stored.state.isr, partition.topic.min_isr)


class Topic:
    """One topic. ``deleting``: its nodes are being removed, nothing is decided for it any more."""

    __slots__ = (
        "announced",
        "deleting",
        "min_isr",
        "order",
        "partitions",
        "pending",
        "record",
        "rereading",
        "unclean",
        "version",
    )

    def __init__(self, record: TopicRecord, order: int) -> None:
        self.record = record
        #: Which topics of its name are older: controller epoch and, within it, the order they became known in.
        self.order = order
        #: Of the topic's node; set with ``record``, by ``ClusterState`` only.
        self.version = -1
        #: The write of the record under way. While there is one no other is ordered.
        self.pending: WriteTopic | None = None
        #: Nor while the record is read again after such a write.
        self.rereading = False
        self.partitions: list[Partition] = []
        self.unclean = False
        self.min_isr = 1
        self.deleting = False
        #: Brokers are told of a topic once its partitions have their first states, all in one update.
        self.announced = False

    @property
    def moving(self) -> list[Partition]:
        return [self.partitions[number] for number in self.record.reassigning if number < len(self.partitions)]

    @property
    def change(self) -> TopicChange:
        record = self.record
        return TopicChange(
            record.name,
            record.topic_id,
            record.schemas,
            record.key_columns,
            record.event_time,
            record.config,
            self.order,
        )


class ClusterState:
    """Topics by name, and partitions by the brokers that host them."""

    def __init__(self, topic_defaults: dict[str, str], *, controller_epoch: int) -> None:
        self._defaults = topic_defaults
        self._last_order = controller_epoch << 32
        self.topics: dict[str, Topic] = {}
        #: Topics existed that could not be read when the term began. They may be known by now, and their states not.
        self.incomplete = False
        self._hosted: dict[int, dict[Partition, None]] = {}
        self._led: Counter[int] = Counter()
        #: By broker, who leads how many of those that it hosts.
        self._leaders: defaultdict[int, Counter[int]] = defaultdict(Counter)
        #: States that have become known: grows with each.
        self.stores = 0
        #: Partitions being moved.
        self.moving: dict[Partition, None] = {}

    def hosted(self, broker_id: int) -> Iterable[Partition]:
        return self._hosted.get(broker_id, ())

    def hosts(self) -> Iterable[int]:
        """Brokers that hold replicas, or should."""
        return [broker_id for broker_id, partitions in self._hosted.items() if partitions]

    def leads(self, broker_id: int) -> bool:
        """Whether any partition's node names this broker as its leader."""
        return self._led[broker_id] > 0

    def leaders(self, broker_id: int) -> list[int]:
        """Whom the nodes of partitions that this broker hosts name as their leaders, each once."""
        return [leader for leader, count in self._leaders[broker_id].items() if count]

    def store(self, partition: Partition, stored: VersionedState) -> None:
        """The partition's node is known to hold this."""
        known = partition.stored
        if known is None or known.state.leader != stored.state.leader:
            self._count_leader(partition, -1)
            partition.stored = stored
            self._count_leader(partition, 1)
        partition.stored = stored
        self.stores += 1

    def _count_leader(self, partition: Partition, by: int) -> None:
        if partition.stored is not None:
            leader = partition.stored.state.leader
            self._led[leader] += by
            for broker_id in partition.replicas:
                self._leaders[broker_id][leader] += by

    def partition(self, tp: TopicPartition) -> Partition | None:
        topic = self.topics.get(tp.topic)
        if topic is None or not 0 <= tp.partition < len(topic.partitions):
            return None
        return topic.partitions[tp.partition]

    def partitions(self) -> Iterator[Partition]:
        for topic in self.topics.values():
            yield from topic.partitions

    def put_topic(self, snapshot: TopicSnapshot) -> tuple[Topic, list[Partition]]:
        """Add a topic, or bring a known one (same id) up to date. Returns it and its partitions that are new or whose
        replicas or move are."""
        record = snapshot.record
        topic = self.topics.get(record.name)
        if topic is None:
            self._last_order += 1
            topic = self.topics[record.name] = Topic(record, self._last_order)
        for number in range(len(topic.partitions), len(record.assignment)):
            partition = Partition(topic, number)
            if number in snapshot.states:
                self.store(partition, snapshot.states[number])
            topic.partitions.append(partition)
        return topic, self.put_record(topic, record, snapshot.version)

    def put_record(self, topic: Topic, record: TopicRecord, version: int) -> list[Partition]:
        """The topic's node is known to hold this. Returns the partitions that it changes."""
        topic.record, topic.version = record, version
        self._follow_config(topic)
        changed = []
        for partition, replicas in zip(topic.partitions, record.assignment, strict=False):
            move = record.reassigning.get(partition.tp.partition)
            if (replicas, move) != (partition.replicas, partition.move):
                self._assign(partition, replicas, move)
                changed.append(partition)
        return changed

    def _assign(self, partition: Partition, replicas: tuple[int, ...], move: Reassignment | None) -> None:
        self._count_leader(partition, -1)
        for broker_id in partition.replicas:
            if broker_id not in replicas:
                self._hosted[broker_id].pop(partition, None)
        for broker_id in replicas:
            self._hosted.setdefault(broker_id, {})[partition] = None
        partition.replicas, partition.move = replicas, move
        self._count_leader(partition, 1)
        partition.broken.intersection_update(replicas)
        if move is None:
            self.moving.pop(partition, None)
        else:
            self.moving[partition] = None

    def drop_topic(self, name: str) -> Topic | None:
        topic = self.topics.pop(name, None)
        if topic is not None:
            for partition in topic.partitions:
                self._count_leader(partition, -1)
                self.moving.pop(partition, None)
                for broker_id in partition.replicas:
                    self._hosted[broker_id].pop(partition, None)
        return topic

    def _follow_config(self, topic: Topic) -> None:
        try:
            config = topic_config(topic.record.config, self._defaults)
        except ConfigError:
            # Written by a release with other settings. Losing records is never the answer to a doubt.
            topic.unclean, topic.min_isr = False, MAX_REPLICAS
            return
        topic.unclean, topic.min_isr = config.unclean_leader_election, config.min_insync_replicas
