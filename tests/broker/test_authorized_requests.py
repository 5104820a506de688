"""Tests of every request by every kind of principal: nothing is served, changed or revealed without an ACL.

The table of requests is that of the rules, so a new kind of request cannot be forgotten. A recording handler stands for
the real one. It shows which part of a request would be served, and its reply names resources that must stay hidden.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from sparklog.broker.requests.dispatch import ConnectionHandler, Handlers
from sparklog.broker.requests.slices import Slices
from sparklog.broker.security.authorized_requests import authorized_handlers, scoped_handlers
from sparklog.broker.security.authorizer import Authorizer, scope_authorizer
from sparklog.broker.security.forwarding_connections import MergingConnection, client_of
from sparklog.errors import ErrorCode
from sparklog.protocol import messages as m
from sparklog.protocol.messages import ErrorReply, Reply, Request, encode_message
from sparklog.protocol.proof import Identity
from sparklog.protocol.senders import SenderKind
from sparklog.security.acls import AclBinding, AclTable, binding
from sparklog.security.principals import ANONYMOUS, EVERYONE, Principal
from sparklog.security.request_rules import REFUSALS, RULES
from tests.broker.staged import Stage, until
from tests.security.test_request_rules import EXPECTED, HANDSHAKE

ANNA, BERT, ADMIN = Principal("User", "anna"), Principal("User", "bert"), Principal("User", "admin")
#: What the wrong user may do: everything, on resources with other names.
ELSEWHERE = [
    binding(kind, name, str(BERT), "all", pattern_type="prefixed")
    for kind, name in (("topic", "else"), ("group", "else"), ("transactionalid", "else"))
]
#: Names that replies have and requests do not.
SECRETS = (b"secret-topic", b"secret-group", b"secret-key", b"secret-setting")
REQUESTS = [request for request, _ in EXPECTED if type(request) not in HANDSHAKE]
REFUSED = set(REFUSALS.values())


def _place(topic: str = "secret-topic") -> m.TopicPartitions:
    return m.TopicPartitions(topic, "id", (0,))


#: Replies to requests whose rule hides parts.
REVEALING: dict[type, Reply] = {
    m.ListGroups: m.ListGroupsReply(1, ("secret-group",), (("stable", 1),)),
    m.ListTransactions: m.ListTransactionsReply(
        1, (m.DescribedTransaction("secret-key", "open", "r", 1, 0, 0, 0, 0, ((1, 0, (("secret-topic", 0),)),)),)
    ),
    m.FindHanging: m.FindHangingReply(1, (m.FoundHangingTransaction("secret-topic", 0, 1, 0, 0, 0),)),
    m.FetchOffsets: m.FetchOffsetsReply(1, (m.GroupOffset("secret-topic", 0, 1),), (("secret-topic", 1),)),
    m.Heartbeat: m.HeartbeatReply(1, 1, (_place(),)),
    m.DescribeGroup: m.DescribeGroupReply(
        1,
        m.DescribedGroup(
            "billing", "stable", 1, (m.MemberDescription("m", "", "", "", "", 1, (), "", (_place(),), ()),)
        ),
    ),
    m.DescribeBroker: m.DescribeBrokerReply(1, 0, 1, 2, "v", "/d", "running", (), {}, {"a": "secret-setting"}),
}


class Denials:
    """A list of denied requests, in place of the audit log."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def denied(self, connection: object, request: object, operation: str, resource: str, rule: str) -> None:
        self.rules.append(rule)


@dataclass
class Connection:
    """A client's connection that keeps its replies."""

    principal: Principal
    identity: Identity | None = None
    peer_host: str = "10.0.0.1"
    peer: str = "10.0.0.1:50000"
    listener: str = "CLIENT"
    client_id: str = "test"
    within_host: bool = False
    token_id: str = ""
    server_queue: tuple[int, int] = (0, 0)
    certificates_expire_in_s: int | None = None
    writable: bool = True
    replies: list[Reply] = field(default_factory=list)
    closed: bool = False
    ended: list[int] = field(default_factory=list)

    def reply(self, message: Reply, body: object = (), body_bytes: int = -1) -> None:
        self.replies.append(message)

    def done(self, cid: int) -> None:
        self.ended.append(cid)

    def close(self) -> None:
        self.closed = True

    def pause_requests(self) -> None:
        """Do nothing: a test sends one request."""

    def resume_requests(self) -> None:
        """Do nothing: a test sends one request."""


