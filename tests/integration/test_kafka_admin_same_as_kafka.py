"""Tests that sparklog answers administrative requests and EndTxn with the error codes of a real Kafka 4.1.1.

Both systems get the same requests. Kafka's jars are fetched once from Maven Central (``bench.kafka_jars``). If they
cannot be fetched, pytest skips these tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sparklog.errors import ErrorCode
from sparklog.kafka.wire import ApiKey
from sparklog.kafka.wire import admin as wire
from sparklog.kafka.wire import security as wire_security
from sparklog.kafka.wire.metadata import Cursor, DescribeTopicPartitionsRequest, TopicRequest
from sparklog.kafka.wire.transactions import (
    DescribeProducersRequest,
    ListTransactionsRequest,
)
from sparklog.kafka.wire.transactions import TopicRequest as ProducersTopic
from sparklog.testing.process_cluster import ProcessCluster
from tests.integration.kafka_calls import KafkaCalls
from tests.integration.test_kafka_transaction_calls import Caller, Identity, has_coordinators
from tests.spark.kafka_side import KafkaBroker
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended]

ANY, MANY = 1, 30_000


class Side(NamedTuple):
    """One of the two systems: its connection, and the id of its only broker."""

    calls: KafkaCalls
    broker_id: int


@pytest.fixture(scope="module")
def sides(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """Return a real Kafka and a sparklog, each with the topic ``orders``."""
    settings = {"default.replication.factor": "1", "internal.topic.replication.factor": "1"}
    with (
        KafkaBroker(jars.parent, tmp_path_factory.mktemp("kafka")) as kafka,
        ProcessCluster(1, settings=settings, kafka=True) as cluster,
        KafkaCalls(kafka.bootstrap) as theirs,
        KafkaCalls(cluster.kafka_bootstrap) as ours,
    ):
        both = Side(theirs, 1), Side(ours, 0)
        for side in both:
            assert codes(create(side, new("orders", 2))) == [0]
        yield both


def codes(results: list[Any]) -> list[int]:
    return [result.error_code for result in results]


def new(name: str, partitions: int = 1, factor: int = 1, **fields: Any) -> Any:
    return wire.CreatableTopic(name=name, num_partitions=partitions, replication_factor=factor, **fields)


def create(side: Side, *topics: Any, version: int = 7, validate_only: bool = False) -> list[Any]:
    request = wire.CreateTopicsRequest(topics=list(topics), timeout_ms=MANY, validate_only=validate_only)
    found = side.calls.ask(ApiKey.CREATE_TOPICS, version, request).topics
    return sorted(found, key=lambda one: one.name)


def assigned(*replicas: tuple[int, list[int]]) -> Any:
    return [wire.CreatableReplicaAssignment(partition_index=number, broker_ids=ids) for number, ids in replicas]


def configured(**config: str) -> Any:
    return [wire.CreatableTopicConfig(name=name.replace("_", "."), value=value) for name, value in config.items()]


def creations(side: Side) -> Any:
    odd = [
        new("a", -1, -1),
        new("b", 0),
        new("c", -5),
        new("d", 1, 0),
        new("e", 1, 7),
        new("f", -1, -1, assignments=assigned((0, [side.broker_id]))),
        new("g", 1, -1, assignments=assigned((0, [side.broker_id]))),
        new("h", -1, -1, assignments=assigned((1, [side.broker_id]))),
        new("i", -1, -1, assignments=assigned((0, [99]))),
        new("j", -1, -1, assignments=assigned((0, [side.broker_id, side.broker_id]))),
        new("k", configs=configured(retention_hours="1")),
        new("l", configs=configured(retention_ms="much")),
        new("m", configs=configured(cleanup_policy="forget")),
        new("n", configs=configured(compression_type="lz4", retention_ms="1000")),
        new("o", configs=[wire.CreatableTopicConfig(name="retention.ms", value=None)]),
        new("orders"),
        new(""),
        new("."),
        new("bad/name"),
        new("p" * 250),
    ]
    return codes(create(side, *odd, validate_only=True))


def creations_of_one_name(side: Side) -> Any:
    return codes(create(side, new("twice"), new("twice")))


def created_topic(side: Side) -> Any:
    (found,) = create(side, new("created", 3, configs=configured(retention_ms="1000", flush_messages=str(2**63 - 1))))
    own = {one.name: one.value for one in found.configs if one.config_source == 1}
    return found.error_code, found.num_partitions, found.replication_factor, own, len(found.topic_id)


def deletions(side: Side) -> Any:
    states = [
        wire.DeleteTopicState(name="never-existed"),
        wire.DeleteTopicState(topic_id=bytes(range(16))),
        wire.DeleteTopicState(name="orders", topic_id=bytes(range(16))),
        wire.DeleteTopicState(name="bad/name"),
    ]
    found = [
        side.calls.ask(ApiKey.DELETE_TOPICS, 6, wire.DeleteTopicsRequest(topics=[state], timeout_ms=MANY)).responses[0]
        for state in states
    ]
    return [(one.error_code, one.name) for one in found]


def extensions(side: Side) -> Any:
    def topic(name: str, count: int, *replicas: list[int]) -> Any:
        assignments = [wire.CreatePartitionsAssignment(broker_ids=ids) for ids in replicas] or None
        return wire.CreatePartitionsTopic(name=name, count=count, assignments=assignments)

    wanted = [
        topic("never-existed", 3),
        topic("orders/partitions", 3),
        topic("orders", 2),
        topic("orders", 1),
        topic("orders", 0),
        topic("orders", 3, [side.broker_id], [side.broker_id]),
        topic("orders", 3, [99]),
        topic("orders", 3, [side.broker_id, 99]),
        topic("orders", 3),
    ]
    found = []
    for one in wanted:
        request = wire.CreatePartitionsRequest(topics=[one], timeout_ms=MANY, validate_only=True)
        found += side.calls.ask(ApiKey.CREATE_PARTITIONS, 3, request).results
    return codes(found)


def deleted_records(side: Side) -> Any:
    partitions = [
        wire.DeleteRecordsPartition(partition_index=number, offset=offset)
        for number, offset in ((0, 0), (1, -1), (5, 0), (0, 9))
    ]
    found = []
    for name, one in (*(("orders", one) for one in partitions), ("never-existed", partitions[0])):
        topics = [wire.DeleteRecordsTopic(name=name, partitions=[one])]
        response = side.calls.ask(ApiKey.DELETE_RECORDS, 2, wire.DeleteRecordsRequest(topics=topics, timeout_ms=MANY))
        found += response.topics[0].partitions
    return [(one.error_code, one.low_watermark) for one in found]


def described_configs(side: Side) -> Any:
    resources = [(2, "orders"), (2, "never-existed"), (2, "bad/name"), (4, "77"), (4, "x"), (4, ""), (3, "orders")]
    found = []
    for kind, name in resources:
        resource = wire.DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=None)
        found += side.calls.ask(ApiKey.DESCRIBE_CONFIGS, 4, wire.DescribeConfigsRequest(resources=[resource])).results
    return codes(found)


def types_of_settings(side: Side) -> Any:
    keys = ["cleanup.policy", "retention.ms", "max.message.bytes", "message.timestamp.type", "flush.messages"]
    keys += ["min.cleanable.dirty.ratio", "unclean.leader.election.enable", "min.insync.replicas", "never.existed"]
    resource = wire.DescribeConfigsResource(resource_type=2, resource_name="orders", configuration_keys=keys)
    (found,) = side.calls.ask(ApiKey.DESCRIBE_CONFIGS, 4, wire.DescribeConfigsRequest(resources=[resource])).results
    return {one.name: (one.config_type, one.read_only, one.is_sensitive) for one in found.configs}


def altered_configs(side: Side) -> Any:
    def resource(name: str, setting: str, operation: int, value: str | None, kind: int = 2) -> Any:
        change = wire.IncrementalAlterableConfig(name=setting, config_operation=operation, value=value)
        return wire.IncrementalAlterConfigsResource(resource_type=kind, resource_name=name, configs=[change])

    wanted = [
        resource("orders", "retention.ms", 0, "1000"),
        resource("orders", "retention.ms", 1, None),
        resource("orders", "retention.ms", 1, None),
        resource("orders", "cleanup.policy", 2, "compact"),
        resource("orders", "cleanup.policy", 3, "compact"),
        resource("orders", "retention.ms", 2, "1"),
        resource("orders", "retention.hours", 0, "1"),
        resource("orders", "retention.ms", 0, "much"),
        resource("orders", "retention.ms", 0, None),
        resource("never-existed", "retention.ms", 0, "1"),
        resource("orders/partitions", "retention.ms", 0, "1"),
        resource("../orders", "retention.ms", 0, "1"),
        resource("orders", "retention.ms", 0, "1", kind=3),
    ]
    found = []
    for one in wanted:
        request = wire.IncrementalAlterConfigsRequest(resources=[one])
        found += side.calls.ask(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, request).responses
    return codes(found)


def elections(side: Side) -> Any:
    found = []
    for kind, name, partition in ((0, "orders", 0), (1, "orders", 0), (0, "orders", 9), (0, "never-existed", 0)):
        topics = [wire.TopicPartitions(topic=name, partitions=[partition])]
        request = wire.ElectLeadersRequest(election_type=kind, topic_partitions=topics, timeout_ms=MANY)
        response = side.calls.ask(ApiKey.ELECT_LEADERS, 2, request)
        results = [one.error_code for topic in response.replica_election_results for one in topic.partition_result]
        found.append((response.error_code, results))
    every = wire.ElectLeadersRequest(election_type=0, topic_partitions=None, timeout_ms=MANY)
    response = side.calls.ask(ApiKey.ELECT_LEADERS, 2, every)
    # Kafka also names the topics that need no election, without partitions.
    return (
        found,
        response.error_code,
        [topic.partition_result for topic in response.replica_election_results if topic.partition_result],
    )


def reassignments(side: Side) -> Any:
    found = []
    for name, partition, replicas in (
        ("orders", 0, [side.broker_id]),
        ("orders", 0, [99]),
        ("orders", 0, []),
        ("orders", 0, [side.broker_id, side.broker_id]),
        ("orders", 0, None),
        ("orders", 9, [side.broker_id]),
        ("never-existed", 0, [side.broker_id]),
        ("orders/partitions", 0, [side.broker_id]),
    ):
        move = wire.ReassignablePartition(partition_index=partition, replicas=replicas)
        topics = [wire.ReassignableTopic(name=name, partitions=[move])]
        request = wire.AlterPartitionReassignmentsRequest(topics=topics, timeout_ms=MANY)
        response = side.calls.ask(ApiKey.ALTER_PARTITION_REASSIGNMENTS, 1, request)
        found.append((response.error_code, response.responses[0].partitions[0].error_code))
    listed = side.calls.ask(ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, wire.ListPartitionReassignmentsRequest())
    return found, listed.error_code, listed.topics


def acls_without_an_authorizer(side: Side) -> Any:
    selecting: dict[str, Any] = {
        "resource_type_filter": ANY,
        "resource_name_filter": None,
        "pattern_type_filter": ANY,
        "principal_filter": None,
        "host_filter": None,
        "operation": ANY,
        "permission_type": ANY,
    }
    new_acl = wire_security.AclCreation(
        resource_type=2, resource_name="orders", principal="User:anna", host="*", operation=3, permission_type=3
    )
    described = side.calls.ask(ApiKey.DESCRIBE_ACLS, 3, wire_security.DescribeAclsRequest(**selecting))
    created = side.calls.ask(ApiKey.CREATE_ACLS, 3, wire_security.CreateAclsRequest(creations=[new_acl])).results
    filters = [wire_security.DeleteAclsFilter(**selecting)]
    deleted = side.calls.ask(ApiKey.DELETE_ACLS, 3, wire_security.DeleteAclsRequest(filters=filters)).filter_results
    return described.error_code, codes(created), codes(deleted)


def quotas(side: Side) -> Any:
    def entry(kind: str, name: str | None, key: str, value: float, *, remove: bool = False) -> Any:
        entity = [wire.EntityData(entity_type=kind, entity_name=name)]
        return wire.AlterClientQuotasEntryData(entity=entity, ops=[wire.OpData(key=key, value=value, remove=remove)])

    wanted = [
        entry("user", "anna", "producer_byte_rate", 1024.0),
        entry("user", None, "request_percentage", 50.0),
        entry("ip", "127.0.0.9", "connection_creation_rate", 5.0),
        entry("user", "anna", "bytes", 1.0),
        entry("user", "anna", "connection_creation_rate", 1.0),
        entry("user", "anna", "producer_byte_rate", -1.0),
        entry("animal", "cat", "producer_byte_rate", 1.0),
        entry("user", "", "producer_byte_rate", 1.0),
        entry("user", "otto", "producer_byte_rate", 0.0, remove=True),
    ]
    found = []
    for one in wanted:
        request = wire.AlterClientQuotasRequest(entries=[one])
        found += side.calls.ask(ApiKey.ALTER_CLIENT_QUOTAS, 1, request).entries
    components = [wire.ComponentData(entity_type="user", match_type=2, match=None)]
    described = side.calls.ask(
        ApiKey.DESCRIBE_CLIENT_QUOTAS, 1, wire.DescribeClientQuotasRequest(components=components)
    )
    listed = sorted(
        (str([(part.entity_type, part.entity_name) for part in one.entity]), [(v.key, v.value) for v in one.values])
        for one in described.entries
    )
    return codes(found), described.error_code, listed


def users(side: Side) -> Any:
    good: dict[str, Any] = {"iterations": 4096, "salt": b"0123456789abcdef", "salted_password": bytes(32)}
    upsertions = [
        wire_security.ScramCredentialUpsertion(name="anna", mechanism=1, **good),
        wire_security.ScramCredentialUpsertion(name="few", mechanism=1, **{**good, "iterations": 1}),
        wire_security.ScramCredentialUpsertion(name="odd", mechanism=9, **good),
        wire_security.ScramCredentialUpsertion(name="", mechanism=1, **good),
    ]
    deletions = [wire_security.ScramCredentialDeletion(name="otto", mechanism=1)]
    request = wire_security.AlterUserScramCredentialsRequest(deletions=deletions, upsertions=upsertions)
    altered = side.calls.ask(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, request).results
    described = []
    for names in (["anna"], ["otto"], ["anna", "anna"], None):
        wanted = [wire_security.UserName(name=name) for name in names] if names is not None else None
        response = side.calls.ask(
            ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, wire_security.DescribeUserScramCredentialsRequest(users=wanted)
        )
        infos = [
            (one.user, one.error_code, [(info.mechanism, info.iterations) for info in one.credential_infos])
            for one in response.results
        ]
        described.append((response.error_code, infos))
    return sorted((one.user, one.error_code) for one in altered), described


def pages(side: Side) -> Any:
    found = []
    for names, limit, cursor in (
        (["orders"], 1, None),
        (["orders"], 1, Cursor(topic_name="orders", partition_index=1)),
        (["orders", "never-existed", "bad/name"], 2000, None),
    ):
        request = DescribeTopicPartitionsRequest(
            topics=[TopicRequest(name=name) for name in names], response_partition_limit=limit, cursor=cursor
        )
        page = side.calls.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, request)
        topics = [
            (
                topic.name,
                topic.error_code,
                topic.is_internal,
                topic.topic_authorized_operations,
                [(one.partition_index, one.error_code, one.offline_replicas) for one in topic.partitions],
            )
            for topic in page.topics
        ]
        found.append((topics, page.next_cursor))
    return found


def transactions(side: Side) -> Any:
    topics = [ProducersTopic(name="orders", partition_indexes=[0, 9]), ProducersTopic(name="x", partition_indexes=[0])]
    producers = side.calls.ask(ApiKey.DESCRIBE_PRODUCERS, 0, DescribeProducersRequest(topics=topics)).topics
    listed = side.calls.ask(ApiKey.LIST_TRANSACTIONS, 2, ListTransactionsRequest(state_filters=["Odd", "Ongoing"]))
    invalid = side.calls.ask(ApiKey.LIST_TRANSACTIONS, 2, ListTransactionsRequest(transactional_id_pattern="("))
    return (
        [(topic.name, codes(topic.partitions)) for topic in producers],
        (listed.error_code, listed.unknown_state_filters, listed.transaction_states),
        invalid.error_code,
    )


def ends_of_transactions(side: Side) -> Any:
    """End a transactional id's transaction in each state, and return the codes.

    The versions before 5 belong to clients that keep their epoch. A transaction is empty if its AddPartitionsToTxn has
    not reached a broker.
    """
    wait_until(lambda: has_coordinators(side.calls))
    found = []
    for version, state, commit in product((1, 3, 5), ("empty", "open", "committed", "aborted"), (True, False)):
        caller = Caller(side.calls, f"{version}-{state}-{commit}")
        first = latest = caller.given()
        if state != "empty":
            assert caller.produce(first, 0, version=12)[0] == 0
        if state in {"committed", "aborted"}:
            code, after = ended(caller, first, commit=state == "committed", version=version)
            assert code == 0
            latest = after if version >= 5 else first
        for producer in dict.fromkeys((first, latest)):
            code, (_, epoch) = ended(caller, producer, commit=commit, version=version)
            raised = epoch - first[1] if version >= 5 and not code else 0
            found.append((version, state, commit, producer == latest, code, raised))
    return found


def ended(caller: Caller, producer: Identity, *, commit: bool, version: int) -> tuple[int, Identity]:
    """Send EndTxn, and send it again until the end of an earlier transaction is complete."""
    last = (0, producer)

    def sent() -> bool:
        nonlocal last
        last = caller.end(producer, commit=commit, version=version)
        return last[0] != ErrorCode.CONCURRENT_TRANSACTIONS

    wait_until(sent)
    return last


@pytest.mark.parametrize(
    "ask",
    [
        creations,
        creations_of_one_name,
        created_topic,
        deletions,
        extensions,
        deleted_records,
        described_configs,
        types_of_settings,
        altered_configs,
        elections,
        reassignments,
        acls_without_an_authorizer,
        quotas,
        users,
        pages,
        transactions,
        ends_of_transactions,
    ],
)
def test_both_systems_return_the_same_results(sides: tuple[Side, Side], ask: Callable[[Side], Any]) -> None:
    kafka, ours = sides
    assert ask(ours) == ask(kafka)
