"""Tests of ACLs: the rules of Kafka's model, and random tables against a simple search through all ACLs."""

from __future__ import annotations

import ipaddress
import random
from typing import SupportsIndex

import pytest

from sparklog.errors import ConfigError
from sparklog.security.acls import (
    ANY,
    CLUSTER_ALIAS,
    CLUSTER_NAME,
    OPERATIONS,
    AclBinding,
    AclFilter,
    AclTable,
    Operation,
    PatternType,
    Permission,
    ResourcePattern,
    ResourceType,
    binding,
)
from sparklog.security.principals import EVERYONE, Principal

ANNA, BERT = Principal("User", "anna"), Principal("User", "bert")
HOST = "10.1.2.3"
TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP
READ, WRITE, DESCRIBE = Operation.READ, Operation.WRITE, Operation.DESCRIBE
DENY = Permission.DENY


def allows(table: AclTable, operation: Operation, name: str, *, who: Principal = ANNA, host: str = HOST) -> bool:
    return table.decide(who, host, operation, TOPIC, name).allowed


# --- the rules, one by one ---


def test_nothing_is_allowed_without_an_acl() -> None:
    decision = AclTable().decide(ANNA, HOST, WRITE, TOPIC, "orders")
    assert decision == (False, "no ACL allows User:anna Write on Topic 'orders' from 10.1.2.3")


def test_an_acl_allows_its_principal_operation_and_resource_only() -> None:
    table = AclTable([binding("topic", "orders", "User:anna", "write")])
    decision = table.decide(ANNA, HOST, WRITE, TOPIC, "orders")
    assert decision == (True, "an ACL allows User:anna Write on Topic 'orders' from any host")
    assert not allows(table, WRITE, "orders", who=BERT)
    assert not allows(table, WRITE, "orders2")
    assert not allows(table, READ, "orders")
    assert not table.decide(ANNA, HOST, WRITE, GROUP, "orders").allowed


def test_a_denying_acl_wins_over_every_allowing_one() -> None:
    for denied in ("orders", "ord", ANY):
        kind = "prefixed" if denied == "ord" else "literal"
        deny = binding("topic", denied, "User:*", "write", permission="deny", pattern_type=kind)
        table = AclTable([binding("topic", "orders", "User:anna", "all"), deny])
        decision = table.decide(ANNA, HOST, WRITE, TOPIC, "orders")
        assert not decision.allowed
        assert decision.rule.startswith("an ACL denies User:* Write on ")
        assert allows(table, READ, "orders"), "another operation is not denied"


@pytest.mark.parametrize("operation", ["read", "write", "delete", "alter", "all"])
def test_reading_and_changing_imply_describing(operation: str) -> None:
    table = AclTable([binding("topic", "orders", "User:anna", operation)])
    assert allows(table, DESCRIBE, "orders")
    assert allows(table, Operation.DESCRIBE_CONFIGS, "orders") is (operation == "all")


def test_altering_configs_implies_describing_them() -> None:
    table = AclTable([binding("topic", "orders", "User:anna", "AlterConfigs")])
    assert allows(table, Operation.DESCRIBE_CONFIGS, "orders")
    assert not allows(table, DESCRIBE, "orders")


def test_a_denied_operation_implies_nothing() -> None:
    denied = binding("topic", "orders", "User:anna", "read", permission="deny")
    table = AclTable([binding("topic", "orders", "User:anna", "describe"), denied])
    assert allows(table, DESCRIBE, "orders")


def test_prefixes_and_the_star_match_as_in_kafka() -> None:
    table = AclTable(
        [
            binding("topic", "ord", "User:anna", "read", pattern_type="prefixed"),
            binding("topic", ANY, "User:bert", "read"),
        ]
    )
    assert allows(table, READ, "ord")
    assert allows(table, READ, "orders")
    assert not allows(table, READ, "or")
    assert allows(table, READ, "anything", who=BERT)


def test_the_star_never_allows_internal_topics() -> None:
    star = binding("topic", ANY, "User:anna", "all")
    assert not allows(AclTable([star]), READ, "__consumer_offsets")
    named = binding("topic", "__consumer_offsets", "User:anna", "read")
    assert allows(AclTable([star, named]), READ, "__consumer_offsets")
    denying = binding("topic", ANY, "User:anna", "read", permission="deny")
    assert not allows(AclTable([named, denying]), READ, "__consumer_offsets")


