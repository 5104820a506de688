"""The controller's table of topics and partitions, and of the brokers that host the partitions.

The objects of this module are not thread-safe: they are parts of ``Controller``. The module decides nothing. It keeps
its tables consistent: every partition of a known topic is listed under each of its replicas, and an update for it can
be built at any time.
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

#: An upper bound of the number of replicas of a partition.
MAX_REPLICAS = 1000

#: The state that is sent for a partition that has never had a live replica, so that brokers know the partition.
_NO_STATE = VersionedState(LeaderAndIsr(NO_LEADER, NO_EPOCH, (), NO_EPOCH), NO_EPOCH)


class ClusterPartition:
    """A partition, with the last known content of its ZooKeeper node and the operations that are in flight for it."""

    __slots__ = (
        "_last_decision",
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

    def __init__(self, topic: ClusterTopic, number: int) -> None:
        self.tp = TopicPartition(topic.record.name, number)
        self.topic = topic
        #: The replicas and, in ``move``, the reassignment in progress, from the topic's record. Only ``ClusterState``
        #: sets both.
        self.replicas: tuple[int, ...] = ()
        self.move: Reassignment | None = None
        #: The last known content of the node. Only ``ClusterState.store`` sets it.
        self.stored: VersionedState | None = None
        #: The write in flight. Until it ends the controller decides nothing else.
        self.pending: StateWrite | None = None
        #: Whether a read is in flight whose result the controller needs before it decides.
        self.rereading = False
        #: A state that was read, and is applied only after the topic's record has been read as well.
        self.found: VersionedState | None = None
        #: Untrusted brokers that joined this ISR before they lost their page cache.
        self.suspects: set[int] = set()
        #: The ``suspects`` that stay in the table of brokers, because only some of their replicas are untrusted. The
        #: leader must remove these brokers from the ISR.
        self.void: set[int] = set()
        #: The leader epoch and high watermark of the last replica that this term elected because the replica refused a
        #: truncation.
        self.restored = (NO_EPOCH, -1)
        #: Brokers that reported that they cannot open their replica of this partition.
        self.broken: set[int] = set()
        #: The highest leader epoch in the logs of a broker whose logs prove that ZooKeeper was restored from an older
        #: copy. The next leader epoch must be higher.
        self.outdated = NO_EPOCH
        self._last_decision: PartitionDecision | None = None

    @property
    def busy(self) -> bool:
        """Return whether the controller must not decide about the partition now.

        The reason is a write or a read in flight, or the deletion of the topic.
        """
        return self.topic.deleting or self.pending is not None or self.rereading

    @property
    def unfit(self) -> set[int]:
        """Return the brokers whose replicas must not lead: untrusted brokers, and brokers that cannot open the log."""
        return self.suspects | self.broken

    def decision(self, stored: VersionedState | None) -> PartitionDecision:
        found = stored or _NO_STATE
        name, topic_id = self.tp.topic, self.topic.record.topic_id
        move = self.move
        void = tuple(m for m in found.state.isr if m in self.void and m != found.state.leader) if self.void else ()
        if move is None and void:
            return PartitionDecision(
                name, topic_id, self.tp.partition, found.state, found.version, self.replicas, leaving=void
            )
        if move is None:
            # Cache the result, because up to a hundred brokers receive the same state of each partition.
            last = self._last_decision
            same = last is not None and last.state is found.state and last.version == found.version
            if last is None or not same or last.replicas is not self.replicas:
                last = PartitionDecision(name, topic_id, self.tp.partition, found.state, found.version, self.replicas)
                self._last_decision = last
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


def _leaving(partition: ClusterPartition, move: Reassignment, stored: VersionedState) -> tuple[int, ...]:
    return reassignments.leaving(partition.replicas, move, stored.state.isr, partition.topic.min_isr)


class ClusterTopic:
    """A topic and its partitions.

    While ``deleting`` is true, the topic's ZooKeeper nodes are being removed and the controller decides nothing about
    it.
    """

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
        #: A number that orders topics of the same name: by controller epoch, then by the order in which they became
        #: known.
        self.order = order
        #: The version of the topic's node; only ``ClusterState`` sets it, with ``record``.
        self.version = -1
        #: The write of the record that is in flight. Until it ends the controller starts no other write of the record.
        self.pending: WriteTopic | None = None
        #: Whether the controller waits for a read of the record. Until the read ends the controller does not write the
        #: record.
        self.rereading = False
        self.partitions: list[ClusterPartition] = []
        self.unclean = False
        self.min_isr = 1
        self.deleting = False
        #: Whether the topic has been announced. Brokers receive a new topic in one update, after its partitions have
        #: their first states.
        self.announced = False

    @property
    def moving(self) -> list[ClusterPartition]:
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
    """The table of topics by name, and of partitions by the brokers that host them."""

    def __init__(self, topic_defaults: dict[str, str], *, controller_epoch: int) -> None:
        self._defaults = topic_defaults
        self._last_order = controller_epoch << 32
        self.topics: dict[str, ClusterTopic] = {}
        #: Whether some existing topics were unreadable at the start of the term. Their records may have become known
        #: since, but not their states.
        self.incomplete = False
        self._hosted: dict[int, dict[ClusterPartition, None]] = {}
        self._led: Counter[int] = Counter()
        #: For each broker, the leaders of the partitions that it hosts, each with the number of these partitions.
        self._leaders: defaultdict[int, Counter[int]] = defaultdict(Counter)
        #: The number of states stored so far.
        self.stored_count = 0
        #: The partitions with a reassignment in progress.
        self.moving: dict[ClusterPartition, None] = {}

    def hosted(self, broker_id: int) -> Iterable[ClusterPartition]:
        return self._hosted.get(broker_id, ())

    def hosts(self) -> Iterable[int]:
        """Return the brokers to which at least one replica is assigned."""
        return [broker_id for broker_id, partitions in self._hosted.items() if partitions]

    def leads(self, broker_id: int) -> bool:
        """Return whether the known state of any partition has this broker as the leader."""
        return self._led[broker_id] > 0

    def leaders(self, broker_id: int) -> list[int]:
        """Return the leaders of the partitions that this broker hosts, each once. ``NO_LEADER`` may be one of them."""
        return [leader for leader, count in self._leaders[broker_id].items() if count]

    def store(self, partition: ClusterPartition, stored: VersionedState) -> None:
        """Record the state that the partition's node now has."""
        known = partition.stored
        if known is None or known.state.leader != stored.state.leader:
            self._count_leader(partition, -1)
            partition.stored = stored
            self._count_leader(partition, 1)
        partition.stored = stored
        self.stored_count += 1

    def _count_leader(self, partition: ClusterPartition, by: int) -> None:
        if partition.stored is not None:
            leader = partition.stored.state.leader
            self._led[leader] += by
            for broker_id in partition.replicas:
                self._leaders[broker_id][leader] += by

    def partition(self, tp: TopicPartition) -> ClusterPartition | None:
        topic = self.topics.get(tp.topic)
        if topic is None or not 0 <= tp.partition < len(topic.partitions):
            return None
        return topic.partitions[tp.partition]

    def partitions(self) -> Iterator[ClusterPartition]:
        for topic in self.topics.values():
            yield from topic.partitions

    def put_topic(self, snapshot: TopicSnapshot) -> tuple[ClusterTopic, list[ClusterPartition]]:
        """Add a topic, or update the known topic with the same id.

        Return the topic, and its partitions that are new or whose replicas or reassignment changed.
        """
        record = snapshot.record
        topic = self.topics.get(record.name)
        if topic is None:
            self._last_order += 1
            topic = self.topics[record.name] = ClusterTopic(record, self._last_order)
        for number in range(len(topic.partitions), len(record.assignment)):
            partition = ClusterPartition(topic, number)
            if number in snapshot.states:
                self.store(partition, snapshot.states[number])
            topic.partitions.append(partition)
        return topic, self.put_record(topic, record, snapshot.version)

    def put_record(self, topic: ClusterTopic, record: TopicRecord, version: int) -> list[ClusterPartition]:
        """Store the record that the topic's node now has.

        Return the partitions whose replicas or reassignment changed.
        """
        topic.record, topic.version = record, version
        self._follow_config(topic)
        changed = []
        for partition, replicas in zip(topic.partitions, record.assignment, strict=False):
            move = record.reassigning.get(partition.tp.partition)
            if (replicas, move) != (partition.replicas, partition.move):
                self._assign(partition, replicas, move)
                changed.append(partition)
        return changed

    def _assign(self, partition: ClusterPartition, replicas: tuple[int, ...], move: Reassignment | None) -> None:
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

    def drop_topic(self, name: str) -> ClusterTopic | None:
        topic = self.topics.pop(name, None)
        if topic is not None:
            for partition in topic.partitions:
                self._count_leader(partition, -1)
                self.moving.pop(partition, None)
                for broker_id in partition.replicas:
                    self._hosted[broker_id].pop(partition, None)
        return topic

    def _follow_config(self, topic: ClusterTopic) -> None:
        try:
            config = topic_config(topic.record.config, self._defaults)
        except ConfigError:
            # Another release wrote this value. The controller then assumes the setting that cannot lose records.
            topic.unclean, topic.min_isr = False, MAX_REPLICAS
            return
        topic.unclean, topic.min_isr = config.unclean_leader_election, config.min_insync_replicas
