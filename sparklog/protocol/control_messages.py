"""What the controller says to a broker."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.model import BrokerEndpoint, Int31, LeaderAndIsr, Replicas, TopicSchema
from sparklog.protocol.fields import Columns, Listed, Message, Settings


class PartitionDecision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A partition's state as the controller read or wrote it at ``version`` of the ZooKeeper node.

    ``target`` and ``original`` are empty unless the partition is being moved (see ``model.Reassignment``). ``leaving``
    are replicas that the leader is to take out of the ISR, and not in again: the target is in sync. They stay
    replicas, and fetch, until they are named no more.
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
    """What a broker must know of a topic besides its partitions. ``order``: as in TopicMetadata."""

    name: str
    topic_id: str
    schemas: Columns[TopicSchema]
    key_columns: Columns[str]
    event_time: str | None
    config: Settings
    order: int = 0


class ControlUpdate(Message, frozen=True, tag="control_update"):
    """One controller request for all it has to tell a broker: leadership, metadata, deletions, in that order.

    ``incarnation`` is the broker's, as registered: another one refuses with STALE_BROKER_EPOCH. ``full`` says that
    ``partitions`` and ``topics`` are all there is: replicas of this broker that are not named are not its own any
    more. ``brokers`` None: unchanged. ``sequence`` grows from update to update of one controller epoch: a broker that
    has taken a later one ignores what comes after all, for the controller has told it again since. ``relieved``: this
    broker asked to be relieved, leads nothing, and no leader at work has it in its ISR; what it was told of ISRs may be
    older.
    """

    controller_id: str
    controller_epoch: Int31
    incarnation: Int31
    full: bool
    brokers: Listed[BrokerEndpoint] | None
    topics: Listed[TopicChange]
    partitions: Listed[PartitionDecision]
    deleted: Listed[tuple[str, str]] = ()  #: (topic, topic id) to forget and, where hosted, delete from disk
    sequence: int = 0
    relieved: bool = False


class ControlUpdateReply(Message, frozen=True, tag="control_update_reply"):
    """``failed``: (topic, partition, code, detail) of replicas that could not follow the decision."""

    code: int
    failed: Listed[tuple[str, int, int, str]] = ()
    detail: str = ""
