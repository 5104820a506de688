"""Tests of quotas with real brokers: throughput, precedence, changes without a restart, and clients without quotas.

Each asserted duration is a lower bound, which holds on a slow machine too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.messages import (
    CONSUMER,
    LATEST,
    AlterClientQuotas,
    AlterClientQuotasReply,
    DeleteTopic,
    DescribeGroup,
    ErrorReply,
    Fetch,
    FetchPartition,
    FetchReply,
    FindCoordinator,
    InitProducerId,
    ListGroups,
    ListOffsets,
    ListOffsetsPartition,
    Metadata,
    MetadataReply,
    ProduceReply,
    QuotaAlteration,
    QuotaKey,
    Request,
)
from sparklog.security.quotas import (
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    DEFAULT,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
)
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import encoded, produce_request
from tests.broker.topics import create_topic, leader
from tests.cli.in_process import Result, in_process

pytestmark = pytest.mark.integration

RATE = 200_000
#: A batch of about 51 kB.
BATCH = encoded(1000, "v" * 40)
BATCH_BYTES = len(BATCH.header.pack()) + len(BATCH.body)


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    """Return an admin client. The test's quotas are removed afterwards."""
    with Admin(cluster.bootstrap) as client:
        yield client
        for found in client.describe_quotas():
            removed = dict.fromkeys(found.quotas)
            client.alter_quotas(removed, user=found.user, client_id=found.client_id, ip=found.ip)


@pytest.fixture
def topic(cluster: ProcessCluster) -> str:
    if not cluster.metadata(0, "limited").topics[0].partitions:
        create_topic(cluster, "limited", assignment=((0,),))
    wait_until(lambda: leader(cluster, "limited") == 0, 30, "a leader")
    return "limited"


def connected(cluster: ProcessCluster, client_id: str) -> BlockingConnection:
    return BlockingConnection("127.0.0.1", cluster.slots[0].port, client_id=client_id, timeout_s=60)


def write(connection: BlockingConnection, topic: str, batches: int) -> tuple[float, int]:
    """Write batches one after the other. Return the time that it took in seconds, and the highest throttle time."""
    began, throttled = time.monotonic(), 0
    for _ in range(batches):
        reply, _ = connection.request(*produce_request(topic, [(BATCH.header, BATCH.body)]))
        assert isinstance(reply, ProduceReply) and reply.results[0].code == 0
        throttled = max(throttled, reply.throttle_time_ms)
    return time.monotonic() - began, throttled


def least_s(batches: int, rate: float = RATE) -> float:
    """Return the time that the last of these batches must have waited: the burst is one second of the rate."""
    return ((batches - 1) * BATCH_BYTES - rate) / rate


def alter(cluster: ProcessCluster, quotas: dict[str, float | None], **key: str) -> None:
    """Change quotas through broker 0, which enforces them when it replies."""
    with cluster.connect(0) as connection:
        alter_with(connection, quotas, **key)


def alter_with(connection: BlockingConnection, quotas: dict[str, float | None], **key: str) -> None:
    reply, _ = connection.request(AlterClientQuotas(0, (QuotaAlteration(QuotaKey(**key), quotas),), 30_000))
    assert isinstance(reply, AlterClientQuotasReply)
    assert [result.code for result in reply.results] == [0]


def waits(cluster: ProcessCluster) -> int:
    return cluster.describe(0).counters.get("quotas.waits", 0)


def test_a_producer_stays_within_its_quota(cluster: ProcessCluster, admin: Admin, topic: str) -> None:
    alter(cluster, {PRODUCER_BYTE_RATE: RATE}, client_id="app")
    before = waits(cluster)
    with connected(cluster, "app") as limited, connected(cluster, "other") as other:
        took_s, throttled_ms = write(limited, topic, 10)
        assert took_s >= least_s(10)
        assert throttled_ms > 0
        assert waits(cluster) > before
        assert write(other, topic, 10)[1] == 0, "clients without a quota do not wait"


def test_every_reply_has_the_throttle_time(cluster: ProcessCluster, admin: Admin) -> None:
    """The time of requests is limited, so replies without records and errors name the wait too."""
    requests: list[Request] = [Metadata(0), ListOffsets(0, 0, (ListOffsetsPartition("missing", 0, LATEST),))]
    requests += [FindCoordinator(0, "group", "g"), ListGroups(0), DescribeGroup(0, "none"), InitProducerId(0)]
    requests += [DeleteTopic(0, "missing", 1000)]
    for number, request in enumerate(requests):
        alter(cluster, {REQUEST_PERCENTAGE: 0.00001}, client_id=f"app-{number}")
        with connected(cluster, f"app-{number}") as limited:
            reply = limited._next_of(limited.send(request)).reply
        assert getattr(reply, "throttle_time_ms", 0) > 0, reply
    assert isinstance(reply, ErrorReply), "the last request fails"
    with connected(cluster, "other") as other:
        reply, _ = other.request(Metadata(0))
        assert isinstance(reply, MetadataReply) and reply.throttle_time_ms == 0