class Recorded:
    """Handlers that record what they are to serve, and the authorizer before them."""

    def __init__(self, acls: list[AclBinding] | None, scope: list[AclBinding] | None = None) -> None:
        """Create the handlers of a broker with these ACLs, or without ACLs. ``scope`` is that of the token ``t1``."""
        self.served: list[Request] = []
        self.denials = Denials()

        def scope_of(token_id: str) -> AclTable | None:
            return AclTable(scope) if scope is not None and token_id == "t1" else None

        if acls is None:
            self.authorizer = scope_authorizer(self.denials, scope_of)
        else:
            self.authorizer = Authorizer(AclTable(super_users=frozenset({ADMIN})), self.denials, scope_of)
            self.authorizer.set_acls(self.authorizer.table.with_acls(acls))
        self.cache = Stage().context.cache
        self.slices = Slices()
        plain: Handlers = dict.fromkeys((type(request) for request in REQUESTS), self._serve)
        with_checks = scoped_handlers if acls is None else authorized_handlers
        self.handlers = with_checks(self.authorizer, plain, slices=self.slices, cache=self.cache)

    def _serve(self, connection: Any, request: Request, body: memoryview) -> None:
        self.served.append(request)
        if type(request) in REVEALING:
            connection.reply(REVEALING[type(request)])

    def send(self, connection: Connection, request: Request) -> None:
        """Give the request to its handler, as the broker does."""
        handler = ConnectionHandler(self.handlers, Counter(), cast(Any, connection), lambda lost: None)
        handler.request_received(request, memoryview(b""))


def needed(request: Request, who: Principal) -> list[AclBinding]:
    """Return one ACL for each condition of the request's rule."""
    rule = RULES[type(request)]
    needs = [clause[-1] for clause in rule.clauses(request)]
    acls = [binding(need.resource_type, need.name or "any", str(who), need.operation) for need in needs]
    if rule.entries is not None:
        operation, topics = rule.entries
        acls += [binding("topic", topic, str(who), operation) for topic in topics(request)]
    return acls


def served(
    acls: list[AclBinding] | None,
    connection: Connection,
    request: Request,
    scope: list[AclBinding] | None = None,
) -> list[Request]:
    """Return what the handler of the request is to serve."""

    async def run() -> list[Request]:
        recorded = Recorded(acls, scope)
        recorded.send(connection, request)
        return recorded.served

    return asyncio.run(run())


def _refused_codes(reply: Reply) -> list[int]:
    if isinstance(reply, ErrorReply):
        return [reply.code]
    entries = reply.topics if isinstance(reply, m.MetadataReply) else reply.results  # type: ignore[union-attr]
    return [entry.code for entry in entries]


