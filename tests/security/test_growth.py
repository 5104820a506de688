"""Tests that no message and no table of the security parts grows without a bound.

Each test does what an outsider before the login, or a user after it, can repeat with other names.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, cast, get_args

import msgspec.inspect as inspection
import pytest

import sparklog.protocol
from sparklog.broker.security import acl_requests, authorizer, user_requests
from sparklog.broker.security.acl_requests import AclRequests
from sparklog.broker.security.authorizer import Authorizer
from sparklog.broker.security.user_requests import UserRequests
from sparklog.errors import BrokerError
from sparklog.model import Principal
from sparklog.net.authentication import LoginDelays
from sparklog.net.unknown_connections import UnknownConnections
from sparklog.protocol.messages import Request
from sparklog.security.acls import AclTable, Operation, ResourceType, binding
from sparklog.security.audit import KINDS, MAX_TEXT, AuditEvent, AuditKind, AuditLimits
from sparklog.security.connection_limits import ConnectionLimits
from sparklog.security.quotas import CLIENT_QUOTAS, MAX_BUCKETS, QuotaBuckets, QuotaEntity, QuotaTable

#: The modules with messages that are about security. A message in another one is about records or the cluster.
ABOUT_SECURITY = ("security_messages", "user_messages", "acl_messages", "quota_messages", "token_messages")
#: The requests of these modules.
REQUESTS = [one for one in get_args(Request) if one.__module__.rpartition(".")[2] in ABOUT_SECURITY]
#: The longest text or byte string of such a request, and its longest list.
LONGEST = 32 * 1024
MOST = 10_000
ANNA = Principal("User", "anna")


def fields_without_bound(found: Any, path: str) -> Iterator[str]:
    match found:
        case inspection.StructType(fields=fields):
            for field in fields:
                yield from fields_without_bound(field.type, f"{path}.{field.name}")
        case inspection.UnionType(types=types) | inspection.TupleType(item_types=types):
            for one in types:
                yield from fields_without_bound(one, path)
        case inspection.StrType(max_length=most) | inspection.BytesType(max_length=most):
            if most is None or most > LONGEST:
                yield path
        case inspection.VarTupleType(item_type=item, max_length=most):
            if most is None or most > MOST:
                yield path
            yield from fields_without_bound(item, f"{path}[]")
        case inspection.DictType(key_type=key, value_type=value, max_length=most):
            if most is None or most > MOST:
                yield path
            yield from fields_without_bound(key, f"{path}[key]")
            yield from fields_without_bound(value, f"{path}[value]")
        case inspection.Metadata(type=one):
            yield from fields_without_bound(one, path)
        case _:
            plain = (inspection.IntType, inspection.BoolType, inspection.FloatType, inspection.NoneType)
            assert isinstance(found, plain), f"{path}: {found}"


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: message.__name__)
def test_every_field_of_a_security_request_has_a_bound(message: type) -> None:
    assert not list(fields_without_bound(inspection.type_info(message), message.__name__))


def test_every_module_about_security_is_checked() -> None:
    there = {module.name for module in pkgutil.iter_modules(sparklog.protocol.__path__)}
    modules = there & set(ABOUT_SECURITY)
    for module in modules:
        importlib.import_module(f"sparklog.protocol.{module}")
    assert {one.__module__.rpartition(".")[2] for one in REQUESTS} == modules


def test_failed_logins_of_many_addresses_are_forgotten() -> None:
    delays = LoginDelays(max_addresses=100)
    for number in range(1000):
        delays.failed(f"10.0.{number // 250}.{number % 250}", 1.0)
        delays.succeeded("10.0.0.1", 1.0, f"user-{number}")
    assert len(delays) == 2 * 100


def test_lines_of_many_kinds_are_counted_together() -> None:
    limits = AuditLimits()
    for number in range(3 * KINDS):
        for kind in (AuditKind.DENIAL, AuditKind.LOGIN):
            limits.admit(
                AuditEvent(
                    event=kind,
                    principal=f"User:{number}" + "p" * 1000,
                    address=f"10.0.{number // 250}.{number % 250}",
                    allowed=False,
                    resource=f"Topic:{number}" + "t" * 10_000,
                    rule="r" * 10_000,
                ),
                1.0,
            )
    assert len(limits) <= 2 * (KINDS + 1)
    assert all(len(event.resource) <= MAX_TEXT for event in limits.end_all())


def test_client_ids_share_buckets_beyond_the_limit() -> None:
    table = QuotaTable({QuotaEntity(client_id=""): dict.fromkeys(CLIENT_QUOTAS, 5.0)})
    for name in CLIENT_QUOTAS:
        buckets = QuotaBuckets(name, window_s=1)
        for number in range(MAX_BUCKETS + 1000):
            limit = table.limit(name, user="anna", client_id=f"c{number}")
            assert limit is not None
            buckets.bucket(limit, 1.0).charge(100, 1.0)
        assert len(buckets) <= MAX_BUCKETS + len(table.quotas)


def test_refused_connections_leave_no_count() -> None:
    limits = ConnectionLimits(per_address=1, per_user=1, window_s=1)
    for number in range(1000):
        address = f"10.0.{number // 250}.{number % 250}"
        limits.admit(number, address=address, principal=ANNA, within_host=False, now_s=1.0)
        limits.leave(number)
    assert len(limits) == 0


def test_closed_connections_leave_no_address() -> None:
    class Connection:
        def __init__(self, number: int) -> None:
            self.peer_host = f"10.0.{number // 250}.{number % 250}"

    unknown = UnknownConnections[Connection]()
    connections = [Connection(number) for number in range(1000)]
    for one in connections:
        unknown.add(one)
    for one in connections:
        unknown.discard(one)
    assert len(unknown) == 0 and unknown.loser is None
    assert unknown.origins == 0


def test_decisions_about_many_resources_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    class Requester:
        principal, peer_host, listener, identity, token_id = ANNA, "10.0.0.1", "CLIENT", None, ""

    monkeypatch.setattr(authorizer, "MOST_CACHED", 100)
    decides = Authorizer(AclTable(), cast(Any, None))
    decides.set_acls(AclTable())
    for number in range(1000):
        assert not decides.allows(Requester(), Operation.WRITE, ResourceType.TOPIC, f"t{number}")
        assert decides.cached <= 100


def test_a_cluster_has_a_limited_number_of_acls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acl_requests, "MOST_ACLS", 2)
    acls = [binding("Topic", name, "User:anna", "Write") for name in "abc"]
    decides = Authorizer(AclTable(acls[:2]), cast(Any, None))
    requests = AclRequests(cast(Any, None), decides, cast(Any, None))
    requests.check_count(acls[:2])
    with pytest.raises(BrokerError, match="3 ACLs, at most 2"):
        requests.check_count(acls[2:])


def test_a_cluster_has_a_limited_number_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    class Users:
        count = 3

        def has(self, name: str) -> bool:
            return name == "anna"

    monkeypatch.setattr(user_requests, "MOST_USERS", 5)
    requests = UserRequests(cast(Any, None), cast(Any, Users()), cast(Any, None))
    requests.check_count("anna", 100)
    requests.check_count("bert", 1)
    with pytest.raises(BrokerError, match="at most 5"):
        requests.check_count("bert", 2)
