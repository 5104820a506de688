"""Tests of the rules of requests: every kind of request has one, which names its sender and the operations that Kafka
asks for."""

from __future__ import annotations

import typing

import pytest

from sparklog.protocol import messages as m
from sparklog.protocol.messages import GroupOffset, Request
from sparklog.protocol.senders import SenderKind
from sparklog.security.acls import OPERATIONS, Operation, ResourceType
from sparklog.security.request_rules import CLUSTER_ACTION, REFUSALS, RULES, Need, sender_of

#: The requests that a connection handles itself, before and during a login.
HANDSHAKE = {m.Hello, m.Prove, m.SaslAuthenticate, m.RequestUnixSocket}
#: The handlers check whether the principal is the token's owner or a renewer.
BY_OWNER = {m.CreateDelegationToken, m.RenewDelegationToken, m.ExpireDelegationToken}
OFFSET = GroupOffset("orders", 0, 5)
FETCHED = m.FetchPartition("orders", 0, "", -1, 0, 100)


def needs(request: Request) -> list[str]:
    """Return the rule's conditions for this request as text; those of its entries come last."""
    rule = RULES[type(request)]
    found = [" or ".join(map(str, clause)) for clause in rule.clauses(request)]
    if rule.entries is not None:
        operation, topics = rule.entries
        found += [f"entry: {operation} on {topic}" for topic in topics(request)]
    return found


