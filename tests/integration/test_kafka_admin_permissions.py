"""Tests of the ACLs of Kafka's administrative requests, and of users and tokens that Kafka clients create."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from sparklog.errors import ErrorCode
from sparklog.kafka.wire import ApiKey
from sparklog.kafka.wire import admin as wire
from sparklog.kafka.wire import security as wire_security
from sparklog.kafka.wire.metadata import DescribeTopicPartitionsRequest, TopicRequest
from sparklog.kafka.wire.transactions import DescribeProducersRequest, DescribeTransactionsRequest
from sparklog.kafka.wire.transactions import TopicRequest as ProducersTopic
from sparklog.protocol import messages as m
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.test_acls import PASSWORD, as_peer, create_users
from tests.integration.kafka_calls import SECURED_BROKER, KafkaCalls

pytestmark = pytest.mark.integration

TIMEOUT_S = 30
#: The numbers of Kafka's protocol for parts of ACLs.
ANY, TOPIC, GROUP, MATCH, LITERAL, PREFIXED = 1, 2, 3, 2, 3, 4
READ, DELETE, DESCRIBE, DENY, ALLOW = 3, 6, 8, 2, 3
#: The operations on a topic that a client with Read and Describe may do, as a bit field.
READ_AND_DESCRIBE = 1 << READ | 1 << DESCRIBE

EVERY_ACL = wire_security.DescribeAclsRequest(
    resource_type_filter=ANY,
    resource_name_filter=None,
    pattern_type_filter=ANY,
    principal_filter=None,
    host_filter=None,
    operation=ANY,
    permission_type=ANY,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    """Return one broker with an authorizer, and with logins on its Kafka listener."""
    settings = {**SECURED_BROKER, "transaction.state.log.num.partitions": "1"}
    with ProcessCluster(1, settings=settings) as running:
        create_users(running, "admin", "anna", "bert")
        for name in ("orders", "hidden"):
            assert isinstance(as_peer(running, m.CreateTopic(0, name, 1, 1, 30_000)), m.CreateTopicReply)
        allow(running, "anna", "Read", "Topic", "orders")
        yield running


def allow(cluster: ProcessCluster, user: str, operation: str, resource_type: str, name: str) -> None:
    entry = m.AclEntry(resource_type, name, "Literal", f"User:{user}", "*", operation, "Allow")
    assert isinstance(as_peer(cluster, m.CreateAcls(0, (entry,))), m.Ack)


def logged_in(cluster: ProcessCluster, name: str) -> KafkaCalls:
    calls = KafkaCalls(cluster.slots[0].kafka_address)
    assert calls.log_in(name, PASSWORD) == 0
    return calls


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[KafkaCalls]:
    with logged_in(cluster, "admin") as calls:
        yield calls


@pytest.fixture
def anna(cluster: ProcessCluster) -> Iterator[KafkaCalls]:
    """Return a client that may read the topic orders, and nothing else."""
    with logged_in(cluster, "anna") as calls:
        yield calls


def topic_id(cluster: ProcessCluster, name: str) -> bytes:
    reply = as_peer(cluster, m.Metadata(0, (name,), schemas=False))
    assert isinstance(reply, m.MetadataReply)
    return bytes.fromhex(reply.topics[0].topic_id)


REFUSED_TOPIC, REFUSED_CLUSTER = ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.CLUSTER_AUTHORIZATION_FAILED


# --- topics ---


@pytest.mark.parametrize("validate_only", [False, True])
def test_creation_needs_create(anna: KafkaCalls, validate_only: bool) -> None:
    new = wire.CreatableTopic(name="new", num_partitions=1, replication_factor=1)
    request = wire.CreateTopicsRequest(topics=[new], validate_only=validate_only)
    (found,) = anna.ask(ApiKey.CREATE_TOPICS, 7, request).topics
    assert found.error_code == REFUSED_TOPIC and "anna" in found.error_message
    wanted = wire.CreatePartitionsTopic(name="orders", count=2, assignments=None)
    more = wire.CreatePartitionsRequest(topics=[wanted], validate_only=validate_only)
    (found,) = anna.ask(ApiKey.CREATE_PARTITIONS, 3, more).results
    assert found.error_code == REFUSED_TOPIC


def test_the_settings_of_a_new_topic_need_describe_configs(cluster: ProcessCluster) -> None:
    allow(cluster, "bert", "Create", "Topic", "of-bert")
    new = wire.CreatableTopic(name="of-bert", num_partitions=1, replication_factor=1)
    with logged_in(cluster, "bert") as calls:
        (found,) = calls.ask(ApiKey.CREATE_TOPICS, 7, wire.CreateTopicsRequest(topics=[new])).topics
    assert (found.error_code, found.topic_config_error_code) == (0, REFUSED_TOPIC)
    assert (found.num_partitions, found.configs) == (-1, None)


def test_a_topic_is_hidden_only_if_it_is_named_by_its_id(cluster: ProcessCluster, anna: KafkaCalls) -> None:
    hidden, orders = topic_id(cluster, "hidden"), topic_id(cluster, "orders")
    wanted = [
        wire.DeleteTopicState(name="hidden"),
        wire.DeleteTopicState(name="never-existed"),
        wire.DeleteTopicState(topic_id=hidden),
        wire.DeleteTopicState(topic_id=orders),
    ]
    found = anna.ask(ApiKey.DELETE_TOPICS, 6, wire.DeleteTopicsRequest(topics=wanted, timeout_ms=5000)).responses
    assert [(one.name, one.topic_id, one.error_code) for one in found] == [
        ("hidden", bytes(16), REFUSED_TOPIC),
        ("never-existed", bytes(16), REFUSED_TOPIC),
        (None, hidden, ErrorCode.UNKNOWN_TOPIC_ID),
        ("orders", orders, REFUSED_TOPIC),
    ]


def test_hidden_topics_are_described_only_as_refused(anna: KafkaCalls) -> None:
    every = anna.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, DescribeTopicPartitionsRequest())
    assert [(one.name, one.topic_authorized_operations) for one in every.topics] == [("orders", READ_AND_DESCRIBE)]
    named = DescribeTopicPartitionsRequest(topics=[TopicRequest(name=name) for name in ("hidden", "orders")])
    found = anna.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, named).topics
    assert [(one.name, one.error_code) for one in found] == [("hidden", REFUSED_TOPIC), ("orders", 0)]


def test_records_are_deleted_only_with_delete(anna: KafkaCalls) -> None:
    topics = [
        wire.DeleteRecordsTopic(name=name, partitions=[wire.DeleteRecordsPartition(partition_index=0, offset=0)])
        for name in ("orders", "never-existed")
    ]
    found = anna.ask(ApiKey.DELETE_RECORDS, 2, wire.DeleteRecordsRequest(topics=topics)).topics
    assert [one.partitions[0].error_code for one in found] == [REFUSED_TOPIC] * 2


# --- settings, replicas and the cluster ---


def test_settings_need_the_permissions_of_settings(anna: KafkaCalls) -> None:
    resources = [
        wire.DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=None)
        for kind, name in ((2, "orders"), (2, "never-existed"), (4, "0"))
    ]
    found = anna.ask(ApiKey.DESCRIBE_CONFIGS, 4, wire.DescribeConfigsRequest(resources=resources)).results
    assert [one.error_code for one in found] == [REFUSED_TOPIC, REFUSED_TOPIC, REFUSED_CLUSTER]
    changes = [wire.IncrementalAlterableConfig(name="flush.ms", value="5")]
    for validate_only in (False, True):
        request = wire.IncrementalAlterConfigsRequest(
            resources=[
                wire.IncrementalAlterConfigsResource(resource_type=kind, resource_name=name, configs=changes)
                for kind, name in ((2, "orders"), (4, "0"))
            ],
            validate_only=validate_only,
        )
        found = anna.ask(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, request).responses
        assert [one.error_code for one in found] == [REFUSED_TOPIC, REFUSED_CLUSTER]


@pytest.mark.parametrize(
    ("api_key", "version", "request_"),
    [
        (ApiKey.DESCRIBE_LOG_DIRS, 4, wire.DescribeLogDirsRequest(topics=None)),
        (ApiKey.ELECT_LEADERS, 2, wire.ElectLeadersRequest(topic_partitions=None)),
        (ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, wire.ListPartitionReassignmentsRequest()),
        (ApiKey.ALTER_PARTITION_REASSIGNMENTS, 1, wire.AlterPartitionReassignmentsRequest()),
        (ApiKey.LIST_CONFIG_RESOURCES, 1, wire.ListConfigResourcesRequest()),
        (ApiKey.DESCRIBE_CLIENT_QUOTAS, 1, wire.DescribeClientQuotasRequest()),
        (ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, wire_security.DescribeUserScramCredentialsRequest(users=None)),
        (ApiKey.DESCRIBE_ACLS, 3, EVERY_ACL),
    ],
    ids=lambda value: value.name if isinstance(value, ApiKey) else "",
)
def test_requests_about_the_cluster_are_refused_as_a_whole(
    anna: KafkaCalls, api_key: ApiKey, version: int, request_: Any
) -> None:
    assert anna.ask(api_key, version, request_).error_code == REFUSED_CLUSTER


def test_quotas_and_users_are_altered_only_with_permission(anna: KafkaCalls) -> None:
    entity = wire.AlterClientQuotasEntryData(
        entity=[wire.EntityData(entity_type="user", entity_name="anna")],
        ops=[wire.OpData(key="producer_byte_rate", value=1.0)],
    )
    (found,) = anna.ask(ApiKey.ALTER_CLIENT_QUOTAS, 1, wire.AlterClientQuotasRequest(entries=[entity])).entries
    assert found.error_code == REFUSED_CLUSTER
    deletion = wire_security.ScramCredentialDeletion(name="bert", mechanism=1)
    request = wire_security.AlterUserScramCredentialsRequest(deletions=[deletion])
    (result,) = anna.ask(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, request).results
    assert (result.user, result.error_code) == ("bert", REFUSED_CLUSTER)


def test_producers_and_transactions_need_their_permissions(anna: KafkaCalls) -> None:
    topics = [ProducersTopic(name=name, partition_indexes=[0]) for name in ("orders", "hidden")]
    found = anna.ask(ApiKey.DESCRIBE_PRODUCERS, 0, DescribeProducersRequest(topics=topics)).topics
    assert [one.partitions[0].error_code for one in found] == [0, REFUSED_TOPIC]
    request = DescribeTransactionsRequest(transactional_ids=["payments"])
    (state,) = anna.ask(ApiKey.DESCRIBE_TRANSACTIONS, 0, request).transaction_states
    assert state.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


# --- ACLs ---


def creation(name: str, operation: int = READ, *, pattern: int = LITERAL, kind: int = TOPIC) -> Any:
    return wire_security.AclCreation(
        resource_type=kind,
        resource_name=name,
        resource_pattern_type=pattern,
        principal="User:carl",
        host="*",
        operation=operation,
        permission_type=ALLOW,
    )


def selecting(name: str | None, pattern: int = ANY) -> dict[str, Any]:
    """Return the fields of a filter of ACLs of carl."""
    return {
        "resource_type_filter": TOPIC,
        "resource_name_filter": name,
        "pattern_type_filter": pattern,
        "principal_filter": "User:carl",
        "host_filter": None,
        "operation": ANY,
        "permission_type": ANY,
    }


def listed(admin: KafkaCalls, name: str | None, pattern: int = ANY, version: int = 3) -> list[tuple[str, int, int]]:
    request = wire_security.DescribeAclsRequest(**selecting(name, pattern))
    response = admin.ask(ApiKey.DESCRIBE_ACLS, version, request)
    assert response.error_code == 0
    return sorted(
        (resource.resource_name, resource.pattern_type, acl.operation)
        for resource in response.resources
        for acl in resource.acls
    )


@pytest.mark.parametrize("version", [1, 2, 3])
def test_acls_are_created_described_and_deleted(admin: KafkaCalls, version: int) -> None:
    creations = [
        creation("bills"),
        creation("bi", DELETE, pattern=PREFIXED),
        creation("bills", 9),  # ClusterAction is no operation on a topic
        creation("bills", kind=99),
        creation("bills", DESCRIBE),
    ]
    request = wire_security.CreateAclsRequest(creations=creations)
    results = admin.ask(ApiKey.CREATE_ACLS, version, request).results
    assert [one.error_code for one in results] == [0, 0, ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_REQUEST, 0]
    literal = [("bills", LITERAL, READ), ("bills", LITERAL, DESCRIBE)]
    prefixed = ("bi", PREFIXED, DELETE)
    assert listed(admin, "bills", version=version) == literal
    assert listed(admin, "bills", MATCH, version) == [prefixed, *literal]
    assert listed(admin, None, PREFIXED, version) == [prefixed]
    filters = [wire_security.DeleteAclsFilter(**selecting(name)) for name in ("bills", "never-existed", "bi")]
    odd = wire_security.DeleteAclsFilter(**{**selecting("bills"), "operation": 99})
    nameless = {**selecting("bills"), "principal_filter": "*"}  # no ACL has a principal without a type
    response = admin.ask(ApiKey.DESCRIBE_ACLS, version, wire_security.DescribeAclsRequest(**nameless))
    assert (response.error_code, response.resources) == (0, [])
    filters.insert(0, wire_security.DeleteAclsFilter(**nameless))
    deletion = wire_security.DeleteAclsRequest(filters=[*filters, odd])
    found = admin.ask(ApiKey.DELETE_ACLS, version, deletion).filter_results
    assert [one.error_code for one in found] == [0, 0, 0, 0, ErrorCode.INVALID_REQUEST]
    operations = [sorted(acl.operation for acl in one.matching_acls) for one in found[:4]]
    assert operations == [[], [READ, DESCRIBE], [], [DELETE]]
    assert listed(admin, None) == []


def test_acls_are_changed_only_with_permission(anna: KafkaCalls) -> None:
    request = wire_security.CreateAclsRequest(creations=[creation("orders"), creation("orders", 9)])
    results = anna.ask(ApiKey.CREATE_ACLS, 3, request).results
    assert [one.error_code for one in results] == [REFUSED_CLUSTER, ErrorCode.INVALID_REQUEST]
    deletion = wire_security.DeleteAclsRequest(filters=[wire_security.DeleteAclsFilter(**selecting(None))])
    (found,) = anna.ask(ApiKey.DELETE_ACLS, 3, deletion).filter_results
    assert found.error_code == REFUSED_CLUSTER


def test_a_created_acl_takes_effect(cluster: ProcessCluster, admin: KafkaCalls) -> None:
    new = wire_security.AclCreation(
        resource_type=TOPIC,
        resource_name="hidden",
        resource_pattern_type=LITERAL,
        principal="User:bert",
        host="*",
        operation=DESCRIBE,
        permission_type=ALLOW,
    )
    request = DescribeTopicPartitionsRequest(topics=[TopicRequest(name="hidden")])
    with logged_in(cluster, "bert") as bert:
        assert bert.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, request).topics[0].error_code == REFUSED_TOPIC
        admin.ask(ApiKey.CREATE_ACLS, 3, wire_security.CreateAclsRequest(creations=[new]))
        assert bert.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, request).topics[0].error_code == 0


# --- users and delegation tokens ---


def client(cluster: ProcessCluster, name: str, password: str) -> AdminClient:
    return AdminClient(
        {
            "bootstrap.servers": cluster.kafka_bootstrap,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": name,
            "sasl.password": password,
        }
    )


def test_a_user_that_a_kafka_client_creates_can_log_in(cluster: ProcessCluster) -> None:
    credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    upsertion = UserScramCredentialUpsertion("dora", credential, b"password of dora")
    admin = client(cluster, "admin", PASSWORD)
    for future in admin.alter_user_scram_credentials([upsertion]).values():
        future.result(TIMEOUT_S)
    assert client(cluster, "dora", "password of dora").list_topics(timeout=TIMEOUT_S).topics == {}
    with KafkaCalls(cluster.slots[0].kafka_address) as calls:
        assert calls.log_in("dora", "another password") == ErrorCode.SASL_AUTHENTICATION_FAILED


def test_a_credential_that_no_client_could_use_is_refused(admin: KafkaCalls) -> None:
    good: dict[str, Any] = {"mechanism": 1, "iterations": 4096, "salt": b"0123456789", "salted_password": bytes(32)}
    wrong: dict[str, dict[str, Any]] = {
        "few": {**good, "iterations": 10},
        "short": {**good, "salted_password": b"secret"},
        "unsalted": {**good, "salt": b""},
        "": good,
    }
    upsertions = [wire_security.ScramCredentialUpsertion(name=name, **fields) for name, fields in wrong.items()]
    upsertions.append(wire_security.ScramCredentialUpsertion(name="odd", **{**good, "mechanism": 3}))
    request = wire_security.AlterUserScramCredentialsRequest(upsertions=upsertions)
    found = admin.ask(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, request).results
    expected = [ErrorCode.UNACCEPTABLE_CREDENTIAL] * 4 + [ErrorCode.UNSUPPORTED_SASL_MECHANISM]
    assert [one.error_code for one in found] == expected
    every = admin.ask(
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, wire_security.DescribeUserScramCredentialsRequest(users=None)
    ).results
    assert {"few", "short", "unsalted", "", "odd"}.isdisjoint(one.user for one in every)


def create_token(calls: KafkaCalls, version: int = 3) -> Any:
    renewers = [wire_security.CreatableRenewers(principal_type="User", principal_name="bert")]
    request = wire_security.CreateDelegationTokenRequest(
        owner_principal_type=None, owner_principal_name=None, renewers=renewers, max_lifetime_ms=-1
    )
    return calls.ask(ApiKey.CREATE_DELEGATION_TOKEN, version, request)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_delegation_token_logs_in_as_its_owner(cluster: ProcessCluster, anna: KafkaCalls, version: int) -> None:
    token = create_token(anna, version)
    assert (token.error_code, token.principal_type, token.principal_name) == (0, "User", "anna")
    assert token.issue_timestamp_ms < token.expiry_timestamp_ms <= token.max_timestamp_ms
    password = base64.b64encode(token.hmac).decode()
    with KafkaCalls(cluster.slots[0].kafka_address) as calls:
        assert calls.log_in(token.token_id, password, token=True) == 0
        every = calls.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, DescribeTopicPartitionsRequest()).topics
        assert [one.name for one in every] == ["orders"]
        assert create_token(calls).error_code == ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED


def test_a_delegation_token_is_renewed_and_ended_by_its_hmac(cluster: ProcessCluster, anna: KafkaCalls) -> None:
    token = create_token(anna)
    with logged_in(cluster, "bert") as bert:
        renewal = wire_security.RenewDelegationTokenRequest(hmac=token.hmac, renew_period_ms=7_200_000)
        renewed = bert.ask(ApiKey.RENEW_DELEGATION_TOKEN, 2, renewal)
        assert renewed.error_code == 0 and renewed.expiry_timestamp_ms < token.expiry_timestamp_ms
    described = anna.ask(
        ApiKey.DESCRIBE_DELEGATION_TOKEN, 3, wire_security.DescribeDelegationTokenRequest(owners=None)
    ).tokens
    (found,) = [one for one in described if one.token_id == token.token_id]
    assert found.expiry_timestamp == renewed.expiry_timestamp_ms
    assert [(one.principal_type, one.principal_name) for one in found.renewers] == [("User", "bert")]
    assert token.hmac.startswith(found.hmac) and len(found.hmac) == 16, "not the whole secret"
    with KafkaCalls(cluster.slots[0].kafka_address) as calls:
        password = base64.b64encode(found.hmac).decode()
        assert calls.log_in(token.token_id, password, token=True) == ErrorCode.SASL_AUTHENTICATION_FAILED
    expiry = wire_security.ExpireDelegationTokenRequest(hmac=found.hmac, expiry_time_period_ms=-1)
    assert anna.ask(ApiKey.EXPIRE_DELEGATION_TOKEN, 2, expiry).error_code == 0
    assert anna.ask(ApiKey.EXPIRE_DELEGATION_TOKEN, 2, expiry).error_code == ErrorCode.DELEGATION_TOKEN_NOT_FOUND
    short = wire_security.RenewDelegationTokenRequest(hmac=b"", renew_period_ms=-1)
    assert anna.ask(ApiKey.RENEW_DELEGATION_TOKEN, 2, short).error_code == ErrorCode.DELEGATION_TOKEN_NOT_FOUND


def test_a_token_for_another_owner_is_refused(anna: KafkaCalls) -> None:
    request = wire_security.CreateDelegationTokenRequest(
        owner_principal_type="User", owner_principal_name="admin", max_lifetime_ms=-1
    )
    found = anna.ask(ApiKey.CREATE_DELEGATION_TOKEN, 3, request)
    assert found.error_code == ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED and not found.hmac
