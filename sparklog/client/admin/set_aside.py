"""The administration of set-aside logs: listing the logs of all brokers, restoring topics, and deleting logs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.request_pieces import pieces
from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import (
    Ack,
    DescribeBroker,
    DescribeBrokerReply,
    ListSetAside,
    ListSetAsideReply,
    RemoveSetAside,
    RestoreSetAside,
    RestoreSetAsideReply,
)
from sparklog.protocol.set_aside_messages import KNOWN_BY


@dataclass(frozen=True, slots=True)
class SetAsideDescription:
    """A set-aside log: a log that a broker keeps without serving it.

    ``intact``: the log could be opened when it was set aside, and its offsets are known. Only intact logs can be
    restored.
    """

    broker_id: int
    name: str
    topic: str
    partition: int
    topic_id: str
    reason: str
    since_ms: int
    size_bytes: int
    intact: bool
    log_start_offset: int
    high_watermark: int
    log_end_offset: int


@dataclass(frozen=True, slots=True)
class RestoredTopic:
    """A topic that was recreated from set-aside logs. ``findings`` are the known defects of the topic."""

    name: str
    partitions: int
    findings: tuple[str, ...] = ()


def set_aside_logs(cluster: BlockingCluster) -> list[SetAsideDescription]:
    """Return the set-aside logs of all brokers. See ``Admin.set_aside_logs`` for the errors."""
    cluster.retrying("metadata", cluster.refresh)
    found = []
    for broker_id in sorted(cluster.metadata.brokers):
        if not _supports_set_aside(cluster, broker_id):
            continue
        reply = cluster.ask_broker(broker_id, ListSetAside(0), ListSetAsideReply)
        found += [
            SetAsideDescription(
                broker_id,
                log.name,
                log.topic,
                log.partition,
                log.topic_id,
                log.reason,
                log.since_ms,
                log.size_bytes,
                log.intact,
                log.log_start_offset,
                log.high_watermark,
                log.log_end_offset,
            )
            for log in reply.logs
        ]
    return found


def restore_set_aside(cluster: BlockingCluster, topic_id: str, *, timeout_s: float) -> RestoredTopic:
    """Recreate a topic from set-aside logs. See ``Admin.restore_set_aside`` for the arguments and errors."""
    cluster.retrying("metadata", cluster.refresh)
    for broker_id in sorted(cluster.metadata.brokers):
        if _supports_set_aside(cluster, broker_id):
            request = RestoreSetAside(0, topic_id, cluster.broker_timeout_ms(timeout_s))
            reply = cluster.ask_broker(broker_id, request, RestoreSetAsideReply)
            return RestoredTopic(reply.topic, reply.partitions, reply.findings)
    raise BrokerError(ErrorCode.UNSUPPORTED_VERSION, "no live broker keeps set-aside logs: upgrade one first")


def remove_set_aside(cluster: BlockingCluster, broker_id: int, names: Iterable[str]) -> None:
    """Delete set-aside logs. See ``Admin.remove_set_aside`` for the arguments and errors."""
    cluster.retrying("metadata", cluster.refresh)
    if broker_id not in cluster.metadata.brokers:
        raise BrokerError(
            ErrorCode.BROKER_NOT_AVAILABLE,
            f"broker {broker_id} is not live; the live brokers are {sorted(cluster.metadata.brokers)}",
        )
    if not _supports_set_aside(cluster, broker_id):
        raise BrokerError(
            ErrorCode.UNSUPPORTED_VERSION, f"broker {broker_id} keeps no set-aside logs: upgrade it first"
        )
    for piece in pieces(tuple(names)):
        cluster.ask_broker(broker_id, RemoveSetAside(0, tuple(piece)), Ack)


def _supports_set_aside(cluster: BlockingCluster, broker_id: int) -> bool:
    """Return whether a broker supports requests about set-aside logs.

    Raises BrokerError if the broker is unreachable.
    """
    return KNOWN_BY in cluster.ask_broker(broker_id, DescribeBroker(0), DescribeBrokerReply).settings
