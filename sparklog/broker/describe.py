"""DescribeBroker: what this process is doing, for people, tests and counters."""

from __future__ import annotations

import os

import sparklog
from sparklog.broker.partition import Partition
from sparklog.broker.state import BrokerState
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import DescribeBroker, DescribeBrokerReply, ReplicaDescription


def handle_describe_broker(
    broker: BrokerState, connection: ServerConnection, request: DescribeBroker, body: memoryview
) -> None:
    replicas = tuple(_describe(partition) for partition in sorted(broker.partitions, key=lambda hosted: hosted.tp))
    connection.reply(
        DescribeBrokerReply(
            request.cid,
            broker.broker_id,
            broker.incarnation,
            os.getpid(),
            getattr(sparklog, "__version__", "0"),
            broker.log_dir,
            broker.state,
            replicas,
            dict(broker.counters),
        )
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
    )
