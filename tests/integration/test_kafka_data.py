"""Kafka clients write and read records on real brokers, and each record is compared, also with sparklog's clients."""

from __future__ import annotations

import datetime as dt
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from sparklog.client.producer.producer import Producer
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.integration.kafka_records import (
    BASE_MS,
    PATIENCE_S,
    Written,
    read_aiokafka,
    read_confluent,
    read_kafka_python,
    read_sparklog,
    sample,
    write_aiokafka,
    write_confluent,
    write_kafka_python,
)

pytestmark = [
    pytest.mark.integration,
    # kafka-python reads its schemas with a function that Python 3.11 deprecates.
    pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning"),
]

PARTITIONS = 3
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_numbers = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, kafka=True) as running:
        yield running


@pytest.fixture
def topic(cluster: ProcessCluster) -> str:
    return create(cluster)


def create(cluster: ProcessCluster, **config: str) -> str:
    name = f"topic-{next(_numbers)}"
    with SettledAdmin(cluster.bootstrap) as admin:
        settings = {key.replace("_", "."): value for key, value in config.items()}
        admin.create_topic(name, partitions=PARTITIONS, replication_factor=3, config=settings)
    return name


def spread(records: list[Written]) -> list[tuple[int, Written]]:
    return [(number % PARTITIONS, record) for number, record in enumerate(records)]


def kcat(*arguments: str, text: bytes = b"") -> bytes:
    program = shutil.which("kcat")
    if program is None:
        pytest.skip("kcat is not installed")
    done = subprocess.run([program, *arguments], input=text, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("idempotent", [False, True])
def test_confluent_kafka_reads_what_it_wrote(cluster: ProcessCluster, topic: str, codec: str, idempotent: bool) -> None:
    pytest.importorskip("confluent_kafka")
    options = {"compression.type": codec, "enable.idempotence": idempotent, "linger.ms": 5}
    written = write_confluent(cluster.kafka_bootstrap, topic, spread(sample(3000)), **options)
    assert len(written) == 3000
    assert read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS) == written
    assert read_sparklog(cluster.bootstrap, topic) == written


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_all_acks_write_every_record(cluster: ProcessCluster, topic: str, acks: str) -> None:
    pytest.importorskip("confluent_kafka")
    records = sample(500)
    write_confluent(cluster.kafka_bootstrap, topic, spread(records), acks=acks)
    found = read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS)
    while acks == "0" and len(found) < len(records):  # The producer does not wait for the brokers.
        found = read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS)
    for partition in range(PARTITIONS):
        in_order = [found[place] for place in sorted(found) if place[0] == partition]
        assert in_order == [record for number, record in spread(records) if number == partition]


Write = Callable[..., dict[tuple[int, int], Written]]


@pytest.mark.parametrize(
    ("module", "write", "options"),
    [
        ("kafka", write_kafka_python, {"acks": "all"}),
        ("kafka", write_kafka_python, {"compression_type": "gzip"}),
        ("aiokafka", write_aiokafka, {"acks": "all"}),
        ("aiokafka", write_aiokafka, {"enable_idempotence": True, "compression_type": "gzip"}),
    ],
)
def test_python_clients_read_what_they_wrote(
    cluster: ProcessCluster, topic: str, module: str, write: Write, options: dict[str, Any]
) -> None:
    pytest.importorskip(module)
    # kafka-python refuses records without key and value.
    records = [record for record in sample(1000) if (record.key, record.value) != (None, None)]
    written = write(cluster.kafka_bootstrap, topic, spread(records), **options)
    read = read_kafka_python if module == "kafka" else read_aiokafka
    assert read(cluster.kafka_bootstrap, topic, PARTITIONS) == written
    assert read_sparklog(cluster.bootstrap, topic) == written


def test_kcat_reads_what_it_wrote(cluster: ProcessCluster, topic: str) -> None:
    lines = [f"k{number}:v{number}".encode() for number in range(2000)]
    kcat("-b", cluster.kafka_bootstrap, "-P", "-t", topic, "-K:", "-X", "acks=all", text=b"\n".join(lines))
    found = kcat("-b", cluster.kafka_bootstrap, "-C", "-t", topic, "-o", "beginning", "-e", "-q", "-f", "%k:%s\n")
    assert sorted(found.split()) == sorted(lines)


def test_every_kafka_client_reads_what_sparklog_wrote(cluster: ProcessCluster, topic: str) -> None:
    written = {}
    with Producer(cluster.bootstrap) as producer:
        futures = []
        for partition, record in spread(sample(2000)):
            at = dt.datetime.fromtimestamp(record.time_ms / 1000, dt.timezone.utc)
            futures.append(
                producer.send(
                    topic,
                    record.value,
                    key=record.key,
                    headers=record.headers or None,
                    timestamp=at,
                    partition=partition,
                )
            )
        for future, (_, record) in zip(futures, spread(sample(2000)), strict=True):
            done = future.result(PATIENCE_S)
            written[done.partition, done.offset] = record
    for module, read in (
        ("confluent_kafka", read_confluent),
        ("kafka", read_kafka_python),
        ("aiokafka", read_aiokafka),
    ):
        pytest.importorskip(module)
        assert read(cluster.kafka_bootstrap, topic, PARTITIONS) == written, module


