"""DescribeBroker requests: the state of this process, for operators, tests and metrics."""

from __future__ import annotations

import os
from collections.abc import Generator

import sparklog
from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.slices import Slices, answer_in_slices
from sparklog.config import in_force
from sparklog.model import NO_EPOCH, host_and_port
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import DescribeBroker, DescribeBrokerReply, ReplicaDescription, Reply
from sparklog.storage.log import Log


class DescribeBrokerRequests:
    """The handler of DescribeBroker requests, which return the state of this process."""

    def __init__(self, context: BrokerContext, partitions: Partitions, slices: Slices) -> None:
        self._context = context
        self._partitions = partitions
        self._slices = slices

    def handle(self, connection: ServerConnection, request: DescribeBroker, body: memoryview) -> None:
        answer_in_slices(self._slices, connection, request, self._describe_broker(connection, request.cid))

    def _describe_broker(self, connection: ServerConnection, cid: int) -> Generator[None, None, Reply]:
        # The incarnation is read before the first replica. A controller elects a leader by these log ends if they are
        # of the incarnation that it knows. If this broker registers again between two parts of the work, a log that is
        # already described may become shorter.
        incarnation = self._context.incarnation
        hosted, unclaimed = (
            sorted(self._partitions, key=lambda partition: partition.tp),
            self._partitions.unclaimed_logs(),
        )
        replicas: list[ReplicaDescription] = []
        for partition in hosted:
            if self._slices.over():
                yield
            replicas.append(_describe(partition))
        for log in unclaimed:
            if self._slices.over():
                yield
            replicas.append(_describe_log(log))
        queued, most_queued = connection.server_queue
        expire_in_s = connection.certificates_expire_in_s
        return DescribeBrokerReply(
            cid,
            self._context.broker_id,
            incarnation,
            os.getpid(),
            getattr(sparklog, "__version__", "0"),
            self._context.log_dir,
            self._context.state,
            tuple(replicas),
            {
                **self._context.counters,
                "requests.queued.bytes": queued,
                "requests.queued.bytes.max": most_queued,
                "producer.ids": self._partitions.directory.producer_ids,
                **({} if expire_in_s is None else {"ssl.certificate.expires.s": expire_in_s}),
            },
            in_force(self._context.config),
            self._kafka_addresses(),
        )

    def _kafka_addresses(self) -> str:
        own = self._context.cache.endpoint(self._context.broker_id)
        endpoints = own.kafka_endpoints if own is not None else ()
        return ",".join(host_and_port(endpoint.host, endpoint.port) for endpoint in endpoints)


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
    """Return the description of a log on disk whose replica has no role yet.

    A controller may need the log end offset.
    """
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
