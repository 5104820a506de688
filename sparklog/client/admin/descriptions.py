"""The results of the admin client, as immutable values.

This module is pure.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from sparklog.model import NO_LEADER, TopicPartition
from sparklog.protocol import messages
from sparklog.protocol.messages import DescribeBrokerReply, MetadataReply, ReplicaDescription, TopicMetadata
from sparklog.record.schema import parse_schema


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """A partition of a topic: its replicas, its leader and its ISR."""

    partition: int
    #: Broker id, or None while there is no leader.
    leader: int | None
    leader_epoch: int
    #: Broker ids, preferred leader first.
    replicas: tuple[int, ...]
    isr: tuple[int, ...]

    @property
    def under_replicated(self) -> bool:
        return len(self.isr) < len(self.replicas)


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic: its partitions, its schema and its settings.

    Only ``create_topic`` and ``create_partitions`` set ``warning``, which says that replicas share a host, and why.
    """

    name: str
    topic_id: str
    partitions: tuple[PartitionDescription, ...]
    schema: pa.Schema
    schema_id: int
    key: tuple[str, ...]
    event_time: str | None
    #: The topic's own settings, without defaults.
    config: Mapping[str, str] = field(default_factory=dict)
    warning: str = ""

    @property
    def replication_factor(self) -> int:
        return len(self.partitions[0].replicas) if self.partitions else 0

    def topic_partitions(self) -> list[TopicPartition]:
        return [TopicPartition(self.name, part.partition) for part in self.partitions]


@dataclass(frozen=True, slots=True)
class Reassigned:
    """The moves that ``Admin.reassign`` has started. ``warning`` names replicas that will share a host."""

    #: The brokers that each partition moves to, preferred leader first.
    targets: Mapping[TopicPartition, tuple[int, ...]]
    warning: str = ""


@dataclass(frozen=True, slots=True)
class MoveDescription:
    """A partition that moves to other brokers.

    ``replicas`` are the target and, until the end of the move, the replicas that will be removed.
    """

    topic: str
    partition: int
    target: tuple[int, ...]
    #: The replicas before the move. A cancellation restores these replicas.
    original: tuple[int, ...]
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int | None
    #: The maximum number of bytes per second that a broker copies; 0 means no limit.
    throttle_bytes: int
    #: The size of the leader's log in bytes. ``copied_bytes`` is the number of bytes that each added broker has copied.
    leader_bytes: int
    copied_bytes: Mapping[int, int] = field(default_factory=dict)

    @property
    def progress(self) -> float:
        """Return the progress of the slowest broker, from 0 to 1. A broker in the ISR has copied everything."""
        shares = [
            1.0 if broker_id in self.isr or not self.leader_bytes else min(copied / self.leader_bytes, 1.0)
            for broker_id, copied in self.copied_bytes.items()
        ]
        return min(shares, default=1.0)


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """The current or last transaction of one producer or sink.

    ``key`` is ``id:`` followed by the transactional id of the producer, or the key of the sink.
    """

    key: str
    #: One of ``empty``, ``open``, ``committing``, ``aborting``.
    state: str
    #: The number of the current run, which is one life of the producer. Runs are numbered in the order in which they
    #: began. ``run_id`` is the name of the run.
    run: int
    run_id: str
    #: The version of a sink's open or ending transaction.
    version: int | None
    #: The last version that a sink has committed.
    last_version: int | None
    #: The time at which the transaction began. ``deadline`` is the time at which the coordinator aborts the transaction
    #: unless the producer keeps it alive. Both times are None if no transaction is open.
    began: dt.datetime | None
    deadline: dt.datetime | None
    #: The producer ids of the transaction, and the partitions to which each may write.
    producers: Mapping[int, tuple[TopicPartition, ...]] = field(default_factory=dict)

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """Return the partitions to which any producer of the transaction may have written."""
        return tuple(sorted({tp for partitions in self.producers.values() for tp in partitions}))


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """A transaction that is open in a partition but unknown to every coordinator, so no coordinator will end it."""

    partition: TopicPartition
    producer_id: int
    #: The offset and the append time of the transaction's first batch in the partition.
    first_offset: int
    began: dt.datetime


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A live broker: its id, address and rack. ``incarnation`` counts its registrations so far."""

    broker_id: int
    host: str
    port: int
    incarnation: int
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """A cluster: its id, the epoch of its controller, and its live brokers."""

    cluster_id: str
    controller_epoch: int
    brokers: tuple[BrokerAddress, ...]


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """The state of a broker process. If the broker did not respond, only ``address`` and ``error`` are set."""

    address: BrokerAddress
    state: str = "unreachable"
    pid: int = 0
    version: str = ""
    log_dir: str = ""
    replicas: tuple[ReplicaDescription, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    #: The broker's settings in effect, and the topic defaults that were set; empty if the broker does not return them.
    settings: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    #: The broker's addresses for Kafka clients, separated by commas; empty if there are none.
    kafka: str = ""

    @property
    def leaders(self) -> int:
        return sum(replica.role == "leader" for replica in self.replicas)

    @property
    def size_bytes(self) -> int:
        """Return the size of this broker's logs on its disk, including set-aside logs, which it does not serve."""
        return sum(replica.size_bytes for replica in self.replicas) + self.counters.get("set.aside.bytes", 0)


def describe_topic(topic: TopicMetadata, *, warning: str = "") -> TopicDescription:
    """Convert a topic's metadata to its description. Raises BrokerError if this client cannot read the schema."""
    latest = topic.schemas[-1]
    return TopicDescription(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=tuple(
            PartitionDescription(
                part.partition,
                None if part.leader == NO_LEADER else part.leader,
                part.leader_epoch,
                replicas=tuple(part.replicas),
                isr=tuple(part.isr),
            )
            for part in topic.partitions
        ),
        schema=parse_schema(latest.message),
        schema_id=latest.schema_id,
        key=tuple(topic.key_columns),
        event_time=topic.event_time,
        config=dict(topic.config),
        warning=warning,
    )


def describe_cluster(reply: MetadataReply) -> ClusterDescription:
    brokers = tuple(
        BrokerAddress(broker.broker_id, broker.host, broker.port, broker.incarnation, broker.rack)
        for broker in sorted(reply.brokers, key=lambda broker: broker.broker_id)
    )
    return ClusterDescription(reply.cluster_id, reply.controller_epoch, brokers)


def describe_broker(address: BrokerAddress, reply: DescribeBrokerReply) -> BrokerDescription:
    return BrokerDescription(
        address,
        state=reply.state,
        pid=reply.pid,
        version=reply.version,
        log_dir=reply.log_dir,
        replicas=tuple(reply.replicas),
        counters=dict(reply.counters),
        settings=dict(reply.settings),
        kafka=reply.kafka,
    )


def describe_transaction(found: messages.DescribedTransaction) -> TransactionDescription:
    is_open = found.state == "open"
    return TransactionDescription(
        key=found.key,
        state=found.state,
        run=found.run,
        run_id=found.run_id,
        version=found.version if found.version >= 0 else None,
        last_version=found.last_version if found.last_version >= 0 else None,
        began=_moment(found.began_ms) if found.state != "empty" else None,
        deadline=_moment(found.deadline_ms) if is_open else None,
        producers={
            producer_id: tuple(TopicPartition(*named) for named in partitions)
            for producer_id, _, partitions in found.participants
        },
    )


def describe_hanging(found: messages.FoundHangingTransaction) -> HangingTransaction:
    tp = TopicPartition(found.topic, found.partition)
    return HangingTransaction(tp, found.producer_id, found.first_offset, _moment(found.began_ms))


def _moment(at_ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.timezone.utc)
