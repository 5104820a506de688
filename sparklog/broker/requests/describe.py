"""DescribeBroker requests: the state of this process, for operators, tests and metrics."""

from __future__ import annotations

import os
from collections.abc import Generator

import sparklog
from sparklog.broker.replication.partition import Partition
from sparklog.broker.requests.slices import answer_in_slices
from sparklog.broker.state import BrokerState
from sparklog.config import in_force
from sparklog.model import NO_EPOCH
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import DescribeBroker, DescribeBrokerReply, ReplicaDescription, Reply
from sparklog.storage.log import Log


def handle_describe_broker(
    broker: BrokerState, connection: ServerConnection, request: DescribeBroker, body: memoryview
) -> None:
    answer_in_slices(broker.slices, connection, request, _describe_broker(broker, connection, request.cid))


def _describe_broker(broker: BrokerState, connection: ServerConnection, cid: int) -> Generator[None, None, Reply]:
    # Read before the first replica: a controller elects a leader by these log ends if they are of the incarnation that
    # it knows. An incarnation that registers between two parts may shorten logs that are described already.
    incarnation = broker.incarnation
    hosted, unclaimed = (
        sorted(broker.partitions, key=lambda partition: partition.tp),
        broker.partitions.unclaimed_logs(),
    )
    replicas: list[ReplicaDescription] = []
    for partition in hosted:
        if broker.slices.over():
            yield
        replicas.append(_describe(partition))
    for log in unclaimed:
        if broker.slices.over():
            yield
        replicas.append(_describe_log(log))
    queued, most_queued = connection.server_queue
    return DescribeBrokerReply(
        cid,
        broker.broker_id,
        incarnation,
        os.getpid(),
        getattr(sparklog, "__version__", "0"),
        broker.log_dir,
        broker.state,
        tuple(replicas),
        {
            **broker.counters,
            "requests.queued.bytes": queued,
            "requests.queued.bytes.max": most_queued,
            "producer.ids": broker.partitions.directory.producer_ids,
        },
        in_force(broker.config),
    )


def _describe(partition: Partition) -> ReplicaDescription:
    replica, log = partition.replica, partition.log
    return ReplicaDescription(
        partition.tp.topic,
        partition.tp.partition,
        "offline" if partition.offline is not None else replica.role,
        replica.leader_epoch,
        log.log_start_offset,
        replica.high_watermark,
        log.log_end_offset,
        log.size_bytes,
        str(log.directory),
        log.last_epoch,
    )


def _describe_log(log: Log) -> ReplicaDescription:
    """Return the description of a log on disk without a role so far: a controller may ask for its end."""
    return ReplicaDescription(
        log.tp.topic,
        log.tp.partition,
        "offline",
        NO_EPOCH,
        log.log_start_offset,
        log.high_watermark,
        log.log_end_offset,
        log.size_bytes,
        str(log.directory),
        log.last_epoch,
    )
