"""Delegation tokens: credentials for a limited time, which a logged-in client requests for other processes.

This module is pure. A client that logs in with a token has the principal of the token's owner. The broker derives SCRAM
credentials from the token's secret and stores only these credentials. A token expires unless its owner, a renewer or
its holder renews it. It cannot be renewed beyond ``max_ms``. Each client that has logged in with the token is a
holder of the token.

A token may have a scope, which lists the operations that the holder may do. The holder may do each of them only if the
owner may do it too. Source: KIP-48, which has neither scopes nor the renewal by the holder.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

import msgspec

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal
from sparklog.protocol.token_messages import ScopeEntry
from sparklog.security.acls import AclBinding, AclTable, binding
from sparklog.security.principals import EVERYONE

#: The part of the period by which a renewal by the holder must extend the token. Otherwise the token does not change,
#: so that a thousand holders that renew the token at the same time do not write it a thousand times.
_LEAST_GAIN = 0.1
#: The number of random bytes in a token's id, with which its secret begins.
ID_BYTES = 16


class DelegationToken(msgspec.Struct, frozen=True):
    """A delegation token without its secret. Times are milliseconds since the Unix epoch."""

    token_id: str
    owner: Principal
    renewers: tuple[Principal, ...]
    issue_ms: int
    expiry_ms: int
    max_ms: int
    #: The time from a renewal by the holder until the token expires. 0 means that the holder cannot renew the token.
    period_ms: int = 0
    #: The operations that the holder may do. None means all operations that the owner may do.
    scope: tuple[ScopeEntry, ...] | None = None

    def check_valid(self, now_ms: int) -> None:
        """Check that the token has not expired. Raises BrokerError DELEGATION_TOKEN_EXPIRED."""
        if now_ms >= self.expiry_ms:
            raise BrokerError(ErrorCode.DELEGATION_TOKEN_EXPIRED, f"delegation token {self.token_id} has expired")

    def may_change(self, principal: Principal) -> bool:
        """Return whether the principal may renew or end the token: whether it is the owner or a renewer."""
        return principal == self.owner or principal in self.renewers


def new_token(
    token_id: str,
    owner: Principal,
    renewers: tuple[Principal, ...],
    now_ms: int,
    *,
    lifetime_ms: int,
    expiry_ms: int,
    scope: tuple[ScopeEntry, ...] | None = None,
) -> DelegationToken:
    """Return a token that expires ``expiry_ms`` from now. Renewals can extend it until ``lifetime_ms`` from now."""
    max_ms = now_ms + lifetime_ms
    first_ms = min(now_ms + expiry_ms, max_ms)
    return DelegationToken(token_id, owner, renewers, now_ms, first_ms, max_ms, expiry_ms, scope)


def checked_scope(entries: Iterable[ScopeEntry]) -> tuple[ScopeEntry, ...]:
    """Return the entries of a scope with the names of operations and types in the case of ``security.acls``.

    Raises:
        ConfigError: an entry is not valid, for the same reasons as an ACL.
    """
    found = []
    for acl in dict.fromkeys(map(_acl, entries)):
        kind, name, pattern_type = acl.pattern
        found.append(ScopeEntry(acl.operation.value, kind.value, name, pattern_type.value))
    return tuple(found)


def scope_table(entries: Iterable[ScopeEntry]) -> AclTable:
    """Return a table of ACLs that allow the operations of a scope to all principals. Raises ConfigError."""
    return AclTable(map(_acl, entries))


def _acl(entry: ScopeEntry) -> AclBinding:
    return binding(entry.resource_type, entry.name, str(EVERYONE), entry.operation, pattern_type=entry.pattern_type)


def renewed(token: DelegationToken, principal: Principal, now_ms: int, *, period_ms: int) -> DelegationToken:
    """Return the token with an expiry ``period_ms`` from now, but not after the end of its maximum lifetime.

    ``principal`` requests this, and must be the owner or a renewer.

    Raises:
        BrokerError: DELEGATION_TOKEN_OWNER_MISMATCH, DELEGATION_TOKEN_EXPIRED.
    """
    _check_principal(token, principal)
    token.check_valid(now_ms)
    return msgspec.structs.replace(token, expiry_ms=min(now_ms + period_ms, token.max_ms))


def renewed_by_holder(token: DelegationToken, now_ms: int) -> DelegationToken:
    """Return the token with an expiry one period from now, but not after the end of its maximum lifetime.

    If the new expiry would be later than the old one by less than a tenth of the period, return the same token.

    Raises:
        BrokerError: DELEGATION_TOKEN_EXPIRED; DELEGATION_TOKEN_REQUEST_NOT_ALLOWED, the holder cannot renew the token.
    """
    token.check_valid(now_ms)
    if token.period_ms <= 0:
        detail = f"the holder of delegation token {token.token_id} cannot renew it"
        raise BrokerError(ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED, detail)
    expiry_ms = min(now_ms + token.period_ms, token.max_ms)
    if expiry_ms - token.expiry_ms < token.period_ms * _LEAST_GAIN:
        return token
    return msgspec.structs.replace(token, expiry_ms=expiry_ms)


def ended(token: DelegationToken, principal: Principal, now_ms: int, *, after_ms: int) -> DelegationToken | None:
    """Return the token with an expiry ``after_ms`` from now, but not after the end of its maximum lifetime.

    If ``after_ms`` is negative, the token ends now: return None. ``principal`` requests this, and must be the owner or
    a renewer. The token's holder cannot renew the token after that.

    Raises:
        BrokerError: DELEGATION_TOKEN_OWNER_MISMATCH, DELEGATION_TOKEN_EXPIRED.
    """
    _check_principal(token, principal)
    if after_ms < 0:
        return None
    token.check_valid(now_ms)
    return msgspec.structs.replace(token, expiry_ms=min(now_ms + after_ms, token.max_ms), period_ms=0)


def _check_principal(token: DelegationToken, principal: Principal) -> None:
    if not token.may_change(principal):
        detail = f"{principal} is neither the owner nor a renewer of delegation token {token.token_id}"
        raise BrokerError(ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH, detail)


def token_id_of(id_bytes: bytes) -> str:
    """Return the id of a token, as text without padding."""
    return base64.urlsafe_b64encode(id_bytes).rstrip(b"=").decode()


def secret_of(id_bytes: bytes, random_bytes: bytes) -> str:
    """Return the secret of a token: the Base64 form of what Kafka calls the token's HMAC.

    The secret begins with the id, because Kafka's clients name a token by its HMAC.
    """
    return base64.b64encode(id_bytes + random_bytes).decode()


def hmac_of_secret(secret: str) -> bytes:
    """Return the token's HMAC, as Kafka clients use it, from the token's secret."""
    return base64.b64decode(secret)


def hmac_of_id(token_id: str) -> bytes:
    """Return the first bytes of a token's HMAC. These bytes identify the token, but no client can log in with them."""
    try:
        return base64.urlsafe_b64decode(token_id + "=" * (-len(token_id) % 4))
    except ValueError:
        return token_id.encode()


def id_of_hmac(hmac: bytes) -> str:
    """Return the id of the token with this HMAC, or with these first bytes of an HMAC. The token may not exist.

    Raises:
        BrokerError: DELEGATION_TOKEN_NOT_FOUND, there are too few bytes.
    """
    if len(hmac) < ID_BYTES:
        raise BrokerError(ErrorCode.DELEGATION_TOKEN_NOT_FOUND, f"no delegation token has an HMAC of {len(hmac)} bytes")
    return token_id_of(hmac[:ID_BYTES])