OF_TOKENS = (m.CreateDelegationToken, m.RenewDelegationToken, m.ExpireDelegationToken)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: type(one).__name__)
class TestEveryRequest:
    @pytest.mark.parametrize("who", [ANONYMOUS, BERT], ids=["no login", "wrong user"])
    def test_is_refused_to_the_wrong_principal(self, request_: Request, who: Principal) -> None:
        connection = Connection(who)
        # Write on any topic suffices for a producer id.
        own = [] if isinstance(request_, m.InitProducerId) else ELSEWHERE
        self._check_refused(request_, served([*own, *needed(request_, ANNA)], connection, request_), connection)

    @pytest.mark.parametrize("acls", [[], None], ids=["super user", "no ACLs"])
    def test_is_refused_to_a_token_with_another_scope(self, request_: Request, acls: list[AclBinding] | None) -> None:
        connection = Connection(ADMIN, token_id="t1")
        own = [] if isinstance(request_, m.InitProducerId) else [acl._replace(principal=EVERYONE) for acl in ELSEWHERE]
        self._check_refused(request_, served(acls, connection, request_, own), connection)

    @pytest.mark.parametrize("acls", [[], None], ids=["super user", "no ACLs"])
    def test_is_served_to_a_token_with_the_right_scope(self, request_: Request, acls: list[AclBinding] | None) -> None:
        found = served(acls, Connection(ADMIN, token_id="t1"), request_, needed(request_, EVERYONE))
        everything = isinstance(request_, m.Metadata) and request_.topics is None
        assert found == [m.Metadata(1, ()) if everything else request_]

    def _check_refused(self, request_: Request, found: list[Request], connection: Connection) -> None:
        rule = RULES[type(request_)]
        if list(rule.clauses(request_)):
            assert found == []
        elif rule.entries is not None and list(rule.entries[1](request_)) and not isinstance(request_, m.Fetch):
            assert all(not list(rule.entries[1](one)) for one in found), "no entry is served"
        else:
            # The reads of a fetch are checked later. A token is its owner's, which its handlers check.
            assert rule.hides or isinstance(request_, (m.Fetch, *OF_TOKENS))
            assert not any(secret in encode_message(reply) for reply in connection.replies for secret in SECRETS)
            return
        if isinstance(request_, m.Metadata):
            return  # the recording handler sends no reply that could have the refusals
        [reply] = connection.replies
        codes = _refused_codes(reply)
        assert codes
        assert set(codes) <= REFUSED

    def test_is_served_to_the_right_principal(self, request_: Request) -> None:
        connection = Connection(ANNA)
        found = served(needed(request_, ANNA), connection, request_)
        if isinstance(request_, m.Metadata) and request_.topics is None:
            assert found == [m.Metadata(1, ())], "it may describe no topic"
        else:
            assert found == [request_]
        assert not any(isinstance(reply, ErrorReply) and reply.code != 29 for reply in connection.replies)

    def test_needs_every_single_condition(self, request_: Request) -> None:
        acls = needed(request_, ANNA)
        for missing in acls if list(RULES[type(request_)].clauses(request_)) else []:
            connection = Connection(ANNA)
            found = served([acl for acl in acls if acl != missing], connection, request_)
            assert found != [request_], missing

    @pytest.mark.parametrize("how", ["super user", "proved broker"])
    def test_is_served_to_super_users_and_brokers(self, request_: Request, how: str) -> None:
        identity = Identity(SenderKind.BROKER, 1, 1) if how == "proved broker" else None
        connection = Connection(ANONYMOUS if identity else ADMIN, identity)
        assert served([binding("topic", "*", "User:*", "all", permission="deny")], connection, request_) == [request_]
        assert connection.replies == ([REVEALING[type(request_)]] if type(request_) in REVEALING else [])


def test_an_error_hides_the_rule_and_whether_the_resource_exists() -> None:
    details = set()
    for topic in ("t", "missing"):
        connection = Connection(BERT)
        served(ELSEWHERE, connection, m.DeleteTopic(1, topic, 100))
        [reply] = connection.replies
        assert isinstance(reply, ErrorReply)
        assert reply.code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        details.add(reply.detail.replace(f"'{topic}'", "''"))
    assert details == {"User:bert may not Delete on Topic ''"}


def test_the_log_of_denials_gets_the_rule() -> None:
    async def run() -> list[str]:
        recorded = Recorded([*ELSEWHERE, binding("group", "billing", "User:bert", "read", permission="deny")])
        recorded.send(Connection(BERT), m.CommitOffsets(1, "billing", ()))
        recorded.send(Connection(BERT), m.DeleteGroup(1, "billing"))
        return recorded.denials.rules

    assert asyncio.run(run()) == [
        "an ACL denies User:bert Read on Group 'billing' from any host",
        "no ACL allows User:bert Delete on Group 'billing' from 10.0.0.1",
    ]


def test_entries_are_served_separately() -> None:
    connection = Connection(BERT)
    asked = tuple(m.ListOffsetsPartition(topic, 0, -1) for topic in ("else-1", "orders", "else-2"))
    [found] = served(ELSEWHERE, connection, m.ListOffsets(1, 0, asked))
    assert isinstance(found, m.ListOffsets)
    assert found.partitions == (asked[0], asked[2])


def test_offsets_of_refused_topics_are_refused_one_by_one() -> None:
    """As in Kafka, a refused topic gets its own error, and the request does not fail for the other topics."""
    connection = Connection(BERT)
    acls = [*ELSEWHERE, binding("group", "billing", "User:bert", "describe")]
    asked = (("else-1", 0), ("orders", 0), ("missing", 2), ("else-2", 0))
    [found] = served(acls, connection, m.FetchOffsets(1, "billing", asked))
    assert isinstance(found, m.FetchOffsets) and found.partitions == (asked[0], asked[3])
    [reply] = connection.replies
    assert isinstance(reply, m.FetchOffsetsReply) and reply.offsets == (), "and no offset of another topic"
    detail = "User:bert may not Describe on Topic"
    assert reply.refused == (
        m.PartitionResult("orders", 0, 29, f"{detail} 'orders'"),
        m.PartitionResult("missing", 2, 29, f"{detail} 'missing'"),
    )
    connection = Connection(BERT)
    assert served(acls, connection, m.FetchOffsets(1, "billing", asked[1:2])) == []
    assert connection.replies == [m.FetchOffsetsReply(1, (), refused=reply.refused[:1])]


