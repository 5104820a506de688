"""Kafka clients fill and read a typed topic with JSON documents on real brokers, beside sparklog's own clients."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pyarrow as pa
import pytest

from sparklog.client.consumer.consumer import Consumer
from sparklog.client.producer.producer import Producer
from sparklog.errors import ErrorCode
from sparklog.kafka.wire import ApiKey
from sparklog.kafka.wire.data import PartitionProduceData, ProduceRequest, TopicProduceData
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.integration.kafka_calls import KafkaCalls
from tests.integration.kafka_records import BASE_MS, PATIENCE_S, Written, read_confluent, write_confluent
from tests.kafka.records.batches import produced
from tests.kafka.records.reference import Record, write_batch

pytestmark = pytest.mark.integration

confluent = pytest.importorskip("confluent_kafka")

PARTITIONS = 2
NOON = dt.datetime(2024, 1, 31, 12, tzinfo=dt.timezone.utc)
NOON_MS = int(NOON.timestamp()) * 1000
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("name", pa.string()),
        ("price", pa.float64()),
        ("tags", pa.list_(pa.string())),
        ("at", pa.timestamp("us", "UTC")),
    ]
)
_numbers = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, kafka=True) as running:
        yield running


def create(cluster: ProcessCluster, **config: str) -> str:
    name = f"json-{next(_numbers)}"
    settings = {"kafka.value.format": "json"} | {key.replace("_", "."): value for key, value in config.items()}
    with SettledAdmin(cluster.bootstrap) as admin:
        admin.create_topic(
            name,
            partitions=PARTITIONS,
            replication_factor=3,
            schema=SCHEMA,
            key="id",
            event_time="at",
            config=settings,
        )
    return name


def read_rows(cluster: ProcessCluster, topic: str) -> list[dict[str, Any]]:
    with Consumer(cluster.bootstrap, topic) as consumer:
        rows: list[dict[str, Any]] = consumer.to_table().select(SCHEMA.names).to_pylist()
    return sorted(rows, key=lambda row: int(row["id"]))


def document(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"näme {number}", "price": number / 2, "tags": ["a", str(number)]}


@pytest.mark.parametrize("codec", ["none", "gzip", "zstd"])
def test_documents_of_kafka_clients_become_rows(cluster: ProcessCluster, codec: str) -> None:
    topic = create(cluster)
    records = [
        (number % PARTITIONS, Written(b"%d" % number, json.dumps(document(number)).encode(), (), BASE_MS))
        for number in range(3000)
    ]
    written = write_confluent(cluster.kafka_bootstrap, topic, records, **{"compression.type": codec, "linger.ms": 5})
    rows = read_rows(cluster, topic)
    assert rows == [document(number) | {"at": None} for number in range(3000)]
    found = read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS)
    assert found.keys() == written.keys()
    for place, record in found.items():
        values = json.loads(record.value or b"")
        assert values == json.loads(written[place].value or b"") | {"at": None}
        assert record.key == int(values["id"]).to_bytes(8, "big")


def test_rows_of_sparklog_are_documents_for_kafka_clients(cluster: ProcessCluster) -> None:
    topic = create(cluster)
    rows = [document(number) | {"at": NOON + dt.timedelta(milliseconds=number)} for number in range(2000)]
    with Producer(cluster.bootstrap) as producer:
        producer.write(topic, pa.Table.from_pylist(rows, schema=SCHEMA))
    found = read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS)
    values = sorted((json.loads(record.value or b"") for record in found.values()), key=lambda value: int(value["id"]))
    assert [value["name"] for value in values] == [row["name"] for row in rows]
    assert values[7]["at"] == "2024-01-31T12:00:00.007000Z"
    assert sorted(record.time_ms for record in found.values()) == [NOON_MS + number for number in range(2000)]


def test_a_document_that_does_not_fit_refuses_its_batch(cluster: ProcessCluster) -> None:
    topic = create(cluster)
    producer = confluent.Producer({"bootstrap.servers": cluster.kafka_bootstrap, "linger.ms": 500})
    errors: list[Any] = []
    for value in (b'{"id":1}', b'{"id":2,"price":"dear"}', b'{"id":3}'):
        producer.produce(topic, value=value, partition=0, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(PATIENCE_S) == 0
    other, bad = confluent.KafkaError._INVALID_DIFFERENT_RECORD, confluent.KafkaError.INVALID_RECORD
    assert len(errors) == 3 and {error.code() for error in errors} <= {other, bad}
    assert read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS) == {}


def test_the_error_names_record_and_field(cluster: ProcessCluster) -> None:
    topic = create(cluster)
    with SettledAdmin(cluster.bootstrap) as admin:
        leader = admin.describe_topic(topic).partitions[0].leader
    assert leader is not None
    batch = produced([Record(None, value, (), 5) for value in (b'{"id":1}', b'{"id":2,"price":"dear"}')])
    records = PartitionProduceData(index=0, records=memoryview(write_batch(batch)))
    request = ProduceRequest(
        acks=-1, timeout_ms=10_000, topic_data=[TopicProduceData(name=topic, partition_data=[records])]
    )
    with KafkaCalls(cluster.slots[leader].kafka_address) as calls:
        (answered,) = calls.ask(ApiKey.PRODUCE, 9, request).responses
    (found,) = answered.partition_responses
    assert (found.error_code, found.base_offset) == (ErrorCode.INVALID_RECORD, -1)
    ((index, message),) = [(error.batch_index, error.batch_index_error_message) for error in found.record_errors]
    assert index == 1 and message.startswith("field price: 'dear'")


def test_a_record_without_a_value_is_a_tombstone_of_a_compacted_topic(cluster: ProcessCluster) -> None:
    topic = create(cluster, cleanup_policy="compact")
    key = (5).to_bytes(8, "big")
    records = [(0, Written(key, b'{"name":"x"}', (), BASE_MS)), (0, Written(key, None, (), BASE_MS))]
    write_confluent(cluster.kafka_bootstrap, topic, records)
    empty = {"name": None, "price": None, "tags": None, "at": None}
    assert read_rows(cluster, topic) == [{"id": 5} | empty | {"name": "x"}, {"id": 5} | empty]
    found = read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS)
    assert [found[0, offset].value is None for offset in range(2)] == [False, True]


def test_records_are_found_by_their_event_time(cluster: ProcessCluster) -> None:
    topic = create(cluster)
    times = [NOON + dt.timedelta(seconds=number) for number in range(100)]
    records = [
        (0, Written(None, json.dumps({"id": number, "at": at.isoformat()}).encode(), (), BASE_MS))
        for number, at in enumerate(times)
    ]
    write_confluent(cluster.kafka_bootstrap, topic, records)
    consumer = confluent.Consumer({"bootstrap.servers": cluster.kafka_bootstrap, "group.id": "times"})
    try:
        (found,) = consumer.offsets_for_times(
            [confluent.TopicPartition(topic, 0, NOON_MS + 41_500)], timeout=PATIENCE_S
        )
    finally:
        consumer.close()
    assert found.offset == 42


def test_a_typed_topic_without_the_setting_is_refused_by_name(cluster: ProcessCluster) -> None:
    topic = create(cluster, kafka_value_format="none")
    producer = confluent.Producer({"bootstrap.servers": cluster.kafka_bootstrap})
    errors: list[Any] = []
    producer.produce(topic, value=b'{"id":1}', partition=0, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(PATIENCE_S) == 0
    assert [error.code() for error in errors] == [confluent.KafkaError.TOPIC_EXCEPTION]
