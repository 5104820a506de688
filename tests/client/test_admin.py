"""Tests of the admin client with real sockets."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable

import pyarrow as pa
import pytest
from pyspark.sql.types import DoubleType, StringType, StructField, StructType, TimestampType

from sparklog.client.admin.admin import Admin
from sparklog.client.admin.topics import to_arrow_schema
from sparklog.client.errors import ClientTimeout
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    AlterReassignments,
    CommitOffsets,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    ListOffsets,
    Request,
)
from sparklog.record.schema import DEFAULT_SCHEMA
from tests.client.fake_cluster import FakeBroker, FakeCluster, Fault


def lose_answer(kind: type[Request]) -> Fault:
    """Perform the request, and lose its response once."""
    left = 1

    def fault(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        nonlocal left
        if isinstance(request, kind) and left:
            left -= 1
            reply = connection.reply

            def lose(*_: object, **__: object) -> None:
                connection.reply = reply  # type: ignore[method-assign]
                connection.close()

            connection.reply = lose  # type: ignore[method-assign]
        return False

    return fault


def test_topics_are_created_listed_and_deleted(fake: FakeCluster) -> None:
    with Admin(fake.bootstrap) as admin:
        made = admin.create_topic(
            "flights",
            partitions=3,
            schema="carrier string, delay double",
            key="carrier",
            config={"retention.ms": 1000, "unclean.leader.election.enable": True},
        )
        assert (made.name, len(made.partitions), made.key) == ("flights", 3, ("carrier",))
        assert made.schema == pa.schema([("carrier", pa.string()), ("delay", pa.float64())])
        assert made.config == {"retention.ms": "1000", "unclean.leader.election.enable": "true"}
        admin.create_topic("default")
        assert admin.list_topics() == ["default", "flights"]
        assert admin.describe_topic("flights") == made
        assert [topic.name for topic in admin.describe_topics()] == ["default", "flights"]
        assert admin.describe_topics(["default"])[0].schema.equals(DEFAULT_SCHEMA)
        admin.delete_topic("flights")
        assert admin.list_topics() == ["default"]


def test_an_admin_describes_the_cluster_and_its_brokers(fake: FakeCluster) -> None:
    with Admin(fake.bootstrap) as admin:
        cluster = admin.describe_cluster()
        assert cluster.cluster_id == "fake"
        assert [broker.broker_id for broker in cluster.brokers] == [0, 1]
        assert [broker.state for broker in admin.describe_brokers()] == ["running", "running"]


@pytest.mark.extended
def test_refusals_are_typed(fake: FakeCluster) -> None:
    with Admin(fake.bootstrap) as admin:
        admin.create_topic("t")
        refused: list[tuple[Callable[[], object], ErrorCode]] = [
            (lambda: admin.create_topic("t"), ErrorCode.TOPIC_ALREADY_EXISTS),
            (lambda: admin.create_topic("no/good"), ErrorCode.INVALID_TOPIC_EXCEPTION),
            (lambda: admin.create_partitions("t", 1), ErrorCode.INVALID_PARTITIONS),
            (lambda: admin.create_partitions("none", 2), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            (lambda: admin.delete_topic("none"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            (lambda: admin.describe_topic("none"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            (lambda: admin.create_topic("u", schema=pa.schema([("d", pa.null())])), ErrorCode.SCHEMA_MISMATCH),
        ]
        for call, code in refused:
            started = time.monotonic()
            with pytest.raises(BrokerError) as caught:
                call()
            assert caught.value.code == code
            assert time.monotonic() - started < 6
        with pytest.raises(ConfigError, match="strng"):
            admin.create_topic("u", schema="a strng")


def test_lost_responses_are_no_errors(fake: FakeCluster) -> None:
    with Admin(fake.bootstrap) as admin:
        for broker in fake.brokers:
            fake.fault(broker.broker_id, lose_answer(CreateTopic))
            fake.fault(broker.broker_id, lose_answer(DeleteTopic))
            fake.fault(broker.broker_id, lose_answer(CreatePartitions))
        assert admin.create_topic("t").name == "t"
        assert len(admin.create_partitions("t", 4).partitions) == 4
        admin.delete_topic("t")
        assert admin.list_topics() == []


def test_a_cancel_whose_response_was_lost_takes_effect(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    first, second = TopicPartition("t", 0), TopicPartition("t", 1)
    with Admin(fake.bootstrap) as admin:
        admin.reassign({first: (1,), second: (1,)})
        fake.fault(0, lose_answer(AlterReassignments))
        fake.fault(1, lose_answer(AlterReassignments))
        admin.cancel_reassignment([first, second])
        assert fake.do(lambda: dict(fake.moves)) == {}
        with pytest.raises(BrokerError) as caught:
            admin.cancel_reassignment([first])
        assert caught.value.code == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
        admin.reassign({first: (1,)})
        assert admin.cancel_reassignment(may_have_ended=[second, first, second]) == [first]
        assert admin.cancel_reassignment(may_have_ended=[second]) == admin.cancel_reassignment() == []
        admin.reassign({first: (1,)})
        deleted = TopicPartition("deleted", 0)
        with pytest.raises(BrokerError, match="1 of 3 moves were refused; 1 others were accepted") as caught:
            admin.cancel_reassignment([deleted], may_have_ended=[first, second])
        assert (caught.value.code, fake.moves) == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, {})
        with pytest.raises(BrokerError, match="NO_REASSIGNMENT_IN_PROGRESS"):
            admin.cancel_reassignment([second], may_have_ended=[second])
        admin.reassign({first: (1,)})
        assert admin.cancel_reassignment([first], may_have_ended=[first, second, deleted]) == [first]
        admin.reassign({first: (1,)})
        fake.fault(0, lose_answer(AlterReassignments))
        fake.fault(1, lose_answer(AlterReassignments))
        assert admin.cancel_reassignment(may_have_ended=[first]) == [first], (
            "the first attempt must have cancelled the move, or no move existed"
        )


def test_one_reachable_broker_is_enough(fake: FakeCluster) -> None:
    fake.create("t")
    with Admin(f"127.0.0.1:1,{fake.bootstrap}") as admin:
        assert admin.list_topics() == ["t"]
        fake.stop(0)
        assert admin.list_topics() == ["t"]
        assert len(admin.describe_brokers()) == 1


def test_a_closed_admin_opens_no_connection(fake: FakeCluster) -> None:
    admin = Admin(fake.bootstrap)
    admin.create_topic("t", partitions=1, replication_factor=1)
    admin.close()
    with pytest.raises(ConfigError, match="this client is closed"):
        admin.list_topics()


def test_no_reachable_broker_times_out() -> None:
    started = time.monotonic()
    with Admin("127.0.0.1:1", timeout_s=0.4) as admin, pytest.raises(ClientTimeout, match=r"127\.0\.0\.1:1"):
        admin.list_topics()
    assert time.monotonic() - started < 5


def test_an_address_that_never_responded_fails_early() -> None:
    """A user with a mistyped address gets the error long before the call's timeout. The client waits longer for a
    cluster that has responded before."""
    started = time.monotonic()
    with (
        Admin("127.0.0.1:1", timeout_s=30, first_contact_s=0.5) as admin,
        pytest.raises(ClientTimeout, match=r"no broker can be reached: 127\.0\.0\.1:1: .*refused \(tried for 0.5 s"),
    ):
        admin.list_topics()
    assert time.monotonic() - started < 5
    with FakeCluster(1) as fake, Admin(fake.bootstrap, timeout_s=1.5, first_contact_s=0.1) as admin:
        admin.list_topics()
        fake.stop(0)
        with pytest.raises(ClientTimeout, match=r"not done within 1\.5 s"):
            admin.list_topics()


def test_offsets_are_listed_by_position_and_time(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap) as producer:
        for second in range(5):
            producer.send("t", b"x", timestamp=second * 1_000_000, partition=1).result(30)
    tps = [TopicPartition("t", 0), TopicPartition("t", 1)]
    moment = dt.datetime.fromtimestamp(3, dt.timezone.utc)
    with Admin(fake.bootstrap) as admin:
        assert admin.list_offsets(tps) == {tps[0]: 0, tps[1]: 5}
        assert admin.list_offsets(tps, at="earliest") == {tps[0]: 0, tps[1]: 0}
        assert admin.list_offsets({tps[1]: moment, tps[0]: moment}) == {tps[1]: 3, tps[0]: 0}
        assert admin.list_offsets({tps[1]: 2_500_000}) == {tps[1]: 3}
        assert admin.list_offsets([]) == {}
        with pytest.raises(ValueError, match="middle"):
            admin.list_offsets(tps, at="middle")  # type: ignore[arg-type]
        with pytest.raises(BrokerError, match="t-7: topic 't' has 2 partitions"):
            admin.list_offsets([TopicPartition("t", 7)])


def test_wrong_group_offsets_are_refused_before_any_is_set(fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    with Admin(fake.bootstrap) as admin:
        for offset in (1.5, True, "5", -1, 1 << 63):
            with pytest.raises((TypeError, ValueError), match="t-1: "):
                admin.commit_offsets("g", {TopicPartition("t", 0): 3, TopicPartition("t", 1): offset})  # type: ignore[dict-item]
        assert not any(isinstance(request, CommitOffsets) for broker in fake.brokers for request in broker.requests)


def test_offsets_are_requested_again_until_they_are_known(fake: FakeCluster) -> None:
    fake.create("t")
    left = 3

    def not_yet(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        nonlocal left
        from sparklog.protocol.messages import ListedOffset, ListOffsetsReply

        if not isinstance(request, ListOffsets) or not left:
            return False
        left -= 1
        connection.reply(ListOffsetsReply(request.cid, (ListedOffset(ErrorCode.OFFSET_NOT_AVAILABLE, -1, -1, -1),)))
        return True

    fake.fault(0, not_yet)
    with Admin(fake.bootstrap) as admin:
        assert admin.list_offsets([TopicPartition("t", 0)]) == {TopicPartition("t", 0): 0}
    assert left == 0


def test_schemas_are_given_by_spark_types_or_text() -> None:
    struct = StructType(
        [StructField("a", StringType()), StructField("b", DoubleType()), StructField("t", TimestampType())]
    )
    expected = pa.schema([("a", pa.string()), ("b", pa.float64()), ("t", pa.timestamp("us", "UTC"))])
    assert to_arrow_schema(struct).equals(expected)
    assert to_arrow_schema("a string, b double, t timestamp").equals(expected)
    assert to_arrow_schema(expected) is expected
    with pytest.raises(TypeError, match="list found"):
        to_arrow_schema([])