def test_a_refused_produce_without_acks_closes_the_connection() -> None:
    for transaction in ("", "sink"):
        connection = Connection(BERT)
        request = m.Produce(7, 0, 100, (m.ProducePartition("orders", 0, "", 0, 0),), transaction)
        assert served(ELSEWHERE, connection, request) == []
        assert (connection.replies, connection.ended, connection.closed) == ([], [7], True)


def test_requests_wait_until_the_acls_are_read() -> None:
    async def run() -> tuple[Connection, Connection]:
        recorded = Recorded([])
        recorded.authorizer._loaded = False
        user, admin = Connection(BERT), Connection(ADMIN)
        for connection in (user, admin):
            recorded.send(connection, m.DescribeBroker(1))
        return user, admin

    user, admin = asyncio.run(run())
    [reply] = user.replies
    assert isinstance(reply, ErrorReply)
    assert reply.code == ErrorCode.BROKER_NOT_AVAILABLE, "the client repeats the request"
    assert isinstance(admin.replies[0], m.DescribeBrokerReply)


# --- real handlers ---


def staged(acls: list[AclBinding], request: Request, *, who: Principal = ANNA) -> Reply:
    """Return the reply of a broker that leads partition 0 of topic ``t``."""

    async def run() -> Reply:
        stage = Stage(settings={"super.users": "User:admin"})
        assert stage.broker.authorizer is not None
        stage.broker.authorizer.set_acls(stage.broker.authorizer.table.with_acls(acls))
        connection = Connection(who)
        handler = ConnectionHandler(stage.handlers, stage.context.counters, cast(Any, connection), lambda lost: None)
        handler.request_received(request, memoryview(b""))
        await until(lambda: connection.replies)
        [reply] = connection.replies
        await stage.context.end_tasks()
        return reply

    return asyncio.run(run())


MINE = [binding("topic", "t", "User:anna", "all")]


def test_metadata_names_only_topics_that_the_principal_may_describe() -> None:
    for acls, expected in (([], []), (MINE, ["t"]), ([binding("topic", "*", "User:anna", "read")], ["t"])):
        reply = staged(acls, m.Metadata(1, None, internal=True))
        assert isinstance(reply, m.MetadataReply)
        assert [topic.name for topic in reply.topics] == expected
    reply = staged([], m.Metadata(1, None, internal=True), who=ADMIN)
    assert isinstance(reply, m.MetadataReply)
    assert len(reply.topics) == 2, "the super user sees the internal topic too"


def test_tokens_are_listed_with_acls() -> None:
    assert staged([], m.DescribeDelegationTokens(1)) == m.DescribeDelegationTokensReply(1, ())


def test_metadata_of_a_named_topic_hides_whether_it_exists() -> None:
    reply = staged(MINE, m.Metadata(1, ("t", "__transactions", "missing")))
    assert isinstance(reply, m.MetadataReply)
    codes = {topic.name: topic.code for topic in reply.topics}
    refused = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert codes == {"t": ErrorCode.NONE, "__transactions": refused, "missing": refused}
    assert [topic.topic_id for topic in reply.topics if topic.code] == ["", ""]


def test_the_start_of_a_metadata_page_may_have_been_hidden_meanwhile() -> None:
    for start in (("a", 0), ("t", 0), ("u", 0)):
        reply = staged(MINE, m.Metadata(1, None, start=start))
        assert isinstance(reply, m.MetadataReply)
        assert [topic.name for topic in reply.topics] == (["t"] if start[0] <= "t" else [])


def fetched(acls: list[AclBinding], topic: str) -> m.FetchedPartition:
    partition = m.FetchPartition(topic, 0, "", -1, 99, 100)
    reply = staged(acls, m.Fetch(1, m.CONSUMER, -1, 0, 1, 100, 0, 0, -1, (partition,)))
    assert isinstance(reply, m.FetchReply)
    return reply.partitions[0]


