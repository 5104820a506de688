"""Single requests of Kafka's transactional producers: versions, error codes, late copies, and permissions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pyarrow as pa
import pytest

from sparklog.broker.kafka.error_codes import KafkaCode
from sparklog.errors import ErrorCode
from sparklog.kafka.records.encode import encode_batch
from sparklog.kafka.wire import ApiKey
from sparklog.kafka.wire import transactions as wire
from sparklog.kafka.wire.data import PartitionProduceData, ProduceRequest, TopicProduceData
from sparklog.kafka.wire.metadata import ApiVersionsRequest, FindCoordinatorRequest
from sparklog.kafka.wire.offsets import OffsetFetchRequest, OffsetFetchRequestGroup
from sparklog.protocol import messages as m
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.test_acls import as_peer, create_users
from tests.integration.kafka_calls import SECURED_BROKER, KafkaCalls
from tests.integration.test_kafka_admin_permissions import allow, logged_in
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

Identity = tuple[int, int]
_names = count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    settings = {**SECURED_BROKER, "transaction.state.log.num.partitions": "1"}
    with ProcessCluster(1, settings=settings) as running:
        create_users(running, "admin", "anna")
        for name in ("orders", "hidden"):
            assert isinstance(as_peer(running, m.CreateTopic(0, name, 2, 1, 30_000)), m.CreateTopicReply)
        allow(running, "anna", "Write", "Topic", "orders")
        allow(running, "anna", "Read", "Topic", "orders")
        allow(running, "anna", "Read", "Group", "group")
        allow(running, "anna", "Write", "TransactionalId", "of-anna")
        yield running


class Caller:
    """A client that sends the requests of one transactional id. Each returns its error code or codes."""

    def __init__(self, calls: KafkaCalls, name: str) -> None:
        self.calls = calls
        self.name = name

    def init(
        self, producer: Identity = (-1, -1), *, version: int = 4, timeout_ms: int = 60_000
    ) -> tuple[int, Identity]:
        request = wire.InitProducerIdRequest(
            transactional_id=self.name,
            transaction_timeout_ms=timeout_ms,
            producer_id=producer[0],
            producer_epoch=producer[1],
        )
        found = self.calls.ask(ApiKey.INIT_PRODUCER_ID, version, request)
        return found.error_code, (found.producer_id, found.producer_epoch)

    def given(self) -> Identity:
        code, producer = self.init()
        assert code == 0
        return producer

    def add(self, producer: Identity, *topics: str, version: int = 3) -> dict[str, int]:
        request = wire.AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.name,
            v3_and_below_producer_id=producer[0],
            v3_and_below_producer_epoch=producer[1],
            v3_and_below_topics=[wire.AddPartitionsToTxnTopic(name=name, partitions=[0]) for name in topics],
        )
        found = self.calls.ask(ApiKey.ADD_PARTITIONS_TO_TXN, version, request).results_by_topic_v3_and_below
        return {one.name: one.results_by_partition[0].partition_error_code for one in found}

    def add_group(self, producer: Identity, group: str = "group", *, version: int = 3) -> int:
        request = wire.AddOffsetsToTxnRequest(
            transactional_id=self.name, producer_id=producer[0], producer_epoch=producer[1], group_id=group
        )
        return int(self.calls.ask(ApiKey.ADD_OFFSETS_TO_TXN, version, request).error_code)

    def send_offset(
        self, producer: Identity, offset: int, *, version: int, topic: str = "orders", group: str = "group", **more: Any
    ) -> int:
        partition = wire.TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
        request = wire.TxnOffsetCommitRequest(
            transactional_id=self.name,
            group_id=group,
            producer_id=producer[0],
            producer_epoch=producer[1],
            topics=[wire.TxnOffsetCommitRequestTopic(name=topic, partitions=[partition])],
            **more,
        )
        found = self.calls.ask(ApiKey.TXN_OFFSET_COMMIT, version, request)
        return int(found.topics[0].partitions[0].error_code)

    def end(self, producer: Identity, *, commit: bool = True, version: int = 3) -> tuple[int, Identity]:
        request = wire.EndTxnRequest(
            transactional_id=self.name, producer_id=producer[0], producer_epoch=producer[1], committed=commit
        )
        found = self.calls.ask(ApiKey.END_TXN, version, request)
        return found.error_code, (found.producer_id, found.producer_epoch)

    def produce(self, producer: Identity, sequence: int, *, version: int = 9, topic: str = "orders") -> tuple[int, int]:
        """Return the error code and the base offset."""
        columns = {name: [None] for name in DEFAULT_SCHEMA.names} | {"value": [b"value"]}
        records = encode_batch(
            pa.RecordBatch.from_pydict(columns, DEFAULT_SCHEMA),
            base_offset=0,
            leader_epoch=-1,
            producer_id=producer[0],
            producer_epoch=producer[1],
            base_sequence=sequence,
            transactional=True,
        )
        data = PartitionProduceData(index=0, records=memoryview(b"".join(records)))
        request = ProduceRequest(
            transactional_id=self.name,
            acks=-1,
            timeout_ms=10_000,
            topic_data=[TopicProduceData(name=topic, partition_data=[data])],
        )
        (found,) = self.calls.ask(ApiKey.PRODUCE, version, request).responses[0].partition_responses
        return found.error_code, found.base_offset


def has_coordinators(calls: KafkaCalls) -> bool:
    """Return whether the coordinators of transactions and groups serve. The first request creates them."""
    for key_type in (0, 1):
        if calls.ask(ApiKey.FIND_COORDINATOR, 3, FindCoordinatorRequest(key="any", key_type=key_type)).error_code:
            return False
    fetch = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="any", topics=None)])
    (group,) = calls.ask(ApiKey.OFFSET_FETCH, 8, fetch).groups
    return group.error_code == 0 and Caller(calls, "any").init()[0] == 0


@pytest.fixture
def caller(cluster: ProcessCluster) -> Iterator[Caller]:
    with logged_in(cluster, "admin") as calls:
        wait_until(lambda: has_coordinators(calls))
        yield Caller(calls, f"id-{next(_names)}")


def stable_offset(caller: Caller) -> tuple[int, int]:
    fetch = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="group", topics=None)], require_stable=True)
    (group,) = caller.calls.ask(ApiKey.OFFSET_FETCH, 8, fetch).groups
    (partition,) = group.topics[0].partitions
    return partition.error_code, partition.committed_offset


def test_the_listener_names_transaction_version_2(caller: Caller) -> None:
    found = caller.calls.ask(ApiKey.API_VERSIONS, 4, ApiVersionsRequest(client_software_name="t"))
    assert [(one.name, one.max_version) for one in found.supported_features] == [("transaction.version", 2)]
    assert [(one.name, one.max_version_level) for one in found.finalized_features] == [("transaction.version", 2)]


@pytest.mark.parametrize(("version", "code"), [(10, ErrorCode.INVALID_TXN_STATE), (11, 120), (12, 47)])
def test_a_late_batch_after_the_end_gets_the_code_of_its_version(caller: Caller, version: int, code: int) -> None:
    producer = caller.given()
    assert caller.add(producer, "orders") == {"orders": 0}
    sent = caller.produce(producer, 0)
    assert sent[0] == 0
    assert caller.end(producer, commit=False, version=5 if version >= 12 else 3)[0] == 0
    assert caller.produce(producer, 1, version=version)[0] == code
    assert caller.produce(producer, 0, version=version) == sent, "a retry after the marker is a duplicate"


@pytest.mark.parametrize("version", [10, 11, 12])
def test_a_fenced_producers_batch_gets_the_code_for_its_epoch(caller: Caller, version: int) -> None:
    old = caller.given()
    assert caller.add(old, "orders") == {"orders": 0}
    assert caller.produce(old, 0)[0] == 0
    caller.given()
    assert caller.produce(old, 1, version=version)[0] == ErrorCode.INVALID_PRODUCER_EPOCH


def test_a_late_batch_never_enters_the_next_transaction(caller: Caller) -> None:
    first = caller.given()
    assert caller.produce(first, 0, version=12)[0] == 0, "the leader adds the partition"
    code, second = caller.end(first, version=5)
    assert code == 0 and second == (first[0], first[1] + 1)
    sent = caller.produce(second, 0, version=12)
    assert sent[0] == 0
    for sequence in (0, 1):
        assert caller.produce(first, sequence, version=12)[0] == ErrorCode.INVALID_PRODUCER_EPOCH
    assert caller.produce(second, 0, version=12) == sent
    assert caller.end(first, version=5)[0] == KafkaCode.PRODUCER_FENCED
    assert caller.end(second, version=5)[0] == 0


def test_older_versions_have_no_code_for_a_fenced_producer(caller: Caller) -> None:
    old = caller.given()
    caller.given()
    fenced, epoch = int(KafkaCode.PRODUCER_FENCED), int(ErrorCode.INVALID_PRODUCER_EPOCH)
    assert [caller.add(old, "orders", version=version)["orders"] for version in (1, 2)] == [epoch, fenced]
    assert [caller.add_group(old, version=version) for version in (1, 2)] == [epoch, fenced]
    assert [caller.end(old, version=version)[0] for version in (1, 2)] == [epoch, fenced]
    assert [caller.init(old, version=version)[0] for version in (3, 4)] == [epoch, fenced]
    stranger = (old[0] + 10**6, 1)
    assert caller.end(stranger)[0] == KafkaCode.INVALID_PRODUCER_ID_MAPPING
    assert Caller(caller.calls, "never-seen").end(old)[0] == KafkaCode.INVALID_PRODUCER_ID_MAPPING


def test_requests_out_of_order_are_refused(caller: Caller) -> None:
    producer = caller.given()
    assert caller.end(producer)[0] == ErrorCode.INVALID_TXN_STATE
    assert caller.produce(producer, 0)[0] == ErrorCode.INVALID_TXN_STATE, "the partition was not added"
    assert caller.init(timeout_ms=10**9)[0] == KafkaCode.INVALID_TRANSACTION_TIMEOUT
    assert Caller(caller.calls, "").init()[0] == ErrorCode.INVALID_REQUEST
    refused = caller.add(producer, "orders", "missing", "__consumer_offsets")
    assert refused == {
        "orders": KafkaCode.OPERATION_NOT_ATTEMPTED,
        "missing": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        "__consumer_offsets": ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    }


def test_names_that_are_too_long_are_refused(caller: Caller) -> None:
    producer = caller.given()
    for name in ("x" * 253, "x" * 5000):
        long = Caller(caller.calls, name)
        assert long.init()[0] == ErrorCode.INVALID_REQUEST
        assert [long.produce(producer, 0, version=version)[0] for version in (9, 12)] == [ErrorCode.INVALID_REQUEST] * 2
        assert long.send_offset(producer, 5, version=5) == ErrorCode.INVALID_REQUEST
    for more in ({"member_id": "m" * 256}, {"group_instance_id": "i" * 256}):
        found = caller.send_offset(producer, 5, version=5, generation_id=3, **more)
        assert found == ErrorCode.INVALID_REQUEST


def test_offsets_of_an_open_transaction_are_unstable(caller: Caller) -> None:
    producer = caller.given()
    assert caller.send_offset(producer, 5, version=4) == ErrorCode.INVALID_TXN_STATE, "the group was not added"
    assert caller.add_group(producer) == 0
    assert caller.send_offset(producer, 5, version=4) == 0
    assert caller.end(producer)[0] == 0
    assert stable_offset(caller) == (0, 5)
    assert caller.send_offset(producer, 6, version=5) == 0, "version 5 needs no AddOffsetsToTxn"
    assert stable_offset(caller)[0] == ErrorCode.UNSTABLE_OFFSET_COMMIT
    assert caller.end(producer, commit=False)[0] == 0
    wait_until(lambda: stable_offset(caller) == (0, 5))


@pytest.mark.parametrize("group", ["group", "unknown"])
def test_offsets_of_no_member_are_not_added(caller: Caller, group: str) -> None:
    producer = caller.given()
    stranger = caller.send_offset(producer, 7, version=5, group=group, member_id="stranger", generation_id=3)
    assert stranger in {ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION}
    assert caller.end(producer)[0] == ErrorCode.INVALID_TXN_STATE, "the refused offsets began nothing"


def test_brokers_of_kafka_verify_partitions(caller: Caller) -> None:
    producer = caller.given()
    assert caller.add(producer, "orders")["orders"] == 0

    def ask(version: int, *, verify_only: bool, topic: str) -> int:
        one = wire.AddPartitionsToTxnTransaction(
            transactional_id=caller.name,
            producer_id=producer[0],
            producer_epoch=producer[1],
            verify_only=verify_only,
            topics=[wire.AddPartitionsToTxnTopic(name=topic, partitions=[0])],
        )
        request = wire.AddPartitionsToTxnRequest(transactions=[one])
        (found,) = caller.calls.ask(ApiKey.ADD_PARTITIONS_TO_TXN, version, request).results_by_transaction
        return int(found.topic_results[0].results_by_partition[0].partition_error_code)

    assert ask(4, verify_only=True, topic="orders") == 0
    assert ask(4, verify_only=True, topic="hidden") == ErrorCode.INVALID_TXN_STATE
    assert ask(5, verify_only=True, topic="hidden") == KafkaCode.TRANSACTION_ABORTABLE
    assert ask(5, verify_only=False, topic="hidden") == 0
    assert ask(5, verify_only=True, topic="hidden") == 0


def test_each_request_needs_its_permissions(cluster: ProcessCluster, caller: Caller) -> None:
    producer = caller.given()
    refused_id, refused_group = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, ErrorCode.GROUP_AUTHORIZATION_FAILED
    refused_topic = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    with logged_in(cluster, "anna") as calls:
        other, own = Caller(calls, caller.name), Caller(calls, "of-anna")
        assert other.init()[0] == refused_id
        assert other.add(producer, "orders") == {"orders": refused_id}
        assert other.add_group(producer) == refused_id
        assert other.send_offset(producer, 1, version=5) == refused_id
        assert other.end(producer)[0] == refused_id
        assert other.produce(producer, 0)[0] == refused_id
        mine = own.given()
        assert own.add(mine, "orders", "hidden") == {
            "orders": KafkaCode.OPERATION_NOT_ATTEMPTED,
            "hidden": refused_topic,
        }
        assert own.add_group(mine, "another") == refused_group
        assert own.send_offset(mine, 1, version=5, group="another") == refused_group
        assert own.send_offset(mine, 1, version=5, topic="hidden") == refused_topic
        assert own.add(mine, "orders") == {"orders": 0}
        assert own.produce(mine, 0)[0] == 0
        assert own.add_group(mine) == 0
        assert own.send_offset(mine, 1, version=3) == 0
        assert own.end(mine)[0] == 0
        broker_form = wire.AddPartitionsToTxnRequest(transactions=[])
        found = calls.ask(ApiKey.ADD_PARTITIONS_TO_TXN, 5, broker_form)
        assert found.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
