"""Kafka clients on the Kafka listener of real brokers: metadata, coordinators, TLS, logins, and hostile bytes."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from sparklog.kafka.wire import ApiKey, RequestHeader, decode_response, decode_response_header, request_frame
from sparklog.kafka.wire.admin import DescribeClientQuotasRequest
from sparklog.kafka.wire.groups import ListGroupsRequest
from sparklog.kafka.wire.metadata import ApiVersionsRequest
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.testing.settled_admin import SettledAdmin
from tests.broker.kafka.test_dispatcher import Client
from tests.conftest import ROOT
from tests.ports import FirstPort

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, kafka=True) as running:
        with SettledAdmin(running.bootstrap) as admin:
            admin.create_topic("flights", partitions=6, replication_factor=3)
        yield running


def versions(cluster: ProcessCluster) -> list[str]:
    """Return the APIs and versions that a broker serves, as the lines of the table in docs/kafka.md."""
    header = RequestHeader(ApiKey.API_VERSIONS, 4, 1, "test")
    host, _, port = cluster.kafka_bootstrap.split(",")[0].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection, connection.makefile("rb") as replies:
        connection.sendall(b"".join(map(bytes, request_frame(header, ApiVersionsRequest()))))
        frame = memoryview(replies.read(int.from_bytes(replies.read(4), "big")))
    _, message = decode_response_header(ApiKey.API_VERSIONS, 4, frame)
    lines = []
    for found in decode_response(ApiKey.API_VERSIONS, 4, message).api_keys:
        name = "".join(word.capitalize() for word in ApiKey(found.api_key).name.split("_"))
        last = f" to {found.max_version}" if found.max_version > found.min_version else ""
        lines.append(f"| {name} ({found.api_key}) | {found.min_version}{last} |")
    return lines


def test_the_page_has_the_served_apis(cluster: ProcessCluster) -> None:
    page = (ROOT / "docs" / "kafka.md").read_text("utf-8")
    _, _, table = page.partition("| API | versions |\n|---|---|\n")
    assert table.partition("\n\n")[0].splitlines() == versions(cluster)


def test_an_unknown_topic_is_created_only_if_allowed(cluster: ProcessCluster) -> None:
    confluent = pytest.importorskip("confluent_kafka.admin")
    client = confluent.AdminClient({"bootstrap.servers": cluster.kafka_bootstrap, "allow.auto.create.topics": True})
    assert client.list_topics("nowhere", timeout=60).topics["nowhere"].error is not None
    assert "nowhere" not in client.list_topics(timeout=60).topics
    allowed = {"kafka.auto.create.topics.enable": "true", "default.replication.factor": "1"}
    with ProcessCluster(1, settings=allowed, kafka=True) as other:
        settings = {"bootstrap.servers": other.kafka_bootstrap, "allow.auto.create.topics": True}
        found = confluent.AdminClient(settings).list_topics("somewhere", timeout=60).topics["somewhere"]
        assert found.error is None and len(found.partitions) == 1


def test_a_reply_has_the_time_that_a_request_quota_demands(cluster: ProcessCluster) -> None:
    async def throttled(key: ApiKey, version: int, request: Any) -> int:
        host, _, port = cluster.kafka_bootstrap.split(",")[0].rpartition(":")
        client = Client(*await asyncio.open_connection(host, int(port)))
        times: list[int] = [(await client.ask(key, version, request)).throttle_time_ms for _ in range(5)]
        client.writer.close()
        return max(times)

    # The broker handles the second one by a request of sparklog's own protocol.
    calls = [
        (ApiKey.LIST_GROUPS, 4, ListGroupsRequest(states_filter=[])),
        (ApiKey.DESCRIBE_CLIENT_QUOTAS, 1, DescribeClientQuotasRequest(components=[], strict=False)),
    ]
    with SettledAdmin(cluster.bootstrap) as admin:
        assert [asyncio.run(throttled(*call)) for call in calls] == [0, 0]
        try:
            for call in calls:
                admin.alter_quotas({"request_percentage": 0.01}, client_id="test")
                wait_until(lambda call=call: asyncio.run(throttled(*call)) > 0, 30, "a time to wait")  # type: ignore[misc]
                admin.alter_quotas({"request_percentage": None}, client_id="test")
        finally:
            admin.alter_quotas({"request_percentage": None}, client_id="test")


def addresses(cluster: ProcessCluster) -> set[str]:
    return set(cluster.kafka_bootstrap.split(","))


def test_kcat_lists_brokers_and_topics(cluster: ProcessCluster) -> None:
    kcat = shutil.which("kcat")
    if kcat is None:
        pytest.skip("kcat is not installed")
    listed = subprocess.run(
        [kcat, "-b", cluster.kafka_bootstrap, "-L"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "3 brokers:" in listed
    assert all(address in listed for address in addresses(cluster))
    assert 'topic "flights" with 6 partitions' in listed


def test_confluent_kafka_lists_topics(cluster: ProcessCluster) -> None:
    confluent = pytest.importorskip("confluent_kafka.admin")
    listed = confluent.AdminClient({"bootstrap.servers": cluster.kafka_bootstrap}).list_topics(timeout=60)
    assert {f"{broker.host}:{broker.port}" for broker in listed.brokers.values()} == addresses(cluster)
    assert sorted(listed.topics["flights"].partitions) == list(range(6))
    assert all(len(found.replicas) == 3 for found in listed.topics["flights"].partitions.values())


def test_kafka_python_describes_the_cluster(cluster: ProcessCluster) -> None:
    kafka = pytest.importorskip("kafka")
    from tests.integration.kafka_python_sockets import DIRECT

    admin = kafka.KafkaAdminClient(bootstrap_servers=cluster.kafka_bootstrap.split(","), proxy_url=DIRECT)
    try:
        described = admin.describe_cluster()
        assert described["cluster_id"] == cluster.cluster_id
        assert {f"{broker['host']}:{broker['port']}" for broker in described["brokers"]} == addresses(cluster)
        assert "flights" in admin.list_topics()
    finally:
        admin.close()


def test_brokers_of_one_host_take_and_keep_the_next_free_ports() -> None:
    listeners = {"kafka.listeners": f"PLAINTEXT://127.0.0.1:{FirstPort.KAFKA_LISTENERS}"}
    with ProcessCluster(2, settings=listeners) as cluster:

        def ports() -> dict[int, int]:
            brokers = cluster.ask_zookeeper(lambda store: store.live_brokers())
            return {broker.broker_id: endpoint.port for broker in brokers for endpoint in broker.kafka_endpoints}

        first = ports()
        assert sorted(first.values()) == [FirstPort.KAFKA_LISTENERS, FirstPort.KAFKA_LISTENERS + 1]
        later = max(first, key=lambda broker_id: first[broker_id])
        cluster.stop_brokers()
        cluster.start_controller()
        cluster.start_broker(later)
        assert ports() == {later: first[later]}
        cluster.start_brokers()
        assert ports() == first