def test_a_fetch_reads_only_topics_that_the_principal_may_read() -> None:
    for topic in ("t", "missing"):
        refused = fetched([binding("topic", "*", "User:anna", "describe")], topic)
        assert refused == m.FetchedPartition(
            topic,
            0,
            ErrorCode.TOPIC_AUTHORIZATION_FAILED,
            -1,
            -1,
            -1,
            -1,
            detail=f"User:anna may not Read on Topic '{topic}'",
        )
    allowed = fetched([binding("topic", "*", "User:anna", "read")], "missing")
    assert allowed.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_offsets_are_listed_only_with_describe() -> None:
    asked = tuple(m.ListOffsetsPartition(topic, 0, m.LATEST) for topic in ("missing", "t"))
    reply = staged([], m.ListOffsets(1, 0, asked))
    assert isinstance(reply, m.ListOffsetsReply)
    assert {(result.code, result.offset) for result in reply.results} == {(ErrorCode.TOPIC_AUTHORIZATION_FAILED, -1)}


def test_a_client_cannot_fetch_as_a_follower() -> None:
    reply = staged(MINE, m.Fetch(1, 2, 1, 0, 1, 100, 0, 0, -1, (m.FetchPartition("t", 0, "", -1, 0, 100),)))
    assert isinstance(reply, ErrorReply)
    assert reply.code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_acls_are_shown_only_with_describe_on_the_cluster() -> None:
    assert isinstance(staged(MINE, m.DescribeAcls(1)), ErrorReply)
    acls = [*MINE, binding("cluster", "sparklog-cluster", "User:anna", "describe")]
    reply = staged(acls, m.DescribeAcls(1))
    assert isinstance(reply, m.DescribeAclsReply)
    assert len(reply.acls) == 2
    assert reply.super_users == ("User:admin",)


def test_a_broker_without_super_users_has_no_authorizer() -> None:
    async def run() -> tuple[Stage, Connection]:
        stage = Stage()
        connection = Connection(ANONYMOUS)
        handler = ConnectionHandler(stage.handlers, stage.context.counters, cast(Any, connection), lambda lost: None)
        handler.request_received(m.DescribeAcls(1), memoryview(b""))
        return stage, connection

    stage, connection = asyncio.run(run())
    assert stage.broker.authorizer is None
    assert stage.handlers[m.Fetch] == stage.broker.fetches.handle, "requests take the path without checks"
    [reply] = connection.replies
    assert isinstance(reply, ErrorReply)
    assert reply.code == ErrorCode.SECURITY_DISABLED


def test_a_forwarding_connection_is_charged_as_its_client() -> None:
    client = Connection(ANNA)
    merging = MergingConnection(cast(Any, client), lambda reply: reply)
    assert client_of(merging) is client
    assert client_of(client) is client


NAMES = tuple(f"orders-{number}" for number in range(10_000))


@pytest.mark.parametrize(
    "request_",
    [
        m.ListOffsets(1, 0, tuple(m.ListOffsetsPartition(name, 0, -1) for name in NAMES)),
        m.Heartbeat(1, "billing", "m", 0, 1, topics=NAMES),
    ],
    ids=lambda one: type(one).__name__,
)
def test_many_names_are_checked_in_slices(request_: Request) -> None:
    async def test() -> None:
        acls = [binding("group", "billing", str(ANNA), "read")]
        if isinstance(request_, m.Heartbeat):
            acls.append(binding("topic", "orders", str(ANNA), "describe", pattern_type="prefixed"))
        recorded, connection = Recorded(acls), Connection(ANNA)
        recorded.slices.over = itertools.cycle([*[False] * 999, True]).__next__  # type: ignore[method-assign]
        recorded.send(connection, request_)
        assert not connection.replies and not recorded.served
        await until(lambda: bool(connection.replies))

    asyncio.run(test())


def test_too_many_offsets_are_refused_before_their_topics_are_checked() -> None:
    offsets = tuple(m.GroupOffset(f"orders-{number}", 0, 1) for number in range(10_001))
    recorded, connection = Recorded([binding("group", "billing", str(ANNA), "read")]), Connection(ANNA)
    recorded.send(connection, m.CommitOffsets(1, "billing", offsets))
    [reply] = connection.replies
    assert isinstance(reply, ErrorReply) and reply.code == ErrorCode.INVALID_REQUEST
    assert not recorded.denials.rules
