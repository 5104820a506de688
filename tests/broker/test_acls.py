"""Tests of ACLs on a real broker: every request of every kind of principal, and changes of ACLs that take effect.

The principals are a client without a login, and users with a SCRAM login: one without any ACL, one with exactly the
ACLs that the rule of the request names, and a super user.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.blocking import BlockingConnection
from sparklog.net.client_security import ClientSecurity
from sparklog.protocol import messages as m
from sparklog.protocol.messages import Reply, Request, encode_message
from sparklog.protocol.proof import Identity
from sparklog.protocol.sasl import SCRAM_SHA_256
from sparklog.protocol.scram import ScramCredential
from sparklog.protocol.senders import SenderKind
from sparklog.protocol.user_messages import ScramCredentialUpsertion
from sparklog.security.acl_entries import entry_of
from sparklog.security.acls import AclFilter, Operation, ResourceType, binding
from sparklog.security.principals import Principal
from sparklog.security.request_rules import REFUSALS, sender_of
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.support import encoded, fetch, produce
from tests.broker.test_authorized_requests import needed
from tests.cli.in_process import in_process
from tests.security.test_request_rules import EXPECTED, HANDSHAKE
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

ANONYMOUS = "User:ANONYMOUS"
#: A topic that no request names.
HIDDEN = "hidden-orders"
PASSWORD = "correct horse battery staple"
REQUESTS = [request for request, _ in EXPECTED if type(request) not in HANDSHAKE]
#: A peer that has proved that it is a broker. ACLs do not limit it.
PEER = Identity(SenderKind.BROKER, 7, 1)
REFUSED = {int(code) for code in REFUSALS.values()}
DENIED = ErrorCode.TOPIC_AUTHORIZATION_FAILED


@pytest.fixture(scope="module")
def guarded() -> Iterator[ProcessCluster]:
    """Return one broker with the topics ``orders`` and ``HIDDEN``, whose ACLs allow nothing."""
    settings = {
        "super.users": "User:admin",
        "internal.topic.replication.factor": "1",
        "transaction.state.log.num.partitions": "1",
        "offsets.topic.num.partitions": "1",
        "listeners": "OPEN://127.0.0.1:0,USERS://127.0.0.1:0,BROKER://127.0.0.1:0",
        "listener.security.protocol.map": "OPEN:PLAINTEXT,USERS:SASL_PLAINTEXT,BROKER:PLAINTEXT",
        "inter.broker.listener.name": "BROKER",
    }
    with ProcessCluster(1, settings=settings) as cluster:
        create_users(cluster, "admin", "anna", "bert")
        for name in ("orders", HIDDEN):
            assert isinstance(as_peer(cluster, m.CreateTopic(0, name, 1, 1, 30_000)), m.CreateTopicReply)
        with cluster.connect(0, identity=PEER) as peer:
            assert produce(peer, "orders", encoded(3))
        yield cluster


def as_peer(cluster: ProcessCluster, request: Request) -> Reply:
    with cluster.connect(0, identity=PEER) as connection:
        return connection.request(request)[0]


def create_users(cluster: ProcessCluster, *names: str) -> None:
    credential = ScramCredential.derive(SCRAM_SHA_256, PASSWORD, b"salt of the users", 4096)
    keys = (credential.iterations, credential.salt, credential.stored_key, credential.server_key)
    upsertions = tuple(ScramCredentialUpsertion(name, SCRAM_SHA_256, *keys) for name in names)
    reply = as_peer(cluster, m.AlterUserScramCredentials(0, (), upsertions))
    assert isinstance(reply, m.AlterUserScramCredentialsReply)
    assert [user.code for user in reply.users] == [0] * len(names)


def log_in(cluster: ProcessCluster, name: str) -> BlockingConnection:
    """Return a connection with the login of this user; without a name, one without a login."""
    if not name:
        return cluster.connect(0)
    [broker] = cluster.ask_zookeeper(lambda store: store.live_brokers())
    [users] = [endpoint for endpoint in broker.endpoints if endpoint.name == "USERS"]
    settings = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": SCRAM_SHA_256,
        "sasl.username": name,
        "sasl.password": PASSWORD,
    }
    security = ClientSecurity.parse(settings)
    return BlockingConnection(users.host, users.port, client_id="test", security=security)


def asked(connection: BlockingConnection, request: Request) -> Reply:
    try:
        return connection.request(request)[0]
    except BrokerError as error:
        return m.ErrorReply(0, error.code, error.detail)


def codes(reply: Any) -> set[int]:
    """Return the error codes of a reply and of its entries."""
    entries = [reply]
    for name in ("results", "partitions", "topics"):
        entries += getattr(reply, name, None) or ()
    return {entry.code for entry in entries if hasattr(entry, "code")}


@pytest.fixture
def admin(guarded: ProcessCluster) -> Iterator[Admin]:
    """Return a client without a login that may list and change ACLs and nothing else."""
    for operation in ("Alter", "Describe"):
        entry = m.AclEntry("Cluster", "kafka-cluster", "Literal", ANONYMOUS, "*", operation, "Allow")
        assert isinstance(as_peer(guarded, m.CreateAcls(0, (entry,))), m.Ack)
    with Admin(guarded.bootstrap) as found:
        yield found
    as_peer(guarded, m.DeleteAcls(0, (m.AclCondition(),)))


EVERY_REQUEST = pytest.mark.parametrize("number", range(len(REQUESTS)), ids=[type(one).__name__ for one in REQUESTS])


#: Each user that has logged in may have tokens, and nothing of the tokens of others.
OF_TOKENS = (m.CreateDelegationToken, m.RenewDelegationToken, m.ExpireDelegationToken, m.DescribeDelegationTokens)


def has_only_own_tokens(reply: m.Reply, who: str) -> bool:
    if isinstance(reply, m.ErrorReply):
        return reply.code in {
            ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED,
            ErrorCode.DELEGATION_TOKEN_NOT_FOUND,
            ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH,
        }
    owners = {reply.token.owner} if isinstance(reply, m.CreateDelegationTokenReply) else set()
    if isinstance(reply, m.DescribeDelegationTokensReply):
        owners = {token.owner for token in reply.tokens}
    return bool(who) and owners <= {f"User:{who}"}


@EVERY_REQUEST
@pytest.mark.parametrize("who", ["", "bert"], ids=["no login", "wrong user"])
def test_nothing_is_served_to_the_wrong_principal(guarded: ProcessCluster, number: int, who: str) -> None:
    with log_in(guarded, who) as connection:
        reply = asked(connection, REQUESTS[number])
    assert HIDDEN.encode() not in encode_message(reply)
    if isinstance(REQUESTS[number], OF_TOKENS):
        assert has_only_own_tokens(reply, who)
    elif not codes(reply) & REFUSED:
        # A list of nothing is the only other answer.
        assert isinstance(reply, (m.ListGroupsReply, m.ListTransactionsReply, m.FindHangingReply, m.MetadataReply))
        assert not any(getattr(reply, name, ()) for name in ("groups", "transactions", "topics"))


def test_nothing_was_changed(guarded: ProcessCluster) -> None:
    reply = as_peer(guarded, m.Metadata(0, None, internal=True))
    assert isinstance(reply, m.MetadataReply)
    assert [topic.name for topic in reply.topics] == [HIDDEN, "orders"], "not even an internal topic was created"
    described = as_peer(guarded, m.DescribeBroker(0))
    assert isinstance(described, m.DescribeBrokerReply)
    assert {(one.topic, one.log_start_offset, one.log_end_offset) for one in described.replicas} == {
        ("orders", 0, 3),
        (HIDDEN, 0, 0),
    }
    assert described.counters["requests.denied"] > 30


def test_a_change_of_acls_takes_effect_in_open_connections(guarded: ProcessCluster, admin: Admin) -> None:
    write = binding("topic", "ord", ANONYMOUS, "write", pattern_type="prefixed")
    read = binding("topic", "*", ANONYMOUS, "read", host="127.0.0.0/8")
    with guarded.connect(0) as connection:
        refused = produce(connection, "orders", encoded(1))
        assert refused.code == DENIED
        admin.create_acls([write, read])
        assert produce(connection, "orders", encoded(1)).code == ErrorCode.NONE
        assert fetch(connection, "orders", 0)[0].batch_count > 0
        assert set(admin.list_topics()) == {"orders", HIDDEN}
        assert admin.delete_acls([AclFilter(operation=read.operation)]) == [read]
        assert fetch(connection, "orders", 0)[0].code == DENIED
        assert admin.list_topics() == ["orders"], "Write implies Describe"
        admin.delete_acls([AclFilter(ResourceType.TOPIC)])
        assert produce(connection, "orders", encoded(1)).code == DENIED


def test_a_waiting_fetch_ends_when_its_acl_is_removed(guarded: ProcessCluster, admin: Admin) -> None:
    read = binding("topic", "orders", ANONYMOUS, "read")
    admin.create_acls([read])
    described = as_peer(guarded, m.DescribeBroker(0))
    assert isinstance(described, m.DescribeBrokerReply)
    end = max(one.log_end_offset for one in described.replicas)
    partition = m.FetchPartition("orders", 0, "", -1, end, 1000)
    with guarded.connect(0) as connection, guarded.connect(0, identity=PEER) as peer:
        connection.send(m.Fetch(0, m.CONSUMER, -1, 30_000, 1, 1000, 0, 0, -1, (partition,)))
        admin.delete_acls([AclFilter(ResourceType.TOPIC)])
        assert produce(peer, "orders", encoded(1)).code == ErrorCode.NONE
        reply, _ = connection.receive()
    assert isinstance(reply, m.FetchReply)
    assert [(one.code, one.batch_count) for one in reply.partitions] == [(DENIED, 0)]


def test_a_pattern_reads_only_the_topics_that_the_member_may_read(guarded: ProcessCluster, admin: Admin) -> None:
    acls = [binding("topic", "orders", ANONYMOUS, "read"), binding("group", "readers", ANONYMOUS, "read")]
    admin.create_acls(acls)
    with guarded.connect(0, identity=PEER) as peer:
        assert produce(peer, HIDDEN, encoded(1)).code == ErrorCode.NONE
    seen = 0
    with Consumer(guarded.bootstrap, group="readers", pattern=".*orders", auto_commit_interval_ms=100) as consumer:
        end = time.monotonic() + 60
        while not seen:
            assert time.monotonic() < end
            seen += sum(batch.num_rows for batch in consumer.poll(0.5))
        assert {tp.topic for tp in consumer.assignment} == {"orders"}


def test_a_fetch_session_belongs_to_its_principal(guarded: ProcessCluster, admin: Admin) -> None:
    partition = m.FetchPartition(HIDDEN, 0, "", -1, 10_000, 1000)
    with log_in(guarded, "admin") as owner, log_in(guarded, "bert") as other:
        opened = asked(owner, m.Fetch(0, m.CONSUMER, -1, 0, 1, 1000, 0, 0, 0, (partition,)))
        assert isinstance(opened, m.FetchReply)
        number = opened.session_id
        stolen = asked(other, m.Fetch(0, m.CONSUMER, -1, 0, 1, 1000, 0, number, 1, ()))
        assert codes(stolen) == {ErrorCode.FETCH_SESSION_ID_NOT_FOUND}
        asked(other, m.Fetch(0, m.CONSUMER, -1, 0, 1, 1000, 0, number, 0, (partition,)))  # a new session in its place
        kept = asked(owner, m.Fetch(0, m.CONSUMER, -1, 0, 1, 1000, 0, number, 1, ()))
        assert isinstance(kept, m.FetchReply)
        assert (kept.code, kept.session_id) == (ErrorCode.NONE, number)


def test_a_producer_without_write_fails_at_once(guarded: ProcessCluster, admin: Admin) -> None:
    admin.create_acls([binding("topic", "orders", ANONYMOUS, "describe")])
    with Producer(guarded.bootstrap) as producer, pytest.raises(BrokerError) as caught:
        producer.send("orders", b"x", partition=0).result(30)
    assert caught.value.code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    admin.create_acls([binding("topic", "orders", ANONYMOUS, "write")])
    with Producer(guarded.bootstrap) as producer:
        producer.send("orders", b"x", partition=0).result(30)
        admin.delete_acls([AclFilter(ResourceType.TOPIC, operation=Operation.WRITE)])
        with pytest.raises(BrokerError) as caught:
            producer.send("orders", b"x", partition=0).result(30)
        assert caught.value.code == DENIED


def test_an_invalid_acl_is_refused(admin: Admin, guarded: ProcessCluster) -> None:
    entry = m.AclEntry("Topic", "orders", "Literal", "anna", "*", "Read", "Allow")
    with guarded.connect(0) as connection:
        reply = asked(connection, m.CreateAcls(0, (entry,)))
        assert codes(reply) == {ErrorCode.INVALID_REQUEST}
        reply = asked(connection, m.DescribeAcls(0, m.AclCondition(operation="Fly")))
        assert codes(reply) == {ErrorCode.INVALID_REQUEST}


def test_the_command_adds_lists_checks_and_removes(guarded: ProcessCluster, admin: Admin) -> None:
    def acls(*arguments: str, code: int = 0) -> Any:
        result = in_process("acls", *arguments, "--bootstrap", guarded.bootstrap, "--json")
        assert result.code == code, result
        return json.loads(result.text) if result.text else result.err

    anna = ("--principal", "User:anna")
    added = acls("add", *anna, "--producer", "--topic", "orders", "--transactional-id", "sink")
    assert {(one["operation"], one["name"]) for one in added} == {
        ("Write", "orders"),
        ("Describe", "orders"),
        ("Create", "orders"),
        ("Write", "sink"),
        ("Describe", "sink"),
    }
    acls(
        "add",
        "--principal",
        "User:*",
        "--operation",
        "write",
        "--topic",
        "ord",
        "--prefixed",
        "--deny",
        "--host",
        "10.0.0.0/8",
    )
    assert len(acls("list", "--topic", "orders")) == 4
    assert len(acls("list", "--topic", "orders", "--pattern-type", "literal")) == 3

    write = ("check", *anna, "--operation", "Write", "--topic", "orders")
    assert acls(*write) == {
        "allowed": True,
        "rule": "an ACL allows User:anna Write on Topic 'orders' from any host",
    }
    assert acls(*write, "--host", "10.1.2.3", code=1)["rule"] == (
        "an ACL denies User:* Write on Topic with the prefix 'ord' from 10.0.0.0/8"
    )
    assert acls("check", "--principal", "User:admin", "--operation", "Alter", "--cluster")["rule"] == (
        "User:admin is a super user"
    )
    assert not acls("check", *anna, "--operation", "Alter", "--cluster", code=1)["allowed"]

    assert len(acls("remove", *anna, "--yes")["removed"]) == 5
    assert acls("remove", *anna, "--yes")["removed"] == []
    text = in_process("acls", "list", "--topic", "orders", "--bootstrap", guarded.bootstrap).text
    assert text.split()[-7:] == ["User:*", "Deny", "Write", "Topic", "ord", "Prefixed", "10.0.0.0/8"]
    assert in_process("acls", "add", *anna, "--topic", "x", "--bootstrap", guarded.bootstrap).code == 2


def test_acls_survive_a_restart_of_the_broker(guarded: ProcessCluster, admin: Admin) -> None:
    admin.create_acls([binding("topic", "orders", ANONYMOUS, "write")])
    guarded.restart(0)

    def served() -> bool:
        with guarded.connect(0) as connection:
            return produce(connection, "orders", encoded(1)).code == ErrorCode.NONE

    wait_until(served, "the broker leads again, and has read the ACLs")


# The last test, because it deletes topics.
@EVERY_REQUEST
@pytest.mark.parametrize("who", ["anna", "admin"], ids=["right user", "super user"])
def test_every_request_is_served_to_the_right_principal(guarded: ProcessCluster, number: int, who: str) -> None:
    request = REQUESTS[number]
    acls = needed(request, Principal("User", "anna"))
    if isinstance(request, m.DescribeGroup):
        acls.append(binding("topic", "orders", "User:anna", "describe"))  # a member reads this topic
    if who == "anna" and acls:
        assert isinstance(as_peer(guarded, m.CreateAcls(0, tuple(map(entry_of, acls)))), m.Ack)
    with log_in(guarded, who) as connection:
        reply = asked(connection, request)
    as_peer(guarded, m.DeleteAcls(0, (m.AclCondition(),)))
    if sender_of(request) is SenderKind.CLIENT:
        assert not codes(reply) & REFUSED
    else:
        assert codes(reply) == {ErrorCode.CLUSTER_AUTHORIZATION_FAILED}, "an ACL does not replace the proof of a broker"
