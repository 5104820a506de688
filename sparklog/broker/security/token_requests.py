"""Requests that create, renew, expire and describe delegation tokens."""

from __future__ import annotations

import asyncio
import os

from sparklog.broker.context import BrokerContext
from sparklog.broker.requests.delayed_replies import reply_later
from sparklog.broker.security.authorizer import Authorizer
from sparklog.broker.security.tokens import Tokens
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import Principal
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    CreateDelegationToken,
    CreateDelegationTokenReply,
    DelegationTokenExpiryReply,
    DescribeDelegationTokens,
    DescribeDelegationTokensReply,
    ExpireDelegationToken,
    RenewDelegationToken,
    Reply,
)
from sparklog.protocol.sasl import SCRAM_MECHANISMS
from sparklog.protocol.scram import TOKEN_FORM, ScramCredential
from sparklog.protocol.token_messages import MAX_DESCRIBED, ScopeEntry, TokenDescription
from sparklog.security.acls import Operation, ResourceType
from sparklog.security.delegation_tokens import (
    ID_BYTES,
    DelegationToken,
    checked_scope,
    ended,
    new_token,
    renewed,
    renewed_by_holder,
    secret_of,
    token_id_of,
)
from sparklog.security.principals import ANONYMOUS, parse_principal
from sparklog.zk.token_store import StoredToken

#: The maximum time that a reply waits until this broker uses the change for logins.
_APPLIED_S = 5.0
#: The maximum number of valid tokens of one owner, so that one user cannot use up the cluster's maximum.
MOST_OF_OWNER = 1000
_SECRET_BYTES = 32


