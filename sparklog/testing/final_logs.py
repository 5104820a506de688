"""The final logs of a topic's replicas.

Tests wait until the logs are equal, and then fetch each log as it is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from sparklog.errors import BrokerError, ClusterError
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.messages import CONSUMER, Fetch, FetchPartition, FetchReply, PartitionMetadata
from sparklog.record.codec import decode_batch
from sparklog.record.header import HEADER_BYTES, BatchHeader, Flag, unpack_headers
from sparklog.record.marker import Marker, decode_marker
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.testing.history import FinalLog, ObservedBatch, record_name, runs_of
from sparklog.testing.process_cluster import ProcessCluster, wait_until

_FETCH_BYTES = 8 * 1024 * 1024


def metadata_of(cluster: ProcessCluster, topic: str) -> tuple[PartitionMetadata, ...]:
    """Return a topic's metadata, from the responding broker that knows the newest epochs.

    Raises:
        ClusterError: no broker knows the topic.
    """
    found: list[tuple[PartitionMetadata, ...]] = []
    for slot in cluster.slots.values():
        if slot.running and not slot.paused:
            try:
                found.append(cluster.metadata(slot.broker_id, topic).topics[0].partitions)
            except BrokerError:
                continue  # the broker has just stopped, or is partitioned from this process
    known = max(found, key=lambda partitions: sum(p.leader_epoch for p in partitions), default=())
    if not known:
        raise ClusterError(f"no broker knows topic {topic}")
    return known


def is_whole(cluster: ProcessCluster, topic: str) -> bool:
    """Return whether every partition has a leader and every replica is in sync, according to ``metadata_of``."""
    try:
        return all(p.leader >= 0 and set(p.isr) == set(p.replicas) for p in metadata_of(cluster, topic))
    except ClusterError:
        return False


def wait_in_sync(cluster: ProcessCluster, topics: Sequence[str], timeout_s: float) -> None:
    """Wait until all replicas of these topics are in sync.

    Raises:
        ClusterError: timeout; the message has the last state of the partitions.
    """
    try:
        wait_until(
            lambda: all(is_whole(cluster, topic) for topic in topics), timeout_s, f"{list(topics)} to be in sync"
        )
    except ClusterError as error:
        states = [
            (topic, p.partition, p.leader, p.leader_epoch, p.replicas, p.isr)
            for topic in topics
            for p in metadata_of(cluster, topic)
            if p.leader < 0 or set(p.isr) != set(p.replicas)
        ]
        raise ClusterError(f"{error}; (topic, partition, leader, epoch, replicas, isr): {states}") from None


def high_watermarks(cluster: ProcessCluster, topic: str) -> dict[int, int]:
    """Return the high watermark of every partition, as reported by the partition's leader."""
    leaders = {p.partition: p.leader for p in metadata_of(cluster, topic)}
    marks: dict[int, int] = {}
    for broker_id in sorted(set(leaders.values())):
        for replica in cluster.describe(broker_id).replicas:
            if replica.topic == topic and leaders.get(replica.partition) == broker_id:
                marks[replica.partition] = replica.high_watermark
    return dict(sorted(marks.items()))


def wait_whole(cluster: ProcessCluster, topics: Sequence[str], timeout_s: float) -> None:
    """Wait until all replicas are in sync, and all log end offsets and high watermarks of a partition are equal.

    Raises:
        ClusterError: timeout; the message has the last differences.
    """
    wait_in_sync(cluster, topics, timeout_s)
    differing: list[str] = []

    def equal() -> bool:
        differing[:] = [text for topic in topics for text in _differing(cluster, topic)]
        return not differing

    try:
        wait_until(equal, timeout_s, "equal replicas")
    except ClusterError as error:
        raise ClusterError(f"{error}: {differing[:5]}") from None