CLUSTER = "on Cluster 'kafka-cluster'"
KEY, GROUP, TOPIC = "on TransactionalId 'sink'", "on Group 'billing'", "on Topic 'orders'"
EXPECTED: list[tuple[Request, list[str]]] = [
    (m.Hello(1, 1, 1, "me"), []),
    (m.Prove(1, b""), []),
    (m.SaslAuthenticate(1, "SCRAM-SHA-512", b""), []),
    (m.RequestUnixSocket(1), []),
    (m.RequestLocalReads(1, ("orders", "orders")), [f"Read {TOPIC}"]),
    (m.Metadata(1), []),
    (m.Metadata(1, ("orders", "other")), ["entry: Describe on orders", "entry: Describe on other"]),
    (m.Produce(1, 1, 100, (m.ProducePartition("orders", 0, "", 0, 0),)), ["entry: Write on orders"]),
    (m.Produce(1, 1, 100, (), "sink"), [f"Write {KEY}"]),
    (m.Fetch(1, m.CONSUMER, -1, 0, 0, 1, 0, 0, -1, (FETCHED,)), ["entry: Read on orders"]),
    (m.Fetch(1, 2, 1, 0, 0, 1, 0, 0, -1, (FETCHED,)), [f"ClusterAction {CLUSTER}"]),
    (m.ListOffsets(1, 0, (m.ListOffsetsPartition("orders", 0, -1),)), ["entry: Describe on orders"]),
    (m.InitProducerId(1), [f"Write on Topic any or IdempotentWrite {CLUSTER}"]),
    (m.InitProducerId(1, "sink"), [f"Write {KEY}"]),
    (m.FindCoordinator(1, "group", "billing"), [f"Describe {GROUP}"]),
    (m.FindCoordinator(1, "transaction", "sink"), [f"Describe {KEY}"]),
    (m.BeginTransaction(1, "sink", "run", 0, 100), [f"Write {KEY}"]),
    (m.SettleVersion(1, "sink", "run"), [f"Write {KEY}"]),
    (
        m.AddToTransaction(1, "sink", "run", 1, 0, (("orders", 0), ("orders", 1)), "billing", (OFFSET,)),
        [f"Write {KEY}", f"Read {GROUP}", f"Write {TOPIC}", f"Read {TOPIC}"],
    ),
    (m.TouchTransaction(1, "sink", "run"), [f"Write {KEY}"]),
    (m.EndTransaction(1, "sink", "run", 0, True, (), 100), [f"Write {KEY}"]),
    (m.ListTransactions(1), []),
    (m.AbortTransaction(1, "sink"), [f"Write {KEY}"]),
    (m.VerifyTransaction(1, "sink", 1, 0, "orders", 0), [f"ClusterAction {CLUSTER}"]),
    (m.ListParticipants(1, (1,)), [f"ClusterAction {CLUSTER}"]),
    (m.FindHanging(1, 100), []),
    (m.AbortHanging(1, "orders", 0, 1), [f"Alter {CLUSTER}"]),
    (m.WriteMarkers(1, ()), [f"ClusterAction {CLUSTER}"]),
    (m.CommitOffsets(1, "billing", (OFFSET,)), [f"Read {GROUP}", "entry: Read on orders"]),
    (m.CommitOffsets(1, "billing", (OFFSET,), ("sink", 1)), [f"ClusterAction {CLUSTER}"]),
    (
        m.FetchOffsets(1, "billing", (("orders", 0), ("other", 1))),
        [f"Describe {GROUP}", "entry: Describe on orders", "entry: Describe on other"],
    ),
    (m.FetchOffsets(1, "billing"), [f"Describe {GROUP}"]),
    (
        m.HoldOffsets(1, "billing", "sink", 1, (OFFSET,), "me", 1),
        [f"Write {KEY}", f"Read {GROUP}", f"Read {TOPIC}"],
    ),
    (m.ListGroups(1), []),
    (m.Heartbeat(1, "billing", "me", 0, 1, (), ("orders",)), [f"Read {GROUP}", f"Describe {TOPIC}"]),
    (m.DescribeGroup(1, "billing"), [f"Describe {GROUP}"]),
    (m.DeleteGroup(1, "billing"), [f"Delete {GROUP}"]),
    (m.CreateTopic(1, "orders", 1, 1, 100), [f"Create {CLUSTER} or Create {TOPIC}"]),
    (m.DeleteTopic(1, "orders", 100), [f"Delete {TOPIC}"]),
    (m.CreatePartitions(1, "orders", 2, 100), [f"Alter {TOPIC}"]),
    (m.AddColumns(1, "orders", b"", 100), [f"Alter {TOPIC}"]),
    (m.AlterTopic(1, "orders", {}, (), 100), [f"AlterConfigs {TOPIC}"]),
    (m.DeleteRecords(1, (m.DeleteRecordsPartition("orders", 0, 1),)), ["entry: Delete on orders"]),
    (m.RestoreRecords(1, "orders", 0, "", 1, 0, 100), [f"Write {TOPIC}", f"Alter {TOPIC}"]),
    (m.AlterReassignments(1, (), 100), [f"Alter {CLUSTER}"]),
    (m.ListReassignments(1), [f"Describe {CLUSTER}"]),
    (m.AlterClientQuotas(1, (), 100), [f"AlterConfigs {CLUSTER}"]),
    (m.DescribeClientQuotas(1), [f"DescribeConfigs {CLUSTER}"]),
    (m.ElectLeaders(1, "preferred", 100), [f"Alter {CLUSTER}"]),
    (m.RestartBroker(1, 1), [f"Alter {CLUSTER}"]),
    (m.ListSetAside(1), [f"Describe {CLUSTER}"]),
    (m.RestoreSetAside(1, "id", 100), [f"Alter {CLUSTER}"]),
    (m.RemoveSetAside(1, ()), [f"Alter {CLUSTER}"]),
    (m.DescribeBroker(1), [f"Describe {CLUSTER}"]),
    (m.CreateAcls(1, ()), [f"Alter {CLUSTER}"]),
    (m.DescribeAcls(1), [f"Describe {CLUSTER}"]),
    (m.DeleteAcls(1, ()), [f"Alter {CLUSTER}"]),
    (m.CreateDelegationToken(1), []),
    (m.RenewDelegationToken(1, "t"), []),
    (m.ExpireDelegationToken(1, "t"), []),
    (m.DescribeDelegationTokens(1), []),
    (m.DescribeUserScramCredentials(1), [f"Describe {CLUSTER}"]),
    (m.AlterUserScramCredentials(1), [f"Alter {CLUSTER}"]),
    (m.ControlUpdate(1, "c", 1, 1, False, None, (), ()), [f"ClusterAction {CLUSTER}"]),
]


