"""Tests of delegation tokens: how long they live, and who may renew or end them."""

from __future__ import annotations

import base64

import pytest

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import USER, Principal
from sparklog.protocol.token_messages import ScopeEntry
from sparklog.security.acls import Operation, ResourceType
from sparklog.security.delegation_tokens import (
    DelegationToken,
    checked_scope,
    ended,
    hmac_of_id,
    hmac_of_secret,
    id_of_hmac,
    new_token,
    renewed,
    renewed_by_holder,
    scope_table,
    secret_of,
    token_id_of,
)

ANNA, OTTO, OLGA = (Principal(USER, name) for name in ("anna", "otto", "olga"))
DAY = 86_400_000


def token(now_ms: int = 0) -> DelegationToken:
    return new_token("t1", ANNA, (OTTO,), now_ms, lifetime_ms=7 * DAY, expiry_ms=DAY)


def code_of(call: object, *arguments: object, **more: object) -> ErrorCode:
    with pytest.raises(BrokerError) as error:
        call(*arguments, **more)  # type: ignore[operator]
    return error.value.code


def test_a_new_token_expires_after_its_period() -> None:
    found = token(5)
    assert (found.issue_ms, found.expiry_ms, found.max_ms) == (5, DAY + 5, 7 * DAY + 5)
    assert new_token("t1", ANNA, (), 0, lifetime_ms=10, expiry_ms=DAY).expiry_ms == 10
    found.check_valid(DAY + 4)
    assert code_of(found.check_valid, DAY + 5) is ErrorCode.DELEGATION_TOKEN_EXPIRED


@pytest.mark.parametrize("principal", [ANNA, OTTO])
def test_the_owner_and_renewers_renew_a_token(principal: Principal) -> None:
    found = renewed(token(), principal, 10, period_ms=2 * DAY)
    assert found.expiry_ms == 2 * DAY + 10
    assert renewed(found, principal, DAY, period_ms=100 * DAY).expiry_ms == found.max_ms, "the latest expiry stays"


@pytest.mark.parametrize("change", [renewed, ended])
def test_no_other_principal_renews_or_ends_a_token(change: object) -> None:
    more = {"period_ms": 1} if change is renewed else {"after_ms": -1}
    assert code_of(change, token(), OLGA, 0, **more) is ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH


def test_an_expired_token_is_not_renewed() -> None:
    assert code_of(renewed, token(), ANNA, DAY, period_ms=1) is ErrorCode.DELEGATION_TOKEN_EXPIRED
    assert code_of(ended, token(), ANNA, DAY, after_ms=1) is ErrorCode.DELEGATION_TOKEN_EXPIRED


def test_a_token_is_ended_now_or_later() -> None:
    assert ended(token(), OTTO, 10, after_ms=-1) is None
    later = ended(token(), ANNA, 10, after_ms=500)
    assert later is not None and later.expiry_ms == 510
    assert ended(token(), ANNA, 2 * DAY, after_ms=-1) is None, "an expired token can be removed"


def test_a_holder_renews_a_token_up_to_its_maximum_lifetime() -> None:
    found = token()
    for now_ms in range(DAY // 2, 20 * DAY, DAY // 2):
        if now_ms >= found.expiry_ms:
            break
        found = renewed_by_holder(found, now_ms)
        assert found.expiry_ms == min(now_ms + DAY, 7 * DAY)
    assert found.expiry_ms == found.max_ms
    assert code_of(renewed_by_holder, found, 7 * DAY) is ErrorCode.DELEGATION_TOKEN_EXPIRED


def test_many_holders_that_renew_it_at_once_change_it_once() -> None:
    first = renewed_by_holder(token(), DAY // 2)
    assert renewed_by_holder(first, DAY // 2 + 1) == first
    longer = renewed(token(), ANNA, 0, period_ms=5 * DAY)
    assert renewed_by_holder(longer, DAY) == longer, "a holder never shortens a token"


def test_its_holder_does_not_renew_a_token_that_its_owner_ends() -> None:
    ending = ended(token(), ANNA, 0, after_ms=1000)
    assert ending is not None
    assert code_of(renewed_by_holder, ending, 10) is ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED


def test_a_scope_has_the_form_of_acls() -> None:
    given = [ScopeEntry("read", "topic", "orders"), ScopeEntry("WRITE", "transactional_id", "query:", "prefixed")]
    scope = checked_scope([*given, given[0]])
    assert scope == (
        ScopeEntry("Read", "Topic", "orders"),
        ScopeEntry("Write", "TransactionalId", "query:", "Prefixed"),
    )
    table = scope_table(scope)
    assert table.decide(ANNA, "10.0.0.1", Operation.WRITE, ResourceType.TRANSACTIONAL_ID, "query:7").allowed
    assert not table.decide(ANNA, "10.0.0.1", Operation.WRITE, ResourceType.TOPIC, "orders").allowed
    with pytest.raises(ConfigError, match="operation Read"):
        checked_scope([ScopeEntry("Read", "Cluster", "kafka-cluster")])
    with pytest.raises(ConfigError, match="expected one of"):
        checked_scope([ScopeEntry("Steal", "Topic", "orders")])


def test_a_secret_names_its_token() -> None:
    id_bytes, random_bytes = bytes(range(240, 256)), bytes(32)
    token_id, secret = token_id_of(id_bytes), secret_of(id_bytes, random_bytes)
    assert id_of_hmac(hmac_of_secret(secret)) == token_id
    assert base64.b64encode(hmac_of_secret(secret)).decode() == secret, "the password of Kafka's clients"


def test_a_token_can_be_named_without_its_secret() -> None:
    token_id = token_id_of(bytes(range(240, 256)))
    assert id_of_hmac(hmac_of_id(token_id)) == token_id
    assert len(hmac_of_id(token_id)) == 16


def test_too_few_bytes_name_no_token() -> None:
    assert code_of(id_of_hmac, bytes(15)) is ErrorCode.DELEGATION_TOKEN_NOT_FOUND
    assert hmac_of_id("not base64: \u00e9"), "the id of a token that another program has stored"
