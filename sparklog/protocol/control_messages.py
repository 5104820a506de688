"""Messages from the controller to a broker."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.model import BrokerEndpoint, Int31, LeaderAndIsr, Replicas, TopicSchema
from sparklog.protocol.fields import Columns, Listed, Message, Settings


class PartitionDecision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state of one partition, which the controller has read from or written to ZooKeeper.

    ``version`` is the version of the ZooKeeper node that stores the state.

    ``target`` and ``original`` are empty unless the partition is being reassigned (see ``model.Reassignment``).

    ``leaving`` has replicas that the leader must remove from the ISR and not add again. During a reassignment these are
    the replicas outside the target, once enough target replicas are in sync. A leaving replica continues to fetch until
    an update omits it from ``replicas``.
    """

    topic: str
    topic_id: str
    partition: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    state: LeaderAndIsr
    version: Int31
    replicas: Replicas[int]
    target: Replicas[int] = ()
    original: Replicas[int] = ()
    leaving: Replicas[int] = ()
    throttle_bytes: int = 0


class TopicChange(msgspec.Struct, frozen=True, array_like=True):
    """The new metadata of a topic, without its partitions.

    Of two topics with the same name and different ids, the newer one has the greater ``order`` (see TopicMetadata).
    """

    name: str
    topic_id: str
    schemas: Columns[TopicSchema]
    key_columns: Columns[str]
    event_time: str | None
    config: Settings
    order: int = 0


class ControlUpdate(Message, frozen=True, tag="control_update"):
    """A request of the controller with all changes for a broker: leaderships, metadata and deletions.

    The broker applies them in this order. Kafka has three requests for them: LeaderAndIsr, UpdateMetadata, StopReplica.

    ``incarnation`` is the registered incarnation of the broker. A broker process with another incarnation refuses the
    request with STALE_BROKER_EPOCH. ``full`` means that ``partitions`` and ``topics`` are complete. The broker must
    then delete replicas that they do not contain. If ``brokers`` is None, the live brokers have not changed.

    ``sequence`` increases with each update of one controller epoch. A broker that has accepted a later update ignores
    an earlier one. Nothing is lost, because the later update repeats the content of the earlier one.

    ``relieved`` means that this broker has requested a controlled shutdown, leads no partition, and is not in the ISR
    of any live leader. The ISRs that the broker has received in updates may be older, and may still contain it.
    """

    controller_id: str
    controller_epoch: Int31
    incarnation: Int31
    full: bool
    brokers: Listed[BrokerEndpoint] | None
    topics: Listed[TopicChange]
    partitions: Listed[PartitionDecision]
    #: The topics to drop, as (topic, topic id). If the broker hosts replicas of the topic, it deletes their logs.
    deleted: Listed[tuple[str, str]] = ()
    sequence: int = 0
    relieved: bool = False


class ControlUpdateReply(Message, frozen=True, tag="control_update_reply"):
    """The reply to ControlUpdate.

    ``failed`` has (topic, partition, code, detail) of each replica that could not apply the update.
    """

    code: int
    failed: Listed[tuple[str, int, int, str]] = ()
    detail: str = ""
