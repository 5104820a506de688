"""Records that tests of Kafka clients write and read, and readers and writers of each client for them.

Each reader returns the same form, so that a test compares what one client wrote with what another reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.model import TopicPartition

#: The time for which a client may wait for the brokers.
PATIENCE_S = 60.0
#: A time of 2023 in milliseconds.
BASE_MS = 1_700_000_000_000


class Written(NamedTuple):
    """One record, as every client can express it."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    time_ms: int


#: The records of a topic by partition and offset.
Found = Mapping[tuple[int, int], Written]


def sample(count: int, *, seed: int = 0) -> list[Written]:
    """Return records of many shapes: null and empty keys and values, headers, old times, and times out of order."""
    records = []
    for number in range(seed, seed + count):
        key = (None, b"", f"key {number}".encode())[number % 3]
        value = (f"value {number} ".encode() * (number % 17), b"", None)[(number % 11) % 3]
        headers = (
            tuple((f"header {each}", str(number).encode()) for each in range(number % 4)) if number % 5 == 0 else ()
        )
        time_ms = BASE_MS + (number * 7919) % 100_000 if number % 13 else 1000 + number
        records.append(Written(key, value, headers, time_ms))
    return records


def read_confluent(bootstrap: str, topic: str, partitions: int, **options: Any) -> dict[tuple[int, int], Written]:
    """Read all partitions from their beginning to their end with confluent-kafka."""
    import confluent_kafka as confluent

    consumer = confluent.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            **options,
        }
    )
    found: dict[tuple[int, int], Written] = {}
    try:
        consumer.assign([confluent.TopicPartition(topic, number, 0) for number in range(partitions)])
        ended: set[int] = set()
        end_s = time.monotonic() + PATIENCE_S
        while len(ended) < partitions:
            assert time.monotonic() < end_s, f"only partitions {ended} have ended"
            for message in consumer.consume(1000, 0.2):
                error = message.error()
                if error is not None:
                    assert error.code() == confluent.KafkaError._PARTITION_EOF, error
                    ended.add(message.partition())
                    continue
                place = (message.partition(), message.offset())
                assert place not in found
                _, time_ms = message.timestamp()
                found[place] = Written(message.key(), message.value(), tuple(message.headers() or ()), time_ms)
    finally:
        consumer.close()
    return found


def write_confluent(
    bootstrap: str, topic: str, records: Sequence[tuple[int, Written]], **options: Any
) -> dict[tuple[int, int], Written]:
    """Write records, each to its partition, with confluent-kafka. Return them by partition and offset."""
    import confluent_kafka as confluent

    producer = confluent.Producer({"bootstrap.servers": bootstrap, "message.timeout.ms": PATIENCE_S * 1000, **options})
    written: dict[tuple[int, int], Written] = {}
    errors: list[Any] = []

    for partition, record in records:

        def acked(error: Any, message: Any, record: Written = record) -> None:
            if error is not None:
                errors.append(error)
            else:
                written[message.partition(), message.offset()] = record

        producer.produce(
            topic,
            value=record.value,
            key=record.key,
            headers=list(record.headers),
            timestamp=record.time_ms,
            partition=partition,
            on_delivery=acked,
        )
        producer.poll(0)
    assert producer.flush(PATIENCE_S) == 0
    assert not errors, errors[:3]
    return written


def read_kafka_python(bootstrap: str, topic: str, partitions: int, **options: Any) -> dict[tuple[int, int], Written]:
    """Read all partitions from their beginning to their end with kafka-python."""
    import kafka

    from tests.integration.kafka_python_sockets import DIRECT

    places = [kafka.TopicPartition(topic, number) for number in range(partitions)]
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=bootstrap.split(","), proxy_url=DIRECT, auto_offset_reset="none", group_id=None, **options
    )
    found: dict[tuple[int, int], Written] = {}
    try:
        consumer.assign(places)
        for place in places:
            consumer.seek(place, 0)
        ends = consumer.end_offsets(places)
        end_s = time.monotonic() + PATIENCE_S
        while any(consumer.position(place) < ends[place] for place in places):
            assert time.monotonic() < end_s
            for place, batch in consumer.poll(500).items():
                for one in batch:
                    headers = tuple((key, value) for key, value in one.headers)
                    found[place.partition, one.offset] = Written(one.key, one.value, headers, one.timestamp)
    finally:
        consumer.close()
    return found


