"""Tests of the authorizer: its settings, its cache, and that a cached decision does not visit the ACLs."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from sparklog.broker.security import authorizer as module
from sparklog.broker.security.authorizer import Authorizer, authorizer_of, scope_authorizer
from sparklog.config import broker_config
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.messages import ListGroups
from sparklog.protocol.proof import Identity
from sparklog.protocol.senders import SenderKind
from sparklog.security.acls import AclBinding, AclTable, AuthorizationResult, Operation, ResourceType, binding
from sparklog.security.principals import ANONYMOUS, Principal
from sparklog.security.request_rules import Need, on_cluster

ANNA, ADMIN = Principal("User", "anna"), Principal("User", "admin")
WRITE, TOPIC = Operation.WRITE, ResourceType.TOPIC


class Connection(NamedTuple):
    principal: Principal = ANNA
    peer_host: str = "10.0.0.1"
    listener: str = "CLIENT"
    identity: Identity | None = None
    token_id: str = ""


class Denials:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def denied(self, connection: object, request: object, operation: str, resource: str, rule: str) -> None:
        self.events.append((operation, resource, rule))


class Counted(AclTable):
    """A table that counts its decisions."""

    decisions = 0

    def decide(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> AuthorizationResult:
        self.decisions += 1
        return super().decide(principal, host, operation, resource_type, name)


def loaded(*acls: AclBinding) -> tuple[Authorizer, Counted]:
    table = Counted(acls, super_users=frozenset({ADMIN}))
    found = Authorizer(table, Denials())
    found.set_acls(table)
    return found, table


def test_a_repeated_decision_does_not_visit_the_acls() -> None:
    others = [binding("topic", f"t{number}", f"User:u{number}", "read") for number in range(1000)]
    authorizer, table = loaded(*others, binding("topic", "orders", "User:anna", "write"))
    for _ in range(50):
        assert authorizer.allows(Connection(), WRITE, TOPIC, "orders")
        assert not authorizer.allows(Connection(), WRITE, TOPIC, "other")
    assert table.decisions == 2


def test_each_principal_host_and_operation_has_its_own_decision() -> None:
    authorizer, _ = loaded(binding("topic", "orders", "User:anna", "write", host="10.0.0.1"))
    assert authorizer.allows(Connection(), WRITE, TOPIC, "orders")
    assert not authorizer.allows(Connection(peer_host="10.0.0.2"), WRITE, TOPIC, "orders")
    assert not authorizer.allows(Connection(ANONYMOUS), WRITE, TOPIC, "orders")
    assert not authorizer.allows(Connection(), Operation.READ, TOPIC, "orders")
    assert not authorizer.allows(Connection(), WRITE, ResourceType.GROUP, "orders")


def test_new_acls_replace_all_decisions() -> None:
    authorizer, table = loaded(binding("topic", "orders", "User:anna", "write"))
    assert authorizer.allows(Connection(), WRITE, TOPIC, "orders")
    authorizer.set_acls(table.with_acls([]))
    assert not authorizer.allows(Connection(), WRITE, TOPIC, "orders")
    authorizer.set_acls(table)
    assert authorizer.allows(Connection(), WRITE, TOPIC, "orders")


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CACHED", 10)
    authorizer, table = loaded()
    for number in range(35):
        authorizer.allows(Connection(), WRITE, TOPIC, f"t{number}")
    assert sum(map(len, authorizer._known.values())) <= 10
    authorizer.allows(Connection(), WRITE, TOPIC, "x" * 10_000)
    before = table.decisions
    authorizer.allows(Connection(), WRITE, TOPIC, "x" * 10_000)
    assert table.decisions == before + 1, "a name that no topic has is not kept"


def test_super_users_and_proved_peers_skip_the_acls() -> None:
    authorizer, _ = loaded()
    assert authorizer.skips(Connection(ADMIN))
    assert authorizer.skips(Connection(ANONYMOUS, identity=Identity(SenderKind.CONTROLLER, 1, 1)))
    assert not authorizer.skips(Connection())


def test_a_scope_limits_what_its_owner_may_do() -> None:
    scopes = {"t1": AclTable([binding("topic", "orders", "User:*", "write")]), "t2": None}
    table = AclTable([binding("topic", "*", "User:anna", "write")], super_users=frozenset({ADMIN}))
    authorizer = Authorizer(table, Denials(), scopes.get)
    authorizer.set_acls(table)
    for owner in (ANNA, ADMIN):
        limited, free = Connection(owner, token_id="t1"), Connection(owner, token_id="t2")
        assert authorizer.allows(limited, WRITE, TOPIC, "orders")
        assert authorizer.allows(limited, Operation.DESCRIBE, TOPIC, "orders"), "Write implies Describe"
        assert not authorizer.allows(limited, WRITE, TOPIC, "other")
        assert not authorizer.allows(limited, Operation.READ, TOPIC, "orders")
        assert authorizer.allows(free, WRITE, TOPIC, "other"), "a decision of one token is not used for another"
        assert not authorizer.skips(limited)
        assert authorizer.skips(free) is (owner == ADMIN)
    assert not authorizer.allows(Connection(ANONYMOUS, token_id="t1"), WRITE, TOPIC, "orders"), "its owner may not"
    rule = authorizer.decide(Connection(token_id="t1"), Need(WRITE, TOPIC, "other")).rule
    assert rule == "the scope of delegation token t1 does not allow Write on Topic 'other'"


def test_acls_and_scope_may_allow_different_needs_of_a_clause() -> None:
    scope = AclTable([binding("topic", "orders", "User:*", "create")])
    authorizer = Authorizer(AclTable(), Denials(), {"t1": scope}.get)
    authorizer.set_acls(AclTable([binding("cluster", "kafka-cluster", "User:anna", "create")]))

    def allows(topic: str, who: Principal = ANNA) -> bool:
        clause = (on_cluster(Operation.CREATE), Need(Operation.CREATE, TOPIC, topic))
        try:
            authorizer.require(Connection(who, token_id="t1"), ListGroups(1), [clause])
        except BrokerError:
            return False
        return True

    assert allows("orders")
    assert not allows("other"), "not in the scope"
    assert not allows("orders", ANONYMOUS), "the owner may not"


def test_a_scope_counts_without_acls() -> None:
    scope = AclTable([binding("topic", "orders", "User:*", "read")])
    authorizer = scope_authorizer(Denials(), {"t1": scope}.get)
    assert authorizer.has_scope(Connection(token_id="t1"))
    assert not authorizer.has_scope(Connection())
    assert authorizer.allows(Connection(token_id="t1"), Operation.READ, TOPIC, "orders")
    assert not authorizer.allows(Connection(token_id="t1"), Operation.READ, TOPIC, "other")
    assert not authorizer.allows(Connection(token_id="t1"), WRITE, TOPIC, None)


def test_only_one_need_of_a_clause_must_be_allowed() -> None:
    authorizer, _ = loaded(binding("topic", "orders", "User:anna", "write"))
    clause = (Need(WRITE, TOPIC, None), on_cluster(Operation.IDEMPOTENT_WRITE))
    authorizer.require(Connection(), ListGroups(1), [clause])
    with pytest.raises(BrokerError, match="may not IdempotentWrite on Cluster") as caught:
        authorizer.require(Connection(ANONYMOUS), ListGroups(1), [clause])
    assert caught.value.code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_a_super_user_enables_the_authorizer() -> None:
    def of(**settings: str) -> Authorizer | None:
        named = {key.replace("_", "."): value for key, value in settings.items()}
        return authorizer_of(broker_config(named), Denials())

    assert of() is None
    assert of(super_users="User:admin", authorizer_enable="false") is None
    found = of(super_users="User:admin;User:root")
    assert found is not None
    assert found.table.super_users == {ADMIN, Principal("User", "root")}
    with pytest.raises(ConfigError, match=r"super\.users"):
        of(authorizer_enable="true")
    with pytest.raises(ConfigError, match="User:anna"):
        of(super_users="admin")