def test_everyone_is_allowed_only_where_no_acl_exists() -> None:
    table = AclTable([binding("topic", "orders", "User:bert", "read")], allow_everyone_if_no_acl_found=True)
    assert allows(table, READ, "other")
    assert not allows(table, READ, "orders")
    assert not allows(table, READ, "__consumer_offsets")


def test_a_super_user_passes_every_denying_acl() -> None:
    table = AclTable([binding("topic", ANY, "User:*", "all", permission="deny")], super_users=frozenset({ANNA}))
    assert table.decide(ANNA, HOST, WRITE, TOPIC, "orders") == (True, "User:anna is a super user")
    assert not allows(table, WRITE, "orders", who=BERT)


@pytest.mark.parametrize(
    ("rule", "host", "included"),
    [
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "10.1.2.4", False),
        ("10.0.0.0/8", "10.255.0.1", True),
        ("10.0.0.0/8", "11.0.0.1", False),
        ("10.0.0.0/8", "::ffff:10.1.2.3", True),
        ("10.1.2.3", "::ffff:10.1.2.3", True),
        ("fd00::/8", "fd00::1", True),
        ("fd00::/8", "10.1.2.3", False),
        ("10.0.0.0/8", "local", False),
        ("*", "local", True),
    ],
)
def test_the_host_of_an_acl_is_an_address_or_network(rule: str, host: str, included: bool) -> None:
    table = AclTable([binding("topic", "orders", "User:anna", "read", host=rule)])
    assert allows(table, READ, "orders", host=host) is included


def test_an_acl_may_use_either_name_of_the_cluster() -> None:
    for name in (CLUSTER_NAME, CLUSTER_ALIAS, ANY):
        table = AclTable([binding("cluster", name, "User:anna", "alter")])
        assert table.decide(ANNA, HOST, DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME).allowed