def _differing(cluster: ProcessCluster, topic: str) -> Iterator[str]:
    """Yield the partitions with missing or extra replicas, or with replicas that do not end at the high watermark."""
    marks: dict[int, dict[int, tuple[int, int]]] = {}
    for slot in cluster.slots.values():
        for replica in cluster.describe(slot.broker_id).replicas:
            if replica.topic == topic:
                ends = replica.high_watermark, replica.log_end_offset
                marks.setdefault(replica.partition, {})[slot.broker_id] = ends
    for partition in metadata_of(cluster, topic):
        found = marks.get(partition.partition, {})
        if set(found) != set(partition.replicas) or len(set(sum(found.values(), ()))) != 1:
            yield f"{topic}-{partition.partition} on {partition.replicas}, (high watermark, log end): {found}"


def read_final_logs(cluster: ProcessCluster, topic: str) -> Iterator[FinalLog]:
    """Yield the log of every replica up to the high watermark, with each batch as the replica's broker stores it."""
    for slot in cluster.slots.values():
        for replica in cluster.describe(slot.broker_id).replicas:
            if replica.topic == topic:
                with cluster.connect(slot.broker_id) as connection:
                    stored = _stored(
                        connection, topic, replica.partition, replica.log_start_offset, replica.high_watermark
                    )
                yield FinalLog(
                    broker=slot.broker_id,
                    topic=topic,
                    partition=replica.partition,
                    log_start=replica.log_start_offset,
                    high_watermark=replica.high_watermark,
                    log_end=replica.log_end_offset,
                    batches=tuple(stored.batches),
                    runs=runs_of(stored.records),
                    hidden=stored.hidden(),
                )


class _Stored:
    """The content of one log, batch by batch in the order of offsets."""

    def __init__(self) -> None:
        self.batches: list[ObservedBatch] = []
        self.records: list[tuple[int, str, int]] = []
        self._hidden: list[tuple[int, int]] = []
        #: The batches of open transactions, by producer id. A producer id has one open transaction at a time.
        self._open: dict[int, list[tuple[int, int]]] = {}

    def add(self, header: BatchHeader, stored_header: bytes, body: bytes) -> None:
        digest = hashlib.sha256(stored_header)
        digest.update(body)
        self.batches.append(
            ObservedBatch(header.base_offset, header.offset_span, header.leader_epoch, digest.hexdigest()[:16])
        )
        extent = header.base_offset, header.next_offset
        if header.flags & Flag.CONTROL:
            self._hidden.append(extent)
            self._end_transactions(decode_marker(header, body[: header.length]))
            return
        if header.flags & Flag.TRANSACTIONAL:
            self._open.setdefault(header.producer_id, []).append(extent)
        values = decode_batch(header, body[: header.length], DEFAULT_SCHEMA).column("value").to_pylist()
        self.records += [(header.base_offset + row, *record_name(value)) for row, value in enumerate(values)]

    def _end_transactions(self, marker: Marker) -> None:
        for producer_id, _ in marker.committed:
            self._open.pop(producer_id, None)
        for producer_id, _ in marker.aborted:
            self._hidden += self._open.pop(producer_id, [])

    def hidden(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of markers and of records without a commit, in order."""
        return tuple(sorted([*self._hidden, *(extent for extents in self._open.values() for extent in extents)]))


def _stored(connection: BlockingConnection, topic: str, partition: int, start: int, end: int) -> _Stored:
    stored = _Stored()
    position = start
    while position < end:
        wanted = FetchPartition(topic, partition, "", -1, position, _FETCH_BYTES)
        reply, body = connection.request(Fetch(0, CONSUMER, -1, 500, 1, _FETCH_BYTES, 0, 0, -1, (wanted,)))
        assert isinstance(reply, FetchReply)
        answer = reply.partitions[0]
        if answer.code:
            raise BrokerError(answer.code, answer.detail)
        if not answer.batch_count:
            raise ClusterError(f"{topic}-{partition}: nothing at offset {position}, below the high watermark {end}")
        at = answer.batch_count * HEADER_BYTES
        for number, header in enumerate(unpack_headers(body[:at])):
            stored_header = body[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
            stored.add(header, bytes(stored_header), bytes(body[at : at + header.stored_bytes]))
            at += header.stored_bytes
            position = header.next_offset
    return stored
