"""Kafka's Java consumers and kafka-consumer-groups.sh (4.1.1) with groups on real brokers.

Kafka's jars are fetched once from Maven Central (``bench.kafka_jars``). If they cannot be fetched, pytest skips these
tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.integration.kafka_readers import JavaReader, Readings
from tests.integration.test_kafka_groups import (
    NewReader,
    check_members_come_and_go,
    check_the_coordinator_is_killed,
    check_the_restart_of_a_static_member,
    new_cluster,
    new_topic,
    produce,
)
from tests.kafka_tools import KafkaTools

pytestmark = [pytest.mark.integration, pytest.mark.extended]

_CLASSIC = {"group.protocol": "classic", "session.timeout.ms": "10000", "heartbeat.interval.ms": "300"}
_ASSIGNORS = "org.apache.kafka.clients.consumer."
SETTINGS = {
    "range": {**_CLASSIC, "partition.assignment.strategy": _ASSIGNORS + "RangeAssignor"},
    "cooperative": {**_CLASSIC, "partition.assignment.strategy": _ASSIGNORS + "CooperativeStickyAssignor"},
    "consumer": {"group.protocol": "consumer"},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    pytest.importorskip("confluent_kafka")
    with new_cluster() as running:
        yield running


@pytest.fixture
def topic(cluster: ProcessCluster) -> str:
    return new_topic(cluster)


@pytest.fixture(params=sorted(SETTINGS))
def new_reader(request: pytest.FixtureRequest, tools: KafkaTools) -> NewReader:
    return partial(JavaReader, tools=tools, settings=SETTINGS[request.param])


@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_each_record_is_read_once_by_java_consumers(
    cluster: ProcessCluster,
    topic: str,
    tools: KafkaTools,
    kind: str,
) -> None:
    listens = kind == "cooperative"
    new_reader = partial(JavaReader, tools=tools, settings=SETTINGS[kind], commits_on_changes=listens)
    check_members_come_and_go(cluster, topic, new_reader)


def test_java_consumers_lose_nothing_when_the_coordinator_is_killed(
    cluster: ProcessCluster,
    topic: str,
    new_reader: NewReader,
) -> None:
    check_the_coordinator_is_killed(cluster, topic, new_reader)


@pytest.mark.parametrize("kind", ["range", "cooperative"])
def test_a_static_java_consumer_restarts_without_a_rebalance(
    cluster: ProcessCluster,
    topic: str,
    tools: KafkaTools,
    kind: str,
) -> None:
    def static(name: str) -> NewReader:
        return partial(JavaReader, tools=tools, settings={**SETTINGS[kind], "group.instance.id": name})

    check_the_restart_of_a_static_member(cluster, topic, static)


def test_the_tool_lists_describes_resets_and_deletes_groups(
    cluster: ProcessCluster,
    topic: str,
    tools: KafkaTools,
) -> None:
    produce(cluster, topic, range(600))
    server = ("--bootstrap-server", cluster.kafka_bootstrap)

    def groups(*arguments: str) -> str:
        return tools.run("kafka-consumer-groups", *server, *arguments)

    readings = Readings()
    for kind, protocol in (("range", "Classic"), ("consumer", "Consumer")):
        reader = JavaReader(cluster.kafka_bootstrap, topic, topic, readings, tools=tools, settings=SETTINGS[kind])
        reader.start()
        if kind == "consumer":
            produce(cluster, topic, range(600, 1200))
        readings.wait_for(600 if kind == "range" else 1200)
        listed = groups("--list", "--type").splitlines()
        assert [line.split() for line in listed if line.startswith(topic)] == [[topic, protocol]]
        state = groups("--describe", "--group", topic, "--state")
        assert "Stable" in state
        assert len([line for line in groups("--describe", "--group", topic).splitlines() if topic in line]) == 6
        assert "consumer-" in groups("--describe", "--group", topic, "--members", "--verbose")
        failed = tools.call("kafka-consumer-groups", *server, "--delete", "--group", topic).output
        assert "GroupNotEmptyException" in failed
        reader.stop()
        state = groups("--describe", "--group", topic, "--state")
        assert "Empty" in state
    groups("--reset-offsets", "--group", topic, "--topic", f"{topic}:0,1", "--to-offset", "7", "--execute")
    with SettledAdmin(cluster.bootstrap) as admin:
        offsets = {tp.partition: offset for tp, offset in admin.group_offsets(topic).items()}
        assert (offsets[0], offsets[1], offsets[2]) == (7, 7, 200)
        groups("--delete-offsets", "--group", topic, "--topic", f"{topic}:0")
        assert {tp.partition for tp in admin.group_offsets(topic)} == {1, 2, 3, 4, 5}
        groups("--delete", "--group", topic)
        assert topic not in admin.list_groups()