def test_any_topic_is_allowed_unless_all_are_denied() -> None:
    allow = binding("topic", "orders", "User:anna", "write", pattern_type="prefixed")

    def decide(*acls: AclBinding) -> bool:
        return AclTable(acls).decide_any(ANNA, HOST, WRITE, TOPIC).allowed

    def denied(name: str, kind: str) -> AclBinding:
        return binding("topic", name, "User:*", "write", permission="deny", pattern_type=kind)

    assert decide(allow)
    assert not decide()
    assert not decide(allow, denied("ord", "prefixed"))
    assert not decide(allow, denied(ANY, "literal"))
    assert decide(allow, denied("orders.eu", "prefixed"))
    assert decide(allow, denied("orders", "literal"))
    assert AclTable(super_users=frozenset({ANNA})).decide_any(ANNA, HOST, WRITE, TOPIC).allowed


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("queue", "x", "User:a", "read"), "resource type 'queue'"),
        (("topic", "", "User:a", "read"), "0 characters"),
        (("topic", "x" * 2000, "User:a", "read"), "2000 characters"),
        (("topic", "x", "anna", "read"), "User:anna"),
        (("topic", "x", "User:a", "fly"), "operation 'fly'"),
        (("group", "x", "User:a", "write"), "expected All, Delete, Describe, Read"),
        (("cluster", "my-cluster", "User:a", "alter"), "sparklog-cluster"),
    ],
)
def test_an_impossible_acl_is_refused(parts: tuple[str, str, str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        binding(*parts)


def test_a_name_is_refused_as_the_host() -> None:
    with pytest.raises(ConfigError, match="expected an address, a network or"):
        binding("topic", "x", "User:a", "read", host="db.example.org")


def test_a_filter_selects_by_each_part() -> None:
    prefixed = binding("topic", "ord", "User:anna", "read", pattern_type="prefixed")
    literal = binding("topic", "orders", "User:anna", "read")
    star = binding("topic", ANY, "User:bert", "read", permission="deny")
    acls = [prefixed, literal, star, binding("group", "orders", "User:anna", "read")]

    def accepted(condition: AclFilter) -> list[AclBinding]:
        return [acl for acl in acls if condition.accepts(acl)]

    assert accepted(AclFilter()) == acls
    assert accepted(AclFilter(TOPIC, "orders")) == [literal]
    assert accepted(AclFilter(TOPIC, "orders", matching=True)) == [prefixed, literal, star]
    assert accepted(AclFilter(pattern_type=PatternType.PREFIXED)) == [prefixed]
    assert accepted(AclFilter(principal=BERT)) == [star]
    assert accepted(AclFilter(permission=DENY)) == [star]
    assert accepted(AclFilter(operation=WRITE)) == []


# --- the whole table against a simple search ---

_NAMES = ("a", "ab", "abc", "abd", "b", "ba", "__ab", "__x", "kafka-cluster")
_PREFIXES = ("a", "ab", "abc", "b", "_", "__", "__a")
_PRINCIPALS = (ANNA, BERT, EVERYONE)
_RULE_HOSTS = (ANY, "10.1.2.3", "10.0.0.0/8", "192.168.0.0/16")
_HOSTS = ("10.1.2.3", "10.9.9.9", "192.168.1.1", "local")


def searched(
    acls: list[AclBinding], asked: tuple[Principal, str, Operation, ResourceType, str], *, everyone: bool
) -> bool:
    """Decide as KIP-11 and KIP-290 say it, by a search through all ACLs."""
    who, host, operation, kind, name = asked

    def of_resource(acl: AclBinding) -> bool:
        pattern = acl.pattern
        if pattern.resource_type != kind:
            return False
        if pattern.pattern_type == "Prefixed":
            return name[: len(pattern.name)] == pattern.name
        return pattern.name in {"*", name}

    def of_host(acl: AclBinding) -> bool:
        if acl.host == "*":
            return True
        return host != "local" and ipaddress.ip_address(host) in ipaddress.ip_network(acl.host)

    internal = kind == "Topic" and name.startswith("__")
    there = [acl for acl in acls if of_resource(acl)]
    concerned = [acl for acl in there if acl.principal in (who, EVERYONE) and of_host(acl)]
    if any(acl.permission == "Deny" and acl.operation in (operation, "All") for acl in concerned):
        return False
    implying = {operation, "All"}
    if operation == "Describe":
        implying |= {"Read", "Write", "Delete", "Alter"}
    if operation == "DescribeConfigs":
        implying |= {"AlterConfigs"}
    for acl in concerned:
        if acl.permission == "Allow" and acl.operation in implying and not (internal and acl.pattern.name == "*"):
            return True
    return everyone and not there and not internal


def some_acl(rng: random.Random) -> AclBinding:
    kind = rng.choice((TOPIC, TOPIC, GROUP, ResourceType.CLUSTER))
    prefixed = kind is not ResourceType.CLUSTER and rng.random() < 0.4
    name = rng.choice(_PREFIXES if prefixed else (*_NAMES, ANY))
    pattern = ResourcePattern(kind, name, PatternType.PREFIXED if prefixed else PatternType.LITERAL)
    operation = rng.choice([*sorted(OPERATIONS[kind]), Operation.ALL])
    permission = DENY if rng.random() < 0.25 else Permission.ALLOW
    return AclBinding(pattern, rng.choice(_PRINCIPALS), rng.choice(_RULE_HOSTS), operation, permission)


def test_every_decision_is_that_of_a_simple_search() -> None:
    rng = random.Random(4)
    allowed = 0
    for _ in range(1000):
        acls = [some_acl(rng) for _ in range(rng.randrange(25))]
        everyone = rng.random() < 0.3
        table = AclTable(acls, allow_everyone_if_no_acl_found=everyone)
        for _ in range(10):
            kind = rng.choice((TOPIC, GROUP, ResourceType.CLUSTER))
            operation = rng.choice(sorted(OPERATIONS[kind]))
            asked = (rng.choice((ANNA, BERT)), rng.choice(_HOSTS), operation, kind, rng.choice(_NAMES))
            decision = table.decide(*asked)
            assert decision.allowed is searched(acls, asked, everyone=everyone), (acls, everyone, asked, decision)
            allowed += decision.allowed
    assert 2000 < allowed < 8000, "both decisions occur often"


def test_a_decision_visits_the_matching_patterns_only() -> None:
    visited = 0

    class Counted(str):
        __slots__ = ()

        def startswith(
            self,
            prefix: str | tuple[str, ...],
            start: SupportsIndex | None = None,
            end: SupportsIndex | None = None,
        ) -> bool:
            nonlocal visited
            visited += 1
            return str.startswith(self, prefix, start, end)

    def visits(count: int) -> int:
        nonlocal visited
        others = [binding("topic", f"t{n:05d}", f"User:u{n}", "read") for n in range(count)]
        others += [binding("topic", f"p{n:05d}", f"User:u{n}", "read", pattern_type="prefixed") for n in range(count)]
        table = AclTable([*others, binding("topic", "p0", "User:anna", "write", pattern_type="prefixed")])
        visited = 0
        assert table.decide(ANNA, HOST, WRITE, TOPIC, Counted("p00010-x")).allowed
        return visited

    assert visits(1000) == visits(50) <= 5
