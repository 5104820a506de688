"""Delegation tokens: credentials for a limited time, which a process requests after its login for its helpers.

Pure. A client that logs in with a token has the principal of the token's owner. The broker derives SCRAM credentials
from the token's secret and stores only these credentials. A token expires unless its owner or a renewer renews it. It
cannot be renewed beyond ``max_ms``. Source: KIP-48.
"""

from __future__ import annotations

import msgspec

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal


class DelegationToken(msgspec.Struct, frozen=True):
    """A delegation token without its secret. Times are milliseconds since the Unix epoch."""

    token_id: str
    owner: Principal
    renewers: tuple[Principal, ...]
    issue_ms: int
    expiry_ms: int
    max_ms: int

    def check_valid(self, now_ms: int) -> None:
        """Check that the token has not expired. Raises BrokerError DELEGATION_TOKEN_EXPIRED."""
        if now_ms >= self.expiry_ms:
            raise BrokerError(ErrorCode.DELEGATION_TOKEN_EXPIRED, f"delegation token {self.token_id} has expired")

    def may_change(self, principal: Principal) -> bool:
        """Return whether the principal may renew or end the token: whether it is the owner or a renewer."""
        return principal == self.owner or principal in self.renewers


def new_token(
    token_id: str, owner: Principal, renewers: tuple[Principal, ...], now_ms: int, *, lifetime_ms: int, expiry_ms: int
) -> DelegationToken:
    """Return a token that expires after ``expiry_ms``. It can be renewed until ``lifetime_ms`` from now."""
    max_ms = now_ms + lifetime_ms
    return DelegationToken(token_id, owner, renewers, now_ms, min(now_ms + expiry_ms, max_ms), max_ms)


def renewed(token: DelegationToken, principal: Principal, now_ms: int, *, period_ms: int) -> DelegationToken:
    """Return the token with an expiry ``period_ms`` from now, but not after the end of its maximum lifetime.

    ``principal`` requests this, and must be the owner or a renewer.

    Raises:
        BrokerError: DELEGATION_TOKEN_OWNER_MISMATCH, DELEGATION_TOKEN_EXPIRED.
    """
    _check_principal(token, principal)
    token.check_valid(now_ms)
    return msgspec.structs.replace(token, expiry_ms=min(now_ms + period_ms, token.max_ms))


def ended(token: DelegationToken, principal: Principal, now_ms: int, *, after_ms: int) -> DelegationToken | None:
    """Return the token with an expiry ``after_ms`` from now, but not after the end of its maximum lifetime.

    If ``after_ms`` is negative, the token ends now: return None. ``principal`` requests this, and must be the owner or
    a renewer.

    Raises:
        BrokerError: DELEGATION_TOKEN_OWNER_MISMATCH, DELEGATION_TOKEN_EXPIRED.
    """
    _check_principal(token, principal)
    if after_ms < 0:
        return None
    token.check_valid(now_ms)
    return msgspec.structs.replace(token, expiry_ms=min(now_ms + after_ms, token.max_ms))


def _check_principal(token: DelegationToken, principal: Principal) -> None:
    if not token.may_change(principal):
        detail = f"{principal} is neither the owner nor a renewer of delegation token {token.token_id}"
        raise BrokerError(ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH, detail)