def test_a_client_waits_before_its_next_request(cluster: ProcessCluster, admin: Admin) -> None:
    alter(cluster, {REQUEST_PERCENTAGE: 0.01}, client_id="app")
    with connected(cluster, "app") as limited:
        throttled_ms = 0
        while not throttled_ms:
            reply, _ = limited.request(Metadata(0))
            assert isinstance(reply, MetadataReply)
            throttled_ms = reply.throttle_time_ms
        began = time.monotonic()
        limited.request(Metadata(0))
        assert time.monotonic() - began >= throttled_ms / 1000 - 0.1


def test_new_connections_do_not_avoid_the_quota(cluster: ProcessCluster, admin: Admin, topic: str) -> None:
    alter(cluster, {PRODUCER_BYTE_RATE: RATE}, client_id="app")
    took_s = 0.0
    for _ in range(10):
        with connected(cluster, "app") as limited:
            took_s += write(limited, topic, 1)[0]
    assert took_s >= least_s(10) - 2, "opening the connections takes time too"


def test_a_consumer_stays_within_its_quota(cluster: ProcessCluster, admin: Admin, topic: str) -> None:
    with connected(cluster, "writer") as writer:
        write(writer, topic, 10)
    alter(cluster, {CONSUMER_BYTE_RATE: RATE}, client_id="app")
    with connected(cluster, "app") as limited, connected(cluster, "other") as other:
        began, offset, received, throttled_ms = time.monotonic(), 0, 0, 0
        while received < 10 * BATCH_BYTES:
            reply, last = fetched(limited, topic, offset)
            took_s = time.monotonic() - began
            offset, received = offset + 1000 * reply.partitions[0].batch_count, received + last
            throttled_ms = max(throttled_ms, reply.throttle_time_ms)
        assert took_s >= (received - last - RATE) / RATE
        assert throttled_ms > 0
        assert fetched(other, topic, 0)[0].throttle_time_ms == 0


def fetched(connection: BlockingConnection, topic: str, offset: int) -> tuple[FetchReply, int]:
    wanted = FetchPartition(topic, 0, "", -1, offset, 1 << 20)
    reply, body = connection.request(Fetch(0, CONSUMER, -1, 1000, 1, 1 << 20, 0, 0, -1, (wanted,)))
    assert isinstance(reply, FetchReply) and reply.partitions[0].batch_count
    return reply, len(body)


def test_the_most_specific_quota_counts(cluster: ProcessCluster, admin: Admin, topic: str) -> None:
    alter(cluster, {PRODUCER_BYTE_RATE: 1000}, client_id="app")
    alter(cluster, {PRODUCER_BYTE_RATE: 2**40}, user="ANONYMOUS", client_id="app")
    with connected(cluster, "app") as connection:
        assert write(connection, topic, 3)[1] == 0
        alter(cluster, {PRODUCER_BYTE_RATE: None}, user="ANONYMOUS", client_id="app")
        assert write(connection, topic, 1)[1] > 1000


def test_a_changed_quota_ends_the_wait_of_the_old_one(cluster: ProcessCluster, admin: Admin, topic: str) -> None:
    alter(cluster, {PRODUCER_BYTE_RATE: 100}, user=DEFAULT)
    with connected(cluster, "app") as limited:
        assert write(limited, topic, 1)[1] > 300_000
        alter(cluster, {PRODUCER_BYTE_RATE: None}, user=DEFAULT)
        # ``request`` would wait for the throttle time. Otherwise the broker would not read for many minutes, and the
        # request would fail after one.
        limited.send(*produce_request(topic, [(BATCH.header, BATCH.body)]))
        reply, _ = limited.receive()
        assert isinstance(reply, ProduceReply) and reply.results[0].code == 0
        assert reply.throttle_time_ms == 0


def test_followers_are_exempt(cluster: ProcessCluster, admin: Admin) -> None:
    create_topic(cluster, "replicated", assignment=((0, 1, 2),))
    wait_until(lambda: leader(cluster, "replicated") == 0, 30, "a leader")
    alter(cluster, {CONSUMER_BYTE_RATE: 100, REQUEST_PERCENTAGE: 100}, user=DEFAULT)
    with connected(cluster, "app") as connection:
        assert write(connection, "replicated", 5)[1] == 0, "acks=all waits for followers, and they fetch at once"


def test_consumers_with_quotas_fetch_in_place_of_local_reads(cluster: ProcessCluster, admin: Admin, topic: str) -> None:
    with connected(cluster, "writer") as writer:
        write(writer, topic, 1)
    alter(cluster, {CONSUMER_BYTE_RATE: 2**40}, client_id="some other consumer")
    before = cluster.describe(0).counters
    with PartitionReader(cluster.bootstrap, TopicPartition(topic, 0), 0, 1000) as reader:
        assert sum(batch.num_rows for _, batch in reader) == 1000
    after = cluster.describe(0).counters
    assert after.get("local.segments", 0) == before.get("local.segments", 0)
    assert after["fetch.consumer.bytes"] > before.get("fetch.consumer.bytes", 0)


