"""Messages of the controller to a broker."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.model import BrokerEndpoint, Int31, LeaderAndIsr, Replicas, TopicSchema
from sparklog.protocol.fields import Columns, Listed, Message, Settings


class PartitionDecision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A partition's state, as the controller read or wrote it at ``version`` of the ZooKeeper node.

    ``target`` and ``original`` are empty unless the partition is being reassigned (see ``model.Reassignment``). The
    leader must remove the replicas in ``leaving`` from the ISR and not add them again: the target is in sync. They stay
    replicas, and fetch, until an update no longer names them.
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
    """A broker's knowledge of a topic without its partitions. ``order`` is as in TopicMetadata."""

    name: str
    topic_id: str
    schemas: Columns[TopicSchema]
    key_columns: Columns[str]
    event_time: str | None
    config: Settings
    order: int = 0


class ControlUpdate(Message, frozen=True, tag="control_update"):
    """One controller request with all news for a broker: leadership, metadata and deletions, in that order.

    ``incarnation`` is the broker's, as registered: another incarnation refuses it with STALE_BROKER_EPOCH. ``full``
    means that ``partitions`` and ``topics`` are complete: replicas of this broker that are not named no longer belong
    to it. ``brokers`` None means unchanged.

    ``sequence`` grows with each update of one controller epoch. A broker that has accepted a later update ignores an
    earlier one, and loses nothing: the controller has sent the content of the earlier update again.

    ``relieved``: this broker requested a controlled shutdown, leads no partition, and no live leader has it in its ISR.
    The broker's own copies of ISRs may be older and still name it.
    """

    controller_id: str
    controller_epoch: Int31
    incarnation: Int31
    full: bool
    brokers: Listed[BrokerEndpoint] | None
    topics: Listed[TopicChange]
    partitions: Listed[PartitionDecision]
    #: (topic, topic id) of topics to drop and, where the broker hosts them, to delete from disk
    deleted: Listed[tuple[str, str]] = ()
    sequence: int = 0
    relieved: bool = False


class ControlUpdateReply(Message, frozen=True, tag="control_update_reply"):
    """The reply to ControlUpdate.

    ``failed``: (topic, partition, code, detail) of replicas that could not perform it.
    """

    code: int
    failed: Listed[tuple[str, int, int, str]] = ()
    detail: str = ""
