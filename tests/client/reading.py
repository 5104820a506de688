"""Numbered records and refusals for tests of readers, and the records that they got."""

from __future__ import annotations

import time

import pyarrow as pa

from sparklog.client.consumer.consumer import Consumer
from sparklog.client.producer.producer import Producer
from sparklog.errors import ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Fetch, FetchedPartition, FetchReply, Request
from tests.client.fake_cluster import FakeBroker, FakeCluster, Fault

TYPED = pa.schema([("n", pa.int64())])
TP = TopicPartition("t", 0)


def fill(fake: FakeCluster, topic: str = "t", *, records: int = 100, partitions: int = 1, batch: int = 10) -> None:
    """Write ``records`` numbered records to each partition, in batches."""
    if topic not in fake.topics:
        fake.create(topic, partitions=partitions, schema=TYPED)
    add(fake, topic, records=records, partitions=partitions, batch=batch)


def add(fake: FakeCluster, topic: str = "t", *, records: int, partitions: int = 1, batch: int = 10) -> None:
    with Producer(fake.bootstrap) as producer:
        for partition in range(partitions):
            first = fake.topics[topic].logs[partition].end
            for at in range(first, first + records, batch):
                producer.write(topic, pa.table({"n": range(at, at + batch)}), partition=partition)


def numbers(batches: list[pa.RecordBatch]) -> list[int]:
    return [value for batch in batches for value in batch.column("n").to_pylist()]


def drained(consumer: Consumer, count: int) -> list[pa.RecordBatch]:
    found: list[pa.RecordBatch] = []
    deadline = time.monotonic() + 60
    while sum(batch.num_rows for batch in found) < count:
        assert time.monotonic() < deadline, f"{found} after 60 s"
        found += consumer.poll(1.0)
    return found


def refuse(code: ErrorCode, count: int) -> Fault:
    left = count

    def fault(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        nonlocal left
        if not isinstance(request, Fetch) or not left:
            return False
        left -= 1
        answers = tuple(
            FetchedPartition(part.topic, part.partition, int(code), -1, -1, -1, -1, detail="on purpose")
            for part in request.partitions
        )
        connection.reply(FetchReply(request.cid, 0, 0, answers))
        return True

    return fault