def test_requests_that_take_too_much_time_wait(cluster: ProcessCluster, admin: Admin, topic: str) -> None:
    alter(cluster, {REQUEST_PERCENTAGE: 0.1}, client_id="app")
    before = waits(cluster)
    with connected(cluster, "app") as limited:
        assert any(write(limited, topic, 1) and waits(cluster) > before for _ in range(100))


def test_an_address_cannot_open_connections_faster_than_its_quota(cluster: ProcessCluster, admin: Admin) -> None:
    alter(cluster, {CONNECTION_CREATION_RATE: 0.1}, ip="127.0.0.1")
    first, refused = connected(cluster, "app"), 0
    for _ in range(3):
        with pytest.raises(BrokerError) as error:
            connected(cluster, "app")
        refused += error.value.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED
    assert refused == 3
    alter_with(first, {CONNECTION_CREATION_RATE: None}, ip="127.0.0.1")
    first.close()
    connected(cluster, "app").close()


def test_impossible_quotas_are_refused(admin: Admin) -> None:
    for name, value, ip, code in (
        ("bytes", 1.0, None, ErrorCode.INVALID_CONFIG),
        (PRODUCER_BYTE_RATE, -1.0, None, ErrorCode.INVALID_CONFIG),
        (CONNECTION_CREATION_RATE, 5.0, None, ErrorCode.INVALID_CONFIG),
        (PRODUCER_BYTE_RATE, 5.0, "127.0.0.1", ErrorCode.INVALID_REQUEST),
    ):
        with pytest.raises(BrokerError) as refused:
            admin.alter_quotas({name: value}, user="anna", ip=ip)
        assert refused.value.code is code
    assert admin.describe_quotas() == []


def test_quotas_are_listed_by_entity_and_audited(cluster: ProcessCluster, admin: Admin) -> None:
    admin.alter_quotas({PRODUCER_BYTE_RATE: 1000, CONSUMER_BYTE_RATE: 0.5}, user="anna", client_id="app")
    admin.alter_quotas({CONNECTION_CREATION_RATE: 5}, ip=DEFAULT)
    assert [(found.user, found.client_id, found.ip) for found in admin.describe_quotas()] == [
        (None, None, DEFAULT),
        ("anna", "app", None),
    ]
    [found] = admin.describe_quotas(user="anna")
    assert found.quotas == {PRODUCER_BYTE_RATE: 1000, CONSUMER_BYTE_RATE: 0.5}

    def audited() -> bool:
        files = [slot.log_dir / "audit.log" for slot in cluster.slots.values()]
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
        return any('"AlterClientQuotas"' in line and "user 'anna', client-id 'app'" in line for line in lines)

    wait_until(audited, 30, "the line of the audit log")


def test_quotas_are_set_listed_and_removed_on_the_command_line(cluster: ProcessCluster, admin: Admin) -> None:
    def quotas(*arguments: str) -> Result:
        return in_process("quotas", *arguments, "-b", cluster.bootstrap)

    of_anna = ("--user", "anna", "--client-id", "app")
    made = quotas("set", *of_anna, "producer_byte_rate=10MB", "request_percentage=0.5")
    assert made.text == "set for user 'anna', client-id 'app': producer_byte_rate=10000000, request_percentage=0.5\n"
    assert quotas("set", "--ip-defaults", "connection_creation_rate=5").code == 0
    assert json.loads(quotas("list", "--json", *of_anna).out) == [
        {"user": "anna", "client_id": "app", "ip": None, "quotas": {PRODUCER_BYTE_RATE: 1e7, REQUEST_PERCENTAGE: 0.5}}
    ]
    assert [line.split() for line in quotas("list").text.splitlines()[1:]] == [
        ["default", "ip", CONNECTION_CREATION_RATE, "5"],
        ["user", "'anna',", "client-id", "'app'", PRODUCER_BYTE_RATE, "10000000"],
        ["user", "'anna',", "client-id", "'app'", REQUEST_PERCENTAGE, "0.5"],
    ]
    assert quotas("remove", *of_anna, REQUEST_PERCENTAGE).code == 0
    assert quotas("remove", "--user", "anna").code == 1, "the quotas of one of its client ids are others"
    assert quotas("remove", *of_anna).text == f"removed from user 'anna', client-id 'app': {PRODUCER_BYTE_RATE}\n"
    assert quotas("remove", "--ip-defaults").code == 0
    assert admin.describe_quotas() == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("set", "producer_byte_rate=1"),
        ("set", "--user", "anna", "producer_byte_rate"),
        ("set", "--user", "anna", "bytes=1"),
        ("set", "--user", "anna", "producer_byte_rate=many"),
        ("set", "--user", "anna", "request_percentage=1MB"),
        ("set", "--user", "", "producer_byte_rate=1"),
        ("set", "--user", "anna", "--user-defaults", "producer_byte_rate=1"),
        ("remove", "--user", "anna", "bytes"),
        ("remove",),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments: tuple[str, ...]) -> None:
    assert in_process("quotas", *arguments, "-b", "127.0.0.1:1").code == 2
