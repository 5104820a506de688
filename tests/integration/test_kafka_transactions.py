"""Transactions of Kafka's clients on real brokers: every reader of committed records sees the same records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sparklog.client.errors import ProducerFenced
from sparklog.client.producer.producer import Producer
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.integration.kafka_records import (
    Found,
    Written,
    read_aiokafka,
    read_confluent,
    read_kafka_python,
    read_partitions,
    read_sparklog,
)
from tests.integration.kafka_transactions import (
    PYTHON,
    ConfluentProducer,
    JavaProducer,
    TransactionalProducer,
)
from tests.kafka_tools import KafkaTools
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.integration,
    # kafka-python 3 reads its schemas by a function that Python 3.11 deprecates.
    pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning"),
]

PARTITIONS = 3
_numbers = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, kafka=True) as running:
        yield running


@pytest.fixture
def topic(cluster: ProcessCluster) -> str:
    name = f"topic-{next(_numbers)}"
    with SettledAdmin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=PARTITIONS, replication_factor=3)
    return name


Create = Callable[..., TransactionalProducer]


@pytest.fixture(params=[*PYTHON, pytest.param("java", marks=pytest.mark.extended)])
def create(request: pytest.FixtureRequest, cluster: ProcessCluster) -> Iterator[Create]:
    """Return a function that creates a transactional producer of one client library."""
    made: list[TransactionalProducer] = []
    if request.param == "java":
        tools = KafkaTools(request.getfixturevalue("jars"))
    else:
        pytest.importorskip(request.param)
        tools = None

    def make(name: str, **options: Any) -> TransactionalProducer:
        if tools is not None:
            made.append(JavaProducer(tools, cluster.kafka_bootstrap, name, **options))
        else:
            made.append(PYTHON[request.param](cluster.kafka_bootstrap, name, **options))
        return made[-1]

    try:
        yield make
    finally:
        for producer in made:
            producer.close()
        if tools is not None:
            tools.close()


def _untimed(found: Found) -> dict[tuple[int, int], Written]:
    """Return the records without their times, because sparklog's producers have microseconds."""
    return {place: record._replace(time_ms=0) for place, record in found.items()}


def committed(cluster: ProcessCluster, topic: str) -> dict[int, list[str]]:
    """Return the committed values of each partition, after a comparison of what all clients read."""
    found = _untimed(read_sparklog(cluster.bootstrap, topic))
    assert _untimed(read_partitions(cluster.bootstrap, topic)) == found
    assert _untimed(read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS)) == found
    for reader in (read_aiokafka, read_kafka_python):
        read = reader(cluster.kafka_bootstrap, topic, PARTITIONS, isolation_level="read_committed")
        assert _untimed(read) == found
    values: dict[int, list[str]] = {number: [] for number in range(PARTITIONS)}
    for (partition, _), record in sorted(found.items()):
        assert record.value is not None
        values[partition].append(record.value.decode())
    return values


def test_all_readers_see_the_committed_transactions(cluster: ProcessCluster, topic: str, create: Create) -> None:
    producer = create(f"id-{topic}")
    expected: dict[int, list[str]] = {number: [] for number in range(PARTITIONS)}
    for transaction in range(9):
        producer.begin()
        for number in range(10):
            partition = number % (1 + transaction % PARTITIONS)
            value = f"{transaction} {number}"
            producer.send(topic, partition, value)
            if transaction % 3 == 0:
                expected[partition].append(value)
        if transaction % 3 == 0:
            producer.commit()
        else:
            if transaction % 3 == 1:
                producer.flush()
            producer.abort()
    assert committed(cluster, topic) == expected
    everything = read_confluent(cluster.kafka_bootstrap, topic, PARTITIONS, **{"isolation.level": "read_uncommitted"})
    assert len(everything) >= 60, "the flushed records of aborted transactions are in the log"


def read_java(tools: KafkaTools, bootstrap: str, topic: str) -> dict[int, list[str]]:
    """Return the committed values of each partition that Kafka's Java consumer reads."""
    deserializer = "org.apache.kafka.common.serialization.StringDeserializer"
    settings = {
        "bootstrap.servers": bootstrap,
        "isolation.level": "read_committed",
        "key.deserializer": deserializer,
        "value.deserializer": deserializer,
    }
    jvm = tools.jvm
    consumer = jvm.org.apache.kafka.clients.consumer.KafkaConsumer(tools.properties(settings))
    places = jvm.java.util.ArrayList()
    for number in range(PARTITIONS):
        places.add(jvm.org.apache.kafka.common.TopicPartition(topic, number))
    consumer.assign(places)
    consumer.seekToBeginning(places)
    ends = consumer.endOffsets(places)
    found: dict[int, list[str]] = {number: [] for number in range(PARTITIONS)}
    end_s = time.monotonic() + 60
    while any(consumer.position(place) < ends.get(place) for place in places):
        assert time.monotonic() < end_s
        records = consumer.poll(jvm.java.time.Duration.ofMillis(200)).iterator()
        while records.hasNext():
            record = records.next()
            found[record.partition()].append(record.value())
    consumer.close()
    return found


