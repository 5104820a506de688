"""Topics on a ``ProcessCluster``: created, described, and written to across changes of leaders."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.messages import (
    CreateTopic,
    CreateTopicReply,
    InitProducerId,
    InitProducerIdReply,
    PartitionMetadata,
    ReplicaDescription,
)
from sparklog.record.header import BatchHeader
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import produce

#: A long time: only the load of the machine decides when these events happen.
PATIENCE_S = 60.0


def create_topic(
    cluster: ProcessCluster,
    name: str,
    *,
    partitions: int = 1,
    replicas: int = 3,
    assignment: tuple[tuple[int, ...], ...] = (),
    config: Mapping[str, str] | None = None,
) -> str:
    """Create a topic, and wait until every broker knows its leaders. Return the topic id."""
    with cluster.connect(next(iter(running(cluster)))) as connection:
        request = CreateTopic(0, name, partitions, replicas, 10_000, config=dict(config or {}), assignment=assignment)
        reply, _ = connection.request(request)
        assert isinstance(reply, CreateTopicReply)

    def known() -> bool:
        return all(_topic_id(cluster, broker_id, name) == reply.topic_id for broker_id in running(cluster))

    wait_until(known, PATIENCE_S, f"{name} to be known everywhere")
    return reply.topic_id


def _topic_id(cluster: ProcessCluster, broker_id: int, name: str) -> str:
    topic = cluster.metadata(broker_id, name).topics[0]
    return topic.topic_id if topic.partitions and topic.partitions[0].leader >= 0 else ""


def running(cluster: ProcessCluster) -> list[int]:
    """Return the brokers that can respond."""
    return [slot.broker_id for slot in cluster.slots.values() if slot.running and not slot.paused]


def partition(cluster: ProcessCluster, name: str, number: int = 0) -> PartitionMetadata:
    """Return the partition from the running broker with the newest epoch. A broker that has just started knows none
    yet."""
    known: list[PartitionMetadata] = []

    def found() -> bool:
        answers = [_partitions(cluster, broker_id, name) for broker_id in running(cluster)]
        known.extend(answer[number] for answer in answers if len(answer) > number)
        return bool(known)

    wait_until(found, PATIENCE_S, f"a broker that knows {name}-{number}")
    return max(known, key=lambda one: one.leader_epoch)


def _partitions(cluster: ProcessCluster, broker_id: int, name: str) -> tuple[PartitionMetadata, ...]:
    """Return the description, or an empty one if the broker has just exited."""
    try:
        return cluster.metadata(broker_id, name).topics[0].partitions
    except BrokerError as error:
        if error.code is not ErrorCode.NETWORK_EXCEPTION:
            raise
        return ()


def leader(cluster: ProcessCluster, name: str, number: int = 0) -> int:
    """Return the leader, once there is a live one."""

    def lives() -> bool:
        return partition(cluster, name, number).leader in running(cluster)

    wait_until(lives, PATIENCE_S, f"a live leader of {name}-{number}")
    return partition(cluster, name, number).leader


def hosted(cluster: ProcessCluster, broker_id: int, name: str, number: int = 0) -> ReplicaDescription | None:
    """Return the hosted replica, or None while the broker has no update of the partition."""
    for found in cluster.describe(broker_id).replicas:
        if (found.topic, found.partition) == (name, number):
            return found
    return None


def replica(cluster: ProcessCluster, broker_id: int, name: str, number: int = 0) -> ReplicaDescription:
    found = hosted(cluster, broker_id, name, number)
    assert found is not None, f"broker {broker_id} hosts no {name}-{number}"
    return found


def wait_isr(cluster: ProcessCluster, name: str, expected: set[int], number: int = 0) -> None:
    wait_until(
        lambda: set(partition(cluster, name, number).isr) == expected, PATIENCE_S, f"ISR of {name} to be {expected}"
    )


def wait_equal(cluster: ProcessCluster, name: str, end: int, number: int = 0) -> None:
    """Wait until every running replica has the log up to ``end`` and knows that it is committed."""

    def equal() -> bool:
        found = [hosted(cluster, broker_id, name, number) for broker_id in running(cluster)]
        return all(r is not None and (r.log_end_offset, r.high_watermark) == (end, end) for r in found)

    wait_until(equal, PATIENCE_S, f"all replicas of {name}-{number} to end at {end}")


def new_producer_id(cluster: ProcessCluster) -> int:
    with cluster.connect(running(cluster)[0]) as connection:
        reply, _ = connection.request(InitProducerId(0))
        assert isinstance(reply, InitProducerIdReply)
        return reply.producer_id


class Writer:
    """A writer that sends batches with acks=all to the present leader, and again until they are acknowledged."""

    def __init__(self, cluster: ProcessCluster, topic: str, number: int = 0) -> None:
        self._cluster = cluster
        self._topic = topic
        self._number = number
        self._connection: BlockingConnection | None = None
        self.retries = 0

    def write(self, batch: tuple[BatchHeader, bytes | pa.Buffer], *, timeout_s: float = PATIENCE_S) -> int:
        """Return the base offset. Raises BrokerError for an error that no retry can fix."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self._connection is None:
                    self._connection = self._cluster.connect(leader(self._cluster, self._topic, self._number))
                result = produce(self._connection, self._topic, batch, partition=self._number, timeout_ms=3000)
                if result.code == ErrorCode.NONE:
                    return result.base_offset
                error = BrokerError(result.code, result.detail)
            except BrokerError as failure:
                error = failure
            self.close()
            if not error.retriable or time.monotonic() > deadline:
                raise error
            self.retries += 1
            time.sleep(0.02)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def segment_digests(cluster: ProcessCluster, broker_id: int, name: str, number: int = 0) -> dict[str, str]:
    """Return the SHA-256 of every segment except the last, by file name."""
    directory = Path(replica(cluster, broker_id, name, number).directory)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("*.arrow"))[:-1]}