def write_kafka_python(
    bootstrap: str, topic: str, records: Sequence[tuple[int, Written]], **options: Any
) -> dict[tuple[int, int], Written]:
    """Write records, each to its partition, with kafka-python. Return them by partition and offset."""
    import kafka

    from tests.integration.kafka_python_sockets import DIRECT

    producer = kafka.KafkaProducer(bootstrap_servers=bootstrap.split(","), proxy_url=DIRECT, **options)
    try:
        futures = [
            producer.send(
                topic,
                value=record.value,
                key=record.key,
                headers=list(record.headers),
                partition=partition,
                timestamp_ms=record.time_ms,
            )
            for partition, record in records
        ]
        producer.flush(PATIENCE_S)
        done = [future.get(PATIENCE_S) for future in futures]
    finally:
        producer.close()
    return {(at.partition, at.offset): record for at, (_, record) in zip(done, records, strict=True)}


def read_aiokafka(bootstrap: str, topic: str, partitions: int, **options: Any) -> dict[tuple[int, int], Written]:
    """Read all partitions from their beginning to their end with aiokafka."""
    import aiokafka

    async def read() -> dict[tuple[int, int], Written]:
        places = [aiokafka.TopicPartition(topic, number) for number in range(partitions)]
        consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="none", **options)
        found: dict[tuple[int, int], Written] = {}
        await consumer.start()
        try:
            consumer.assign(places)
            ends = await consumer.end_offsets(places)
            for place in places:
                consumer.seek(place, 0)
            for place in places:
                while await consumer.position(place) < ends[place]:
                    batches = await asyncio.wait_for(consumer.getmany(timeout_ms=500), PATIENCE_S)
                    for at, batch in batches.items():
                        for one in batch:
                            found[at.partition, one.offset] = Written(one.key, one.value, one.headers, one.timestamp)
        finally:
            await consumer.stop()
        return found

    return asyncio.run(read())


def write_aiokafka(
    bootstrap: str, topic: str, records: Sequence[tuple[int, Written]], **options: Any
) -> dict[tuple[int, int], Written]:
    """Write records, each to its partition, with aiokafka. Return them by partition and offset."""
    import aiokafka

    async def write() -> dict[tuple[int, int], Written]:
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=bootstrap, **options)
        await producer.start()
        try:
            futures = [
                await producer.send(
                    topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                    partition=partition,
                    timestamp_ms=record.time_ms,
                )
                for partition, record in records
            ]
            done = [await asyncio.wait_for(future, PATIENCE_S) for future in futures]
        finally:
            await producer.stop()
        return {(at.partition, at.offset): record for at, (_, record) in zip(done, records, strict=True)}

    return asyncio.run(write())


def read_sparklog(bootstrap: str, topic: str) -> dict[tuple[int, int], Written]:
    """Read all partitions from their beginning to their end with sparklog's own consumer."""
    with Consumer(bootstrap, topic, log_columns=True) as consumer:
        rows = consumer.to_table().to_pylist()
    found = {}
    for row in rows:
        headers = tuple((header["key"], header["value"]) for header in row["headers"] or ())
        time_ms = -1 if row["timestamp"] is None else round(row["timestamp"].timestamp() * 1000)
        found[row["_partition"], row["_offset"]] = Written(row["key"], row["value"], headers, time_ms)
    assert len(found) == len(rows)
    return found


def read_partitions(bootstrap: str, topic: str) -> dict[tuple[int, int], Written]:
    """Read all partitions from their beginning to their end as Spark's tasks do, each with a reader of offsets."""
    found = {}
    with Admin(bootstrap) as admin:
        places = [TopicPartition(topic, part.partition) for part in admin.describe_topic(topic).partitions]
        ends = admin.list_offsets(places, isolation="read_committed")
    for tp, end in ends.items():
        with PartitionReader(bootstrap, tp, 0, end) as reader:
            for fetched in reader.fetched():
                for row, record in enumerate(fetched.batch.to_pylist()):
                    offset = fetched.first_offset + row if fetched.offsets is None else int(fetched.offsets[row])
                    headers = tuple((header["key"], header["value"]) for header in record["headers"] or ())
                    time_ms = -1 if record["timestamp"] is None else round(record["timestamp"].timestamp() * 1000)
                    assert (tp.partition, offset) not in found
                    found[tp.partition, offset] = Written(record["key"], record["value"], headers, time_ms)
    return found
