"""Every API of the Kafka listener by every kind of principal: without a login, without permissions, and with them.

The broker's response to ApiVersions, which its dispatcher generates, lists the APIs. An API without a line in ``LINES``
fails a test. The requests are generated from the declarations of the messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from sparklog.errors import ErrorCode
from sparklog.kafka.wire import API_VERSIONS, ApiKey
from sparklog.kafka.wire.fields import REQUESTS, Array, Field, Primitive, fields_of
from sparklog.kafka.wire.metadata import ApiVersionsRequest
from sparklog.protocol import messages as m
from sparklog.protocol.messages import encode_message
from sparklog.protocol.token_messages import ScopeEntry
from sparklog.security.request_rules import REFUSALS
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.support import encoded, produce
from tests.broker.test_acls import PASSWORD, PEER, as_peer, create_users, log_in
from tests.integration.kafka_calls import KafkaCalls

pytestmark = pytest.mark.integration

#: A resource that requests name, and one that none names.
ORDERS, HIDDEN = "orders", "hidden-orders"
TOPIC, GROUP, CLUSTER = (
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
)
TRANSACTION, TOKEN = (
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
)
UNKNOWN_ID = ErrorCode.UNKNOWN_TOPIC_ID
REFUSED = {int(code) for code in REFUSALS.values()}
#: The APIs that the end of a connection serves to each client, also before the login.
OF_THE_END = {ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE}
#: A request that names nothing, whose response leaves out what the principal may not see.
NOTHING: frozenset[ErrorCode] = frozenset()


def one(*codes: ErrorCode) -> frozenset[ErrorCode]:
    return frozenset(codes)


#: The error codes in the response to a user without permissions.
LINES: dict[ApiKey, frozenset[ErrorCode]] = {
    ApiKey.PRODUCE: one(TRANSACTION),
    ApiKey.FETCH: one(TOPIC),
    ApiKey.LIST_OFFSETS: one(TOPIC),
    ApiKey.METADATA: one(UNKNOWN_ID),
    ApiKey.OFFSET_COMMIT: one(GROUP),
    ApiKey.OFFSET_FETCH: one(GROUP),
    ApiKey.FIND_COORDINATOR: one(GROUP),
    ApiKey.JOIN_GROUP: one(GROUP),
    ApiKey.HEARTBEAT: one(GROUP),
    ApiKey.LEAVE_GROUP: one(GROUP),
    ApiKey.SYNC_GROUP: one(GROUP),
    ApiKey.DESCRIBE_GROUPS: one(GROUP),
    ApiKey.LIST_GROUPS: NOTHING,
    ApiKey.CREATE_TOPICS: one(TOPIC),
    ApiKey.DELETE_TOPICS: one(UNKNOWN_ID),
    ApiKey.DELETE_RECORDS: one(TOPIC),
    ApiKey.INIT_PRODUCER_ID: one(TRANSACTION),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: one(TOPIC),
    ApiKey.ADD_PARTITIONS_TO_TXN: one(CLUSTER),
    ApiKey.ADD_OFFSETS_TO_TXN: one(TRANSACTION),
    ApiKey.END_TXN: one(TRANSACTION),
    ApiKey.TXN_OFFSET_COMMIT: one(TRANSACTION),
    ApiKey.DESCRIBE_ACLS: one(CLUSTER),
    ApiKey.CREATE_ACLS: one(CLUSTER),
    ApiKey.DELETE_ACLS: one(CLUSTER),
    ApiKey.DESCRIBE_CONFIGS: one(TOPIC),
    ApiKey.ALTER_CONFIGS: one(TOPIC),
    ApiKey.DESCRIBE_LOG_DIRS: one(CLUSTER),
    ApiKey.CREATE_PARTITIONS: one(TOPIC),
    ApiKey.CREATE_DELEGATION_TOKEN: one(TOKEN),
    ApiKey.RENEW_DELEGATION_TOKEN: one(ErrorCode.DELEGATION_TOKEN_NOT_FOUND),
    ApiKey.EXPIRE_DELEGATION_TOKEN: one(ErrorCode.DELEGATION_TOKEN_NOT_FOUND),
    ApiKey.DESCRIBE_DELEGATION_TOKEN: NOTHING,
    ApiKey.DELETE_GROUPS: one(GROUP),
    ApiKey.ELECT_LEADERS: one(CLUSTER),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: one(TOPIC),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: one(CLUSTER),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: one(CLUSTER),
    ApiKey.OFFSET_DELETE: one(GROUP),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: one(CLUSTER),
    ApiKey.ALTER_CLIENT_QUOTAS: one(CLUSTER),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: one(CLUSTER),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: one(CLUSTER),
    ApiKey.DESCRIBE_CLUSTER: NOTHING,
    ApiKey.DESCRIBE_PRODUCERS: one(TOPIC),
    ApiKey.DESCRIBE_TRANSACTIONS: one(TRANSACTION),
    ApiKey.LIST_TRANSACTIONS: NOTHING,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: one(GROUP),
    ApiKey.CONSUMER_GROUP_DESCRIBE: one(GROUP),
    ApiKey.LIST_CONFIG_RESOURCES: one(CLUSTER),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: one(TOPIC),
}
EVERY_API = pytest.mark.parametrize("api_key", LINES, ids=[key.name for key in LINES])

#: The APIs whose requests name a topic only by its id. The response must not tell the name.
BY_ID = {ApiKey.FETCH, ApiKey.METADATA, ApiKey.DELETE_TOPICS}

#: Values of fields by name, where a request with the default would be refused before the check of permissions.
NUMBERS = {
    "resource_type": 2,
    "count": 2,
    "num_partitions": 1,
    "replication_factor": 1,
    "endpoint_type": 1,
    "iterations": 4096,
    "mechanism": 1,
    "operation": 3,
    "permission_type": 3,
    "resource_pattern_type": 3,
    "resource_type_filter": 1,
    "pattern_type_filter": 1,
    "acks": 1,
    "timeout_ms": 1000,
    "replica_id": -1,
    "session_timeout_ms": 10_000,
    "rebalance_timeout_ms": 10_000,
}
TEXTS = {
    "protocol_type": "consumer",
    "principal": "User:eve",
    "host": "*",
    "member_id": "m-1",
    "principal_type": "User",
    "entity_type": "user",
    "entity_name": "eve",
    "key": "producer_byte_rate",
    "principal_name": "eve",
    "owner_principal_type": "User",
    "owner_principal_name": "admin",
    "value": "5",
}
#: Fields that stay empty or null.
ABSENT = {
    *("group_instance_id", "rack_id", "cursor", "subscribed_topic_regex", "server_assignor", "cluster_id"),
    *("principal_filter", "host_filter", "resource_name_filter", "instance_id", "assignments"),
}


class Filled:
    """A request of an API in its newest version, whose lists have one element and whose names are ``orders``."""

    def __init__(self, api_key: ApiKey, topic_id: bytes) -> None:
        self.version = API_VERSIONS[api_key][1]
        self._topic_id = topic_id
        self.request = self._struct(REQUESTS[api_key].declared)

    def _struct(self, declared: type) -> Any:
        found: dict[str, Any] = {}
        fields = [field for field in fields_of(declared) if self.version in field.versions]
        by_id = any(field.name == "topic_id" for field in fields)
        for field in fields:
            absent = field.name in ABSENT or (by_id and field.name in {"name", "topic"})
            if absent and self.version in field.nullable:
                found[field.name] = None
            elif field.name == "name" and declared.__name__.endswith("Config"):
                found[field.name] = "flush.ms"
            else:
                found[field.name] = self._value(field.type, field)
        return declared(**found)

    def _value(self, kind: Primitive | Array | type, field: Field) -> Any:
        match kind:
            case Primitive():
                return self._primitive(kind, field.name)
            case Array():
                if field.name in ABSENT:
                    return []
                return [self._value(kind.element, field)]
            case declared:
                return self._struct(declared)

    def _primitive(self, kind: Primitive, name: str) -> Any:
        if kind.name.startswith("int"):
            return NUMBERS.get(name, 0)
        match kind.name:
            case "bool":
                return False
            case "float64":
                return 1000.0
            case "uuid":
                return self._topic_id
            case "string":
                return TEXTS.get(name, "" if name in ABSENT else ORDERS)
            case _:
                return bytes(range(32))


def codes(response: Any) -> set[int]:
    """Return the error codes of a response and of its parts, except success."""
    found: set[int] = set()
    for name in response.__struct_fields__:
        value = getattr(response, name)
        if name.endswith("error_code") and value:
            found.add(value)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, msgspec.Struct):
                found |= codes(part)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    settings = {
        "super.users": "User:admin",
        "internal.topic.replication.factor": "1",
        "transaction.state.log.num.partitions": "1",
        "offsets.topic.num.partitions": "1",
        "listeners": "OPEN://127.0.0.1:0,USERS://127.0.0.1:0,BROKER://127.0.0.1:0",
        "kafka.listeners": "KAFKA://127.0.0.1:0",
        "listener.security.protocol.map": "OPEN:PLAINTEXT,USERS:SASL_PLAINTEXT,BROKER:PLAINTEXT,KAFKA:SASL_PLAINTEXT",
        "inter.broker.listener.name": "BROKER",
    }
    with ProcessCluster(1, settings=settings) as running:
        create_users(running, "admin", "bert")
        for name in (ORDERS, HIDDEN):
            assert isinstance(as_peer(running, m.CreateTopic(0, name, 1, 1, 30_000)), m.CreateTopicReply)
        with running.connect(0, identity=PEER) as peer:
            for name in (ORDERS, HIDDEN):
                assert produce(peer, name, encoded(3))
        yield running


def request_of(cluster: ProcessCluster, api_key: ApiKey) -> Filled:
    reply = as_peer(cluster, m.Metadata(0, (ORDERS,), schemas=False))
    assert isinstance(reply, m.MetadataReply)
    known = reply.topics[0].topic_id
    return Filled(api_key, bytes.fromhex(known) if known else b"\x07" * 16)


def state(cluster: ProcessCluster) -> list[bytes]:
    """Return all that the requests could change, encoded."""
    wanted = tuple(m.ListOffsetsPartition(name, 0, at) for name in (ORDERS, HIDDEN) for at in (m.EARLIEST, m.LATEST))
    requests: list[m.Request] = [m.Metadata(0, None, internal=True), m.ListOffsets(0, 0, wanted), m.ListGroups(0)]
    requests += [m.DescribeAcls(0), m.DescribeClientQuotas(0), m.DescribeUserScramCredentials(0)]
    requests += [m.ListTransactions(0), m.ListReassignments(0)]
    return [encode_message(msgspec.structs.replace(as_peer(cluster, request), cid=0)) for request in requests]


def test_every_api_of_the_dispatcher_has_a_line(cluster: ProcessCluster) -> None:
    with KafkaCalls(cluster.slots[0].kafka_address) as calls:
        served = calls.ask(
            ApiKey.API_VERSIONS, 3, ApiVersionsRequest(client_software_name="test", client_software_version="1")
        ).api_keys
    assert {ApiKey(one.api_key) for one in served} - OF_THE_END == LINES.keys()


@pytest.mark.extended
@EVERY_API
def test_nothing_is_served_without_a_login(cluster: ProcessCluster, api_key: ApiKey) -> None:
    filled = request_of(cluster, api_key)
    with KafkaCalls(cluster.slots[0].kafka_address) as calls, pytest.raises(ConnectionError):
        calls.ask(api_key, filled.version, filled.request)


@pytest.mark.extended
@EVERY_API
def test_a_user_without_permissions_is_refused(cluster: ProcessCluster, api_key: ApiKey) -> None:
    filled, before = request_of(cluster, api_key), state(cluster)
    with KafkaCalls(cluster.slots[0].kafka_address) as calls:
        assert calls.log_in("bert", PASSWORD) == 0
        response = calls.ask(api_key, filled.version, filled.request)
    assert codes(response) == {int(code) for code in LINES[api_key]}, response
    assert HIDDEN not in repr(response) and not (api_key in BY_ID and ORDERS in repr(response))
    assert state(cluster) == before


#: The error codes of the requests about tokens, which no client that has logged in by a token may send.
OF_TOKENS = {
    ApiKey.CREATE_DELEGATION_TOKEN: one(ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED),
    ApiKey.RENEW_DELEGATION_TOKEN: one(ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED),
    ApiKey.EXPIRE_DELEGATION_TOKEN: one(ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED),
    ApiKey.DESCRIBE_DELEGATION_TOKEN: one(ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED),
}


@pytest.fixture(scope="module")
def token(cluster: ProcessCluster) -> tuple[str, str]:
    """Return the id and the secret of a token of the super user, with which its holder may only read one topic."""
    with log_in(cluster, "admin") as admin:
        scope = (ScopeEntry("Read", "Topic", "elsewhere"),)
        created, _ = admin.request(m.CreateDelegationToken(0, scope=scope))
    assert isinstance(created, m.CreateDelegationTokenReply)
    return created.token.token_id, created.secret


@pytest.mark.extended
@EVERY_API
def test_the_token_of_a_super_user_serves_only_its_scope(
    cluster: ProcessCluster, token: tuple[str, str], api_key: ApiKey
) -> None:
    filled, before = request_of(cluster, api_key), state(cluster)
    with KafkaCalls(cluster.slots[0].kafka_address) as calls:
        assert calls.log_in(*token, token=True) == 0
        response = calls.ask(api_key, filled.version, filled.request)
    assert codes(response) == {int(code) for code in OF_TOKENS.get(api_key, LINES[api_key])}, response
    assert HIDDEN not in repr(response) and not (api_key in BY_ID and ORDERS in repr(response))
    assert state(cluster) == before


@pytest.mark.extended
@EVERY_API
def test_a_user_with_permissions_is_served(cluster: ProcessCluster, api_key: ApiKey) -> None:
    filled = request_of(cluster, api_key)
    with KafkaCalls(cluster.slots[0].kafka_address) as calls:
        assert calls.log_in("admin", PASSWORD) == 0
        response = calls.ask(api_key, filled.version, filled.request)
    assert not codes(response) & REFUSED, response