def test_every_request_has_a_rule() -> None:
    kinds = set(typing.get_args(Request))
    assert kinds == RULES.keys()
    assert kinds == {type(request) for request, _ in EXPECTED}, "and each rule is tested here"
    assert all(rule.text for rule in RULES.values())


@pytest.mark.parametrize(("request_", "expected"), EXPECTED, ids=lambda one: type(one).__name__)
def test_a_rule_names_the_operations_and_resources(request_: Request, expected: list[str]) -> None:
    assert needs(request_) == expected


def test_only_requests_of_the_handshake_need_nothing() -> None:
    free = {kind for kind, rule in RULES.items() if rule.entries is None and not rule.hides}
    free -= {type(request) for request, expected in EXPECTED if expected}
    assert free == HANDSHAKE | BY_OWNER


def test_requests_of_brokers_need_the_cluster_action() -> None:
    for request, _ in EXPECTED:
        if sender_of(request) is not SenderKind.CLIENT:
            assert list(RULES[type(request)].clauses(request)) == [CLUSTER_ACTION]


def test_only_these_requests_need_an_authenticated_sender() -> None:
    by_type = {kind.__name__: rule.sender for kind, rule in RULES.items() if rule.sender is not SenderKind.CLIENT}
    assert by_type == {
        "VerifyTransaction": SenderKind.BROKER,
        "ListParticipants": SenderKind.BROKER,
        "WriteMarkers": SenderKind.BROKER,
        "ControlUpdate": SenderKind.CONTROLLER,
    }


def test_the_content_distinguishes_followers_from_consumers() -> None:
    def fetch(replica_id: int) -> m.Fetch:
        return m.Fetch(0, replica_id, -1, 0, 1, 1, 0, 0, -1, ())

    assert [sender_of(fetch(replica_id)) for replica_id in (m.CONSUMER, 0, -2)] == [
        SenderKind.CLIENT,
        SenderKind.BROKER,
        SenderKind.BROKER,
    ]
    assert sender_of(m.CommitOffsets(0, "group", ())) is SenderKind.CLIENT
    assert sender_of(m.CommitOffsets(0, "group", (), ("key", 1))) is SenderKind.BROKER


def test_acls_can_give_every_operation_that_a_rule_needs() -> None:
    for request, _ in EXPECTED:
        rule = RULES[type(request)]
        found = [need for clause in rule.clauses(request) for need in clause]
        if rule.entries is not None:
            found.append(Need(rule.entries[0], ResourceType.TOPIC, "orders"))
        for need in found:
            assert need.operation in OPERATIONS[need.resource_type], need
            assert need.resource_type in REFUSALS


def test_an_unknown_kind_of_coordinator_is_checked_as_well() -> None:
    assert needs(m.FindCoordinator(1, "else", "sink")) == [f"Describe {KEY}"]


def test_the_prefix_of_a_transactions_key_is_no_part_of_its_name() -> None:
    assert needs(m.BeginTransaction(1, "id:sink", "run", 0, 100)) == [f"Write {KEY}"]
    assert needs(m.FindCoordinator(1, "transaction", "id:sink")) == [f"Describe {KEY}"]
    assert needs(m.FindCoordinator(1, "group", "id:sink")) == ["Describe on Group 'id:sink'"]


def test_offsets_without_a_group_need_that_group() -> None:
    request = m.AddToTransaction(1, "sink", "run", 1, 0, offsets=(OFFSET,))
    assert f"{Operation.READ} on Group ''" in needs(request)
