"""The administration of delegation tokens. With a token, another process logs in as a user without the password."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.net.password import Password
from sparklog.protocol.messages import (
    CreateDelegationToken,
    CreateDelegationTokenReply,
    DelegationTokenExpiryReply,
    DescribeDelegationTokens,
    DescribeDelegationTokensReply,
    ExpireDelegationToken,
    RenewDelegationToken,
)
from sparklog.protocol.token_messages import ScopeEntry, TokenDescription

#: One entry of a token's scope: an operation, a type of resource, a name, and perhaps the type of the pattern. For
#: example ``("Read", "Topic", "orders")``.
ScopeText: TypeAlias = "tuple[str, str, str] | tuple[str, str, str, str]"


@dataclass(frozen=True, slots=True)
class DelegationTokenDescription:
    """A delegation token without its secret. Times are milliseconds since the Unix epoch.

    The scope lists what a client that logs in with the token may do. ``scope_size`` is its number of entries, and
    ``scope`` has the first three. Without a scope, ``scope_size`` is None, and the client may do everything that the
    token's owner may do. The client can renew the token for ``period_ms`` at a time; 0 means that it cannot.
    """

    token_id: str
    owner: str
    renewers: tuple[str, ...]
    issue_ms: int
    expiry_ms: int
    max_ms: int
    scope: tuple[ScopeEntry, ...] = ()
    scope_size: int | None = None
    period_ms: int = 0


@dataclass(frozen=True, slots=True)
class CreatedToken:
    """A new delegation token with its secret.

    A client logs in with ``sasl.tokenauth=true``, the token's id as the user, and the secret as the password.
    """

    token: DelegationTokenDescription
    secret: Password


def create_token(
    cluster: BlockingCluster,
    renewers: Iterable[str],
    *,
    max_lifetime_ms: int | None,
    period_ms: int | None,
    scope: Iterable[ScopeText] | None,
) -> CreatedToken:
    """Create a token. See ``Admin.create_delegation_token`` for the arguments and errors."""
    request = CreateDelegationToken(
        0,
        tuple(renewers),
        -1 if max_lifetime_ms is None else max_lifetime_ms,
        -1 if period_ms is None else period_ms,
        None if scope is None else tuple(ScopeEntry(*entry) for entry in scope),
    )
    reply = cluster.retrying("delegation token", lambda: cluster.ask_any(request, CreateDelegationTokenReply))
    return CreatedToken(_description(reply.token), Password(reply.secret, transferable=True))


def renew_token(cluster: BlockingCluster, token_id: str, period_ms: int | None) -> DelegationTokenExpiryReply:
    """Renew a token. See ``Admin.renew_delegation_token`` for the arguments and errors."""
    request = RenewDelegationToken(0, token_id, -1 if period_ms is None else period_ms)
    return cluster.retrying("delegation token", lambda: cluster.ask_any(request, DelegationTokenExpiryReply))


def expire_token(cluster: BlockingCluster, token_id: str, period_ms: int | None) -> int:
    """Make a token expire at a given time, or at once.

    See ``Admin.expire_delegation_token`` for the arguments and errors.
    """
    request = ExpireDelegationToken(0, token_id, -1 if period_ms is None else period_ms)
    return cluster.retrying("delegation token", lambda: cluster.ask_any(request, DelegationTokenExpiryReply)).expiry_ms


def list_tokens(cluster: BlockingCluster, owners: Iterable[str] | None) -> list[DelegationTokenDescription]:
    """Return the tokens. See ``Admin.list_delegation_tokens`` for the arguments and errors."""
    request = DescribeDelegationTokens(0, None if owners is None else tuple(owners))
    reply = cluster.retrying("delegation tokens", lambda: cluster.ask_any(request, DescribeDelegationTokensReply))
    return [_description(found) for found in reply.tokens]


def _description(found: TokenDescription) -> DelegationTokenDescription:
    return DelegationTokenDescription(
        found.token_id,
        found.owner,
        found.renewers,
        found.issue_ms,
        found.expiry_ms,
        found.max_ms,
        found.scope,
        None if found.scope_size < 0 else found.scope_size,
        found.period_ms,
    )
