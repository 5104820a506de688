"""What the admin client tells about a cluster: frozen values for people and programs. Pure."""

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
    """One partition: who has it, who leads it, who is in sync."""

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
    """One topic. ``warning`` says why its replicas stand on fewer hosts than asked; only ``create_topic`` fills it."""

    name: str
    topic_id: str
    partitions: tuple[PartitionDescription, ...]
    schema: pa.Schema
    schema_id: int
    key: tuple[str, ...]
    event_time: str | None
    #: Only what was set for this topic.
    config: Mapping[str, str] = field(default_factory=dict)
    warning: str = ""

    @property
    def replication_factor(self) -> int:
        return len(self.partitions[0].replicas) if self.partitions else 0

    def topic_partitions(self) -> list[TopicPartition]:
        return [TopicPartition(self.name, part.partition) for part in self.partitions]


@dataclass(frozen=True, slots=True)
class Reassigned:
    """Moves that have begun. ``warning``: replicas that will share a host."""

    #: Brokers each partition is going to, preferred leader first.
    targets: Mapping[TopicPartition, tuple[int, ...]]
    warning: str = ""


@dataclass(frozen=True, slots=True)
class MoveDescription:
    """A partition on its way to other brokers. Until it is there, ``replicas`` are the target and those that will
    go."""

    topic: str
    partition: int
    target: tuple[int, ...]
    #: Before the move began; what a cancel goes back to.
    original: tuple[int, ...]
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int | None
    #: Bytes per second a broker copies at most; 0: no limit.
    throttle_bytes: int
    #: Size of the leader's log, and of what each broker that is added has of it.
    leader_bytes: int
    copied_bytes: Mapping[int, int] = field(default_factory=dict)

    @property
    def progress(self) -> float:
        """0 to 1, by the broker that has least; in sync is all there is to copy."""
        shares = [
            1.0 if broker_id in self.isr or not self.leader_bytes else min(copied / self.leader_bytes, 1.0)
            for broker_id, copied in self.copied_bytes.items()
        ]
        return min(shares, default=1.0)


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """The transactions of one key: a transactional producer's (``id:...``) or a sink's."""

    key: str
    #: ``empty``, ``open``, ``committing``, ``aborting``.
    state: str
    #: Number of the run that has it, in order of appearance, and the run's own name.
    run: int
    run_id: str
    #: Of a sink's transaction that is open or being ended.
    version: int | None
    #: The last one that a sink has committed.
    last_version: int | None
    #: When it began, and when it is aborted unless there is a sign of life; None while nothing is open.
    began: dt.datetime | None
    deadline: dt.datetime | None
    #: Producer ids taking part, and the partitions each may write to.
    producers: Mapping[int, tuple[TopicPartition, ...]] = field(default_factory=dict)

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """Those that some producer may have written to."""
        return tuple(sorted({tp for partitions in self.producers.values() for tp in partitions}))


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """Open in a partition, and known to no coordinator: nobody will end it."""

    partition: TopicPartition
    producer_id: int
    #: Of its first batch there: its offset, and when it was appended.
    first_offset: int
    began: dt.datetime


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A live broker as the cluster knows it; ``incarnation`` counts its registrations."""

    broker_id: int
    host: str
    port: int
    incarnation: int
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    cluster_id: str
    controller_epoch: int
    brokers: tuple[BrokerAddress, ...]


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """What a broker process says about itself; ``error`` instead when it did not answer."""

    address: BrokerAddress
    state: str = "unreachable"
    pid: int = 0
    version: str = ""
    log_dir: str = ""
    replicas: tuple[ReplicaDescription, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    #: In force, with the topic defaults that were given; empty from a broker that does not tell.
    settings: Mapping[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def leaders(self) -> int:
        return sum(replica.role == "leader" for replica in self.replicas)

    @property
    def size_bytes(self) -> int:
        """What the logs of this broker take on its disk, those that are set aside as well."""
        return sum(replica.size_bytes for replica in self.replicas) + self.counters.get("set.aside.bytes", 0)


def describe_topic(topic: TopicMetadata, *, warning: str = "") -> TopicDescription:
    """Raises BrokerError when the schema bytes cannot be read here."""
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
    )


def describe_transaction(found: messages.TransactionDescription) -> TransactionDescription:
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


def describe_hanging(found: messages.HangingTransaction) -> HangingTransaction:
    tp = TopicPartition(found.topic, found.partition)
    return HangingTransaction(tp, found.producer_id, found.first_offset, _moment(found.began_ms))


def _moment(at_ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.timezone.utc)
