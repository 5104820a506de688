"""Consumer groups of real Kafka clients on real brokers: members come and go, restart, and lose their coordinator."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from sparklog.client.consumer.consumer import Consumer
from sparklog.errors import BrokerError
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.integration.kafka_calls import coordinator_of
from tests.integration.kafka_readers import (
    AiokafkaReader,
    ConfluentReader,
    KafkaPythonReader,
    Reader,
    Readings,
    SparklogReader,
    wait_until,
)

pytestmark = [
    pytest.mark.integration,
    # kafka-python reads its schemas with a function that Python 3.11 deprecates.
    pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning"),
]
PARTITIONS = 6
NewReader = Callable[[str, str, str, Readings], Reader]


def new_cluster() -> ProcessCluster:
    """Return a cluster whose groups rebalance fast."""
    settings = {
        "group.initial.rebalance.delay.ms": "100",
        "group.consumer.heartbeat.interval.ms": "300",
        "group.consumer.session.timeout.ms": "10000",
        "offsets.topic.num.partitions": "4",
    }
    return ProcessCluster(3, kafka=True, settings=settings)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    pytest.importorskip("confluent_kafka")
    with new_cluster() as running:
        yield running


@pytest.fixture
def topic(cluster: ProcessCluster) -> str:
    return new_topic(cluster)


def new_topic(cluster: ProcessCluster) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    with SettledAdmin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=PARTITIONS, replication_factor=3)
    return name


def produce(cluster: ProcessCluster, topic: str, numbers: range) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": cluster.kafka_bootstrap, "acks": "all"})
    failed: list[Any] = []
    for number in numbers:
        producer.produce(
            topic,
            str(number).encode(),
            partition=number % PARTITIONS,
            on_delivery=lambda error, _: failed.append(error) if error is not None else None,
        )
    assert producer.flush(60) == 0
    assert not failed


def confluent(**settings: str) -> NewReader:
    named = {key.replace("_", "."): value for key, value in settings.items()}
    return partial(ConfluentReader, settings=named)


RANGE = confluent(partition_assignment_strategy="range", session_timeout_ms="10000", heartbeat_interval_ms="300")
COOPERATIVE = confluent(
    partition_assignment_strategy="cooperative-sticky", session_timeout_ms="10000", heartbeat_interval_ms="300"
)
CONSUMER = confluent(group_protocol="consumer")
CLIENTS = [
    pytest.param(RANGE, id="confluent-range"),
    pytest.param(COOPERATIVE, id="confluent-cooperative"),
    pytest.param(CONSUMER, id="confluent-consumer"),
    pytest.param(KafkaPythonReader, id="kafka-python"),
    pytest.param(AiokafkaReader, id="aiokafka"),
]


def shared(*readers: Reader) -> bool:
    """Return whether the readers own all partitions, each partition has one owner, and the shares are even."""
    owned = [reader.owned for reader in readers]
    whole = sum(map(len, owned)) == PARTITIONS == len(set().union(*owned))
    return whole and max(map(len, owned)) - min(map(len, owned)) <= 1


@pytest.mark.parametrize("new_reader", CLIENTS)
def test_each_record_is_read_once_while_members_come_and_go(
    cluster: ProcessCluster, topic: str, new_reader: NewReader
) -> None:
    check_members_come_and_go(cluster, topic, new_reader)


def check_members_come_and_go(cluster: ProcessCluster, topic: str, new_reader: NewReader) -> None:
    """Let three members come and two go while records arrive. Each record is read once."""
    readings = Readings()
    produce(cluster, topic, range(2000))
    first, second, third = (new_reader(cluster.kafka_bootstrap, topic, topic, readings) for _ in range(3))
    first.start()
    readings.wait_for(2000)
    second.start()
    produce(cluster, topic, range(2000, 4000))
    wait_until(lambda: shared(first, second), "two members share the partitions")
    third.start()
    produce(cluster, topic, range(4000, 6000))
    wait_until(lambda: shared(first, second, third), "three members share the partitions")
    readings.wait_for(6000)
    with SettledAdmin(cluster.bootstrap) as admin:
        described = admin.describe_group(topic)
        assert described is not None
        assert (described.state, len(described.members)) == ("stable", 3)
        assert sorted(tp.partition for member in described.members for tp in member.owned) == list(range(PARTITIONS))
    first.stop()
    produce(cluster, topic, range(6000, 8000))
    wait_until(lambda: shared(second, third), "the others take over")
    readings.wait_for(8000)
    second.stop()
    third.stop()
    assert set(readings.counts.values()) == {1}, "records were read twice"
    with SettledAdmin(cluster.bootstrap) as admin:
        assert sum(admin.group_offsets(topic).values()) == 8000


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_static_member_restarts_without_a_rebalance(cluster: ProcessCluster, topic: str, strategy: str) -> None:
    def named(name: str) -> NewReader:
        return confluent(
            group_instance_id=name,
            partition_assignment_strategy=strategy,
            session_timeout_ms="20000",
            heartbeat_interval_ms="300",
        )

    check_the_restart_of_a_static_member(cluster, topic, named)


def check_the_restart_of_a_static_member(
    cluster: ProcessCluster, topic: str, named: Callable[[str], NewReader]
) -> None:
    """Restart one of two static members. It gets its partitions back, and the other member notices nothing."""
    readings = Readings()
    produce(cluster, topic, range(600))

    def static(name: str) -> Reader:
        return named(name)(cluster.kafka_bootstrap, topic, topic, readings).start()

    stays, goes = static("a"), static("b")
    wait_until(lambda: shared(stays, goes), "two members share the partitions")
    readings.wait_for(600)
    before, assignments = set(goes.owned), stays.assignments
    goes.stop()
    again = static("b")
    wait_until(lambda: again.owned == before, "the member gets its partitions back")
    produce(cluster, topic, range(600, 1200))
    readings.wait_for(1200)
    assert stays.assignments == assignments, "the other member took part in a rebalance"
    stays.stop()
    again.stop()
    assert set(readings.counts.values()) == {1}


@pytest.mark.extended
@pytest.mark.parametrize("new_reader", CLIENTS)
def test_a_group_loses_nothing_when_its_coordinator_is_killed(
    cluster: ProcessCluster, topic: str, new_reader: NewReader
) -> None:
    check_the_coordinator_is_killed(cluster, topic, new_reader)


def check_the_coordinator_is_killed(cluster: ProcessCluster, topic: str, new_reader: NewReader) -> None:
    """Kill the coordinator while two members read. All records are read, and the commits stay."""
    readings = Readings()
    produce(cluster, topic, range(1200))
    readers = [new_reader(cluster.kafka_bootstrap, topic, topic, readings).start() for _ in range(2)]
    wait_until(lambda: shared(*readers), "two members share the partitions")
    readings.wait_for(1200)
    address = coordinator_of(cluster.kafka_bootstrap.split(",")[0], topic)
    (broker_id,) = [number for number, slot in cluster.slots.items() if slot.kafka_address == address]
    cluster.kill(broker_id)
    try:
        produce(cluster, topic, range(1200, 2400))
        readings.wait_for(2400, 120)
    finally:
        cluster.start_brokers()
    for reader in readers:
        reader.stop()
    with SettledAdmin(cluster.bootstrap) as admin:
        assert sum(admin.group_offsets(topic).values()) == 2400
    produce(cluster, topic, range(2400, 3000))
    more = Readings()
    last = new_reader(cluster.kafka_bootstrap, topic, topic, more).start()
    more.wait_for(600)
    last.stop()
    assert {int(value) for value in more.counts} == set(range(2400, 3000)), "commits were lost"


def test_kafka_clients_and_sparklogs_share_a_group(cluster: ProcessCluster, topic: str) -> None:
    readings = Readings()
    produce(cluster, topic, range(1200))
    readers = [
        CONSUMER(cluster.kafka_bootstrap, topic, topic, readings).start(),
        SparklogReader(cluster.bootstrap, topic, topic, readings).start(),
        CONSUMER(cluster.kafka_bootstrap, topic, topic, readings).start(),
    ]
    wait_until(lambda: shared(*readers), "three members share the partitions")
    produce(cluster, topic, range(1200, 2400))
    readings.wait_for(2400)
    readers[0].stop()
    wait_until(lambda: shared(*readers[1:]), "the others take over")
    produce(cluster, topic, range(2400, 3000))
    readings.wait_for(3000)
    for reader in readers[1:]:
        reader.stop()
    assert set(readings.counts.values()) == {1}


def test_a_group_changes_between_kafka_clients_and_sparklogs(cluster: ProcessCluster, topic: str) -> None:
    readings = Readings()
    produce(cluster, topic, range(600))
    reader = RANGE(cluster.kafka_bootstrap, topic, topic, readings).start()
    readings.wait_for(600)
    with (
        pytest.raises(BrokerError, match="INCONSISTENT_GROUP_PROTOCOL"),
        Consumer(cluster.bootstrap, [topic], group=topic) as consumer,
    ):
        while True:
            consumer.poll(1.0)
    reader.stop()
    produce(cluster, topic, range(600, 900))
    found: list[bytes] = []
    with Consumer(cluster.bootstrap, [topic], group=topic, start="earliest") as consumer:
        while len(found) < 300:
            for batch in consumer.poll(1.0):
                found += batch.column("value").to_pylist()
        consumer.commit()
    assert {int(value) for value in found} == set(range(600, 900))
    for number, new_reader in enumerate((CONSUMER, COOPERATIVE), 7):
        produce(cluster, topic, range(100 * number + 200, 100 * number + 300))
        reader = new_reader(cluster.kafka_bootstrap, topic, topic, readings).start()
        readings.wait_for(100 * number)
        reader.stop()
    assert set(readings.counts.values()) == {1}