class TokenRequests:
    """The handlers of requests that create, renew, expire and describe delegation tokens.

    ``authorizer`` is None if the broker has no authorizer.
    """

    def __init__(self, context: BrokerContext, tokens: Tokens, authorizer: Authorizer | None) -> None:
        self._context = context
        self._tokens = tokens
        self._authorizer = authorizer

    def create(self, connection: ServerConnection, request: CreateDelegationToken, body: memoryview) -> None:
        _require_own_login(connection)
        owned = sum(token.owner == connection.principal for token in self._tokens.valid())
        if owned >= MOST_OF_OWNER:
            detail = f"{connection.principal} has {owned} delegation tokens, at most {MOST_OF_OWNER} may be valid"
            raise BrokerError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, detail)
        try:
            renewers = tuple(map(parse_principal, request.renewers))
            scope = None if request.scope is None else checked_scope(request.scope)
        except ConfigError as error:
            raise BrokerError(ErrorCode.INVALID_REQUEST, str(error)) from None
        reply_later(self._context, connection, request, self._create(connection, request, renewers, scope))

    async def _create(
        self,
        connection: ServerConnection,
        request: CreateDelegationToken,
        renewers: tuple[Principal, ...],
        scope: tuple[ScopeEntry, ...] | None,
    ) -> Reply:
        config = self._context.config
        longest_ms, period_ms = config.delegation_token_max_lifetime_ms, config.delegation_token_expiry_time_ms
        id_bytes = os.urandom(ID_BYTES)
        token = new_token(
            token_id_of(id_bytes),
            connection.principal,
            renewers,
            self._context.wall_ms(),
            lifetime_ms=min(request.max_lifetime_ms, longest_ms) if request.max_lifetime_ms >= 0 else longest_ms,
            expiry_ms=min(request.period_ms, period_ms) if request.period_ms >= 0 else period_ms,
            scope=scope,
        )
        secret = secret_of(id_bytes, os.urandom(_SECRET_BYTES))
        credentials = await asyncio.to_thread(_credentials, secret)
        await self._applied(await self._tokens.store.create(StoredToken(token, credentials)))
        if connection.closed:  # Perhaps its user was deleted. No client knows the token.
            await self._tokens.store.change(token.token_id, lambda token: None)
        return CreateDelegationTokenReply(request.cid, _described(token), secret)

    def renew(self, connection: ServerConnection, request: RenewDelegationToken, body: memoryview) -> None:
        by_holder = bool(connection.token_id) and connection.token_id == request.token_id
        if not by_holder:
            _require_own_login(connection)
        default_ms = self._context.config.delegation_token_expiry_time_ms
        period_ms = request.period_ms if request.period_ms >= 0 else default_ms
        principal, now_ms = connection.principal, self._context.wall_ms()
        known = self._tokens.get(request.token_id)
        if by_holder and known is not None and renewed_by_holder(known, now_ms) == known:
            connection.reply(_expiry(request, known.expiry_ms, now_ms))
            return

        def change(token: DelegationToken) -> DelegationToken:
            return (
                renewed_by_holder(token, now_ms)
                if by_holder
                else renewed(token, principal, now_ms, period_ms=period_ms)
            )

        async def work() -> Reply:
            results: list[DelegationToken] = []

            def noted(token: DelegationToken) -> DelegationToken:
                results.append(change(token))
                return results[-1]

            await self._applied(await self._tokens.store.change(request.token_id, noted))
            return _expiry(request, results[-1].expiry_ms, self._context.wall_ms())

        reply_later(self._context, connection, request, work())

    def expire(self, connection: ServerConnection, request: ExpireDelegationToken, body: memoryview) -> None:
        _require_own_login(connection)
        principal, now_ms = connection.principal, self._context.wall_ms()

        async def work() -> Reply:
            results: list[DelegationToken | None] = []

            def noted(token: DelegationToken) -> DelegationToken | None:
                results.append(ended(token, principal, now_ms, after_ms=request.period_ms))
                return results[-1]

            await self._applied(await self._tokens.store.change(request.token_id, noted))
            last = results[-1]
            return _expiry(request, last.expiry_ms if last is not None else now_ms, self._context.wall_ms())

        reply_later(self._context, connection, request, work())

    def describe(self, connection: ServerConnection, request: DescribeDelegationTokens, body: memoryview) -> None:
        _require_own_login(connection)
        found = [
            _described(token)
            for token in self._tokens.valid()
            if (request.owners is None or str(token.owner) in request.owners) and self._may_see(connection, token)
        ]
        connection.reply(DescribeDelegationTokensReply(request.cid, tuple(found)))

    def _may_see(self, connection: ServerConnection, token: DelegationToken) -> bool:
        if token.may_change(connection.principal):
            return True
        if self._authorizer is None:
            return False
        return self._authorizer.skips(connection) or self._authorizer.allows(
            connection, Operation.DESCRIBE, ResourceType.DELEGATION_TOKEN, token.token_id
        )

    async def _applied(self, version: int) -> None:
        await self._tokens.follower.applied(version, timeout_s=_APPLIED_S)


def _require_own_login(connection: ServerConnection) -> None:
    """Check that the client has logged in without a delegation token.

    Otherwise the owner of a token could create further tokens, and use them after the first token has ended.

    Raises:
        BrokerError: DELEGATION_TOKEN_REQUEST_NOT_ALLOWED.
    """
    if connection.principal == ANONYMOUS or connection.token_id:
        detail = "log in first, by a password or a certificate" if not connection.token_id else ""
        raise BrokerError(ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED, detail)


def _credentials(secret: str) -> dict[str, ScramCredential]:
    """Return the SCRAM credentials of a token's secret. The secret is random, so few iterations are enough."""
    return {
        mechanism: ScramCredential.derive(mechanism, secret, os.urandom(TOKEN_FORM.salt_bytes), TOKEN_FORM.iterations)
        for mechanism in SCRAM_MECHANISMS
    }


def _expiry(
    request: RenewDelegationToken | ExpireDelegationToken, expiry_ms: int, now_ms: int
) -> DelegationTokenExpiryReply:
    return DelegationTokenExpiryReply(request.cid, expiry_ms, max(0, expiry_ms - now_ms))


def _described(token: DelegationToken) -> TokenDescription:
    return TokenDescription(
        token.token_id,
        str(token.owner),
        tuple(map(str, token.renewers)),
        token.issue_ms,
        token.expiry_ms,
        token.max_ms,
        () if token.scope is None else token.scope[:MAX_DESCRIBED],
        -1 if token.scope is None else len(token.scope),
        token.period_ms,
    )