@pytest.mark.extended
def test_kafkas_java_consumer_sees_the_same_records(cluster: ProcessCluster, topic: str, jars: Path) -> None:
    with KafkaTools(jars) as tools:
        producers = [
            JavaProducer(tools, cluster.kafka_bootstrap, f"java-{topic}"),
            ConfluentProducer(cluster.kafka_bootstrap, f"confluent-{topic}"),
        ]
        for transaction in range(8):
            producer = producers[transaction % 2]
            producer.begin()
            for number in range(30):
                producer.send(topic, number % PARTITIONS, f"{transaction} {number}")
            producer.flush()
            if transaction % 4 < 2:
                producer.commit()
            else:
                producer.abort()
        expected = committed(cluster, topic)
        assert sum(map(len, expected.values())) == 4 * 30
        assert read_java(tools, cluster.kafka_bootstrap, topic) == expected
        producers[0].close()


def test_offsets_take_effect_with_their_transaction(cluster: ProcessCluster, topic: str, create: Create) -> None:
    producer = create(f"id-{topic}")
    group = f"group-{topic}"
    for commit, offset in ((True, 3), (False, 4), (True, 5)):
        producer.begin()
        producer.send(topic, 0, f"up to {offset}")
        producer.send_offsets({(topic, 1): offset, (topic, 2): offset + 1}, group)
        if commit:
            producer.commit()
        else:
            producer.abort()
        with SettledAdmin(cluster.bootstrap) as admin:
            found = {place.partition: offset for place, offset in admin.group_offsets(group).items()}
        assert found == ({1: offset, 2: offset + 1} if commit else {1: 3, 2: 4})
    assert committed(cluster, topic)[0] == ["up to 3", "up to 5"]


def test_a_second_producer_fences_the_first(cluster: ProcessCluster, topic: str, create: Create) -> None:
    first = create(f"id-{topic}")
    first.begin()
    first.send(topic, 0, "first")
    first.flush()
    second = ConfluentProducer(cluster.kafka_bootstrap, f"id-{topic}")
    with pytest.raises(Exception, match=r"(?i)fenced|epoch"):
        first.commit()
    second.begin()
    second.send(topic, 0, "second")
    second.commit()
    assert committed(cluster, topic)[0] == ["second"]


def test_kafka_and_sparklog_producers_fence_each_other(cluster: ProcessCluster, topic: str) -> None:
    pytest.importorskip("confluent_kafka")
    first = ConfluentProducer(cluster.kafka_bootstrap, f"id-{topic}")
    first.begin()
    first.send(topic, 0, "first")
    first.flush()
    with Producer(cluster.bootstrap, transactional_id=f"id-{topic}") as own:
        own.begin()
        own.send(topic, b"own", partition=0)
        with pytest.raises(Exception, match=r"(?i)fenced"):
            first.commit()
        own.commit()
        own.begin()
        own.send(topic, b"own and fenced", partition=0)
        own.flush()
        second = ConfluentProducer(cluster.kafka_bootstrap, f"id-{topic}")
        with pytest.raises(ProducerFenced):
            own.commit()
    second.begin()
    second.send(topic, 0, "second")
    second.commit()
    assert committed(cluster, topic)[0] == ["own", "second"]


def test_a_transaction_whose_time_is_up_is_aborted(cluster: ProcessCluster, topic: str) -> None:
    pytest.importorskip("confluent_kafka")
    producer = ConfluentProducer(cluster.kafka_bootstrap, f"id-{topic}", **{"transaction.timeout.ms": 1500})
    producer.begin()
    producer.send(topic, 0, "late")
    producer.flush()
    with SettledAdmin(cluster.bootstrap) as admin:

        def is_open() -> bool:
            return any(one.key == f"id:id-{topic}" and one.state == "open" for one in admin.transactions())

        assert is_open()
        wait_until(lambda: not is_open(), "the coordinator must abort the transaction")
    with pytest.raises(Exception, match=r"(?i)fenced"):
        producer.commit()
    assert committed(cluster, topic)[0] == []


@pytest.mark.extended
def test_a_pipeline_with_a_group_reads_each_record_once(cluster: ProcessCluster, topic: str) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    source = f"{topic}-source"
    with SettledAdmin(cluster.bootstrap) as admin:
        admin.create_topic(source, partitions=2, replication_factor=3)
    with Producer(cluster.bootstrap) as own:
        for number in range(400):
            own.send(source, str(number).encode(), partition=number % 2)
    settings = {"bootstrap.servers": cluster.kafka_bootstrap}
    done = 0
    for life in range(4):  # Each life of the pipeline ends without a commit of its last transaction.
        producer = confluent.Producer({**settings, "transactional.id": f"id-{topic}"})
        producer.init_transactions(60)
        consumer = confluent.Consumer(
            {
                **settings,
                "group.id": f"group-{topic}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 6000,
            }
        )
        consumer.subscribe([source])
        began_s = time.monotonic()
        rounds = 0
        while done < 400 and (life == 3 or rounds < 3):
            messages = consumer.consume(40, 0.5)
            assert time.monotonic() < began_s + 60
            if not messages:
                continue
            assert all(message.error() is None for message in messages)
            producer.begin_transaction()
            for message in messages:
                producer.produce(topic, message.value() + b" done", partition=0)
            rounds += 1
            if life < 3 and rounds == 3:
                producer.flush(60)
                break
            positions = consumer.position(consumer.assignment())
            producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 60)
            producer.commit_transaction(60)
            done += len(messages)
        consumer.close()
    values = committed(cluster, topic)[0]
    assert sorted(values) == sorted(f"{number} done" for number in range(400))