def test_large_compressed_batches_of_sparklog_are_read_in_pieces(cluster: ProcessCluster, topic: str) -> None:
    pytest.importorskip("confluent_kafka")
    values = [f"{number} ".encode() * 100 for number in range(20_000)]
    with Producer(cluster.bootstrap, compression="zstd", batch_bytes=8 << 20, linger_ms=500) as producer:
        futures = [producer.send(topic, value, partition=0, timestamp=BASE_MS * 1000) for value in values]
        assert [future.result(PATIENCE_S).offset for future in futures] == list(range(len(values)))
    options = {"max.partition.fetch.bytes": 300_000, "fetch.max.bytes": 1_000_000}
    found = read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS, **options)
    assert [found[0, offset].value for offset in range(len(values))] == values


def test_log_append_time_replaces_the_producers_time(cluster: ProcessCluster) -> None:
    pytest.importorskip("confluent_kafka")
    topic = create(cluster, message_timestamp_type="LogAppendTime")
    before_ms = int(dt.datetime.now(dt.timezone.utc).timestamp() * 1000)
    written = write_confluent(cluster.kafka_bootstrap, topic, spread(sample(100)))
    found = read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS)
    assert {place: record._replace(time_ms=0) for place, record in found.items()} == {
        place: record._replace(time_ms=0) for place, record in written.items()
    }
    assert all(0 <= record.time_ms - before_ms < 60_000 for record in found.values())


def test_offsets_are_found_by_the_time_of_the_exact_record(cluster: ProcessCluster, topic: str) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    records = [(0, Written(None, str(number).encode(), (), BASE_MS + 10 * number)) for number in range(500)]
    write_confluent(cluster.kafka_bootstrap, topic, records)
    consumer = confluent.Consumer({"bootstrap.servers": cluster.kafka_bootstrap, "group.id": "none"})
    try:

        def offset_for(time_ms: int) -> int:
            asked = [confluent.TopicPartition(topic, 0, time_ms)]
            return int(consumer.offsets_for_times(asked, timeout=PATIENCE_S)[0].offset)

        assert [offset_for(BASE_MS + after) for after in (-5, 0, 1, 10, 2345, 4990)] == [0, 0, 1, 1, 235, 499]
        assert offset_for(BASE_MS + 4991) == confluent.OFFSET_END
        assert consumer.get_watermark_offsets(confluent.TopicPartition(topic, 0)) == (0, 500)
    finally:
        consumer.close()


def test_a_record_without_key_is_refused_in_a_compacted_topic(cluster: ProcessCluster) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    topic = create(cluster, cleanup_policy="compact")
    producer = confluent.Producer({"bootstrap.servers": cluster.kafka_bootstrap})
    errors = []
    producer.produce(topic, b"value", key=None, partition=0, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(PATIENCE_S) == 0
    assert [error.code() for error in errors] == [confluent.KafkaError.INVALID_RECORD]
    assert read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS) == {}


def test_compacted_records_keep_their_offsets(cluster: ProcessCluster) -> None:
    pytest.importorskip("confluent_kafka")
    topic = create(
        cluster,
        cleanup_policy="compact",
        segment_bytes="65536",
        min_cleanable_dirty_ratio="0.01",
        max_compaction_lag_ms="1000",
    )
    records = [
        (0, Written(f"k{number % 7}".encode(), bytes(1000) + b"%d" % number, (), BASE_MS)) for number in range(2000)
    ]
    written = write_confluent(cluster.kafka_bootstrap, topic, records, **{"batch.num.messages": 10})
    latest = {record.key: place for place, record in sorted(written.items())}
    for _ in range(300):
        found = read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS)
        if len(found) < len(written):
            break
    assert len(found) < len(written), "the cleaner has not run"
    assert all(written[place] == record for place, record in found.items())
    assert set(latest.values()) <= set(found)
    assert read_kafka_python(cluster.kafka_bootstrap, topic, PARTITIONS).items() <= written.items()


def test_a_typed_topic_is_refused_by_name(cluster: ProcessCluster) -> None:
    import pyarrow as pa

    confluent = pytest.importorskip("confluent_kafka")
    name = f"typed-{next(_numbers)}"
    with SettledAdmin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=1, replication_factor=3, schema=pa.schema([("number", pa.int64())]))
    producer = confluent.Producer({"bootstrap.servers": cluster.kafka_bootstrap})
    errors = []
    producer.produce(name, b"value", partition=0, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(PATIENCE_S) == 0
    assert [error.code() for error in errors] == [confluent.KafkaError.TOPIC_EXCEPTION]
