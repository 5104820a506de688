"""Requests of Kafka clients about delegation tokens. Source: KIP-48.

Kafka names a token by its HMAC, which is also the password of a login with the token. Brokers of sparklog store only
keys that are derived from a token's secret. The secret begins with the token's id, so a broker can find a token by its
HMAC. Clients get the whole HMAC only when they create a token. Later they get its first bytes, with which they can
renew and end the token, but not log in.
"""

from __future__ import annotations

from sparklog.broker.kafka.admin.item_errors import FAILURES, item_error
from sparklog.broker.kafka.call import KafkaCall
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.security import (
    CreateDelegationTokenRequest,
    CreateDelegationTokenResponse,
    DescribedDelegationToken,
    DescribedDelegationTokenRenewer,
    DescribeDelegationTokenRequest,
    DescribeDelegationTokenResponse,
    ExpireDelegationTokenRequest,
    ExpireDelegationTokenResponse,
    RenewDelegationTokenRequest,
    RenewDelegationTokenResponse,
)
from sparklog.model import Principal
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.messages import (
    CreateDelegationToken,
    CreateDelegationTokenReply,
    DelegationTokenExpiryReply,
    DescribeDelegationTokens,
    DescribeDelegationTokensReply,
    ExpireDelegationToken,
    RenewDelegationToken,
)
from sparklog.protocol.token_messages import MAX_RENEWERS, TokenDescription
from sparklog.security.delegation_tokens import hmac_of_id, hmac_of_secret, id_of_hmac
from sparklog.security.principals import parse_principal


async def create_token(call: KafkaCall, request: CreateDelegationTokenRequest) -> CreateDelegationTokenResponse:
    """Create a token for the connection's own principal."""
    renewers = tuple(f"{one.principal_type}:{one.principal_name}" for one in request.renewers)
    try:
        _require_own(call.connection.principal, request)
        if len(renewers) > MAX_RENEWERS:
            detail = f"found {len(renewers)} renewers; expected at most {MAX_RENEWERS}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        reply = await call.native(CreateDelegationToken(0, renewers, max(-1, request.max_lifetime_ms)))
    except FAILURES as failure:
        return CreateDelegationTokenResponse(error_code=item_error(failure).code)
    assert isinstance(reply, CreateDelegationTokenReply)
    token, owner = reply.token, parse_principal(reply.token.owner)
    return CreateDelegationTokenResponse(
        principal_type=owner.kind,
        principal_name=owner.name,
        token_requester_principal_type=owner.kind,
        token_requester_principal_name=owner.name,
        issue_timestamp_ms=token.issue_ms,
        expiry_timestamp_ms=token.expiry_ms,
        max_timestamp_ms=token.max_ms,
        token_id=token.token_id,
        hmac=hmac_of_secret(reply.secret),
    )


def _require_own(principal: Principal, request: CreateDelegationTokenRequest) -> None:
    """Check that the owner of the new token is the client itself. Raises BrokerError."""
    kind, name = request.owner_principal_type, request.owner_principal_name
    if (kind or name) and (kind, name) != (principal.kind, principal.name):
        detail = f"{principal} may create tokens only for itself"
        raise BrokerError(ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED, detail)


async def renew_token(call: KafkaCall, request: RenewDelegationTokenRequest) -> RenewDelegationTokenResponse:
    """Renew the token with this HMAC."""
    try:
        reply = await call.native(RenewDelegationToken(0, id_of_hmac(request.hmac), max(-1, request.renew_period_ms)))
    except FAILURES as failure:
        return RenewDelegationTokenResponse(error_code=item_error(failure).code)
    assert isinstance(reply, DelegationTokenExpiryReply)
    return RenewDelegationTokenResponse(expiry_timestamp_ms=reply.expiry_ms)


async def expire_token(call: KafkaCall, request: ExpireDelegationTokenRequest) -> ExpireDelegationTokenResponse:
    """Change when the token with this HMAC expires. A negative period ends the token at once."""
    period_ms = max(-1, request.expiry_time_period_ms)
    try:
        reply = await call.native(ExpireDelegationToken(0, id_of_hmac(request.hmac), period_ms))
    except FAILURES as failure:
        return ExpireDelegationTokenResponse(error_code=item_error(failure).code)
    assert isinstance(reply, DelegationTokenExpiryReply)
    return ExpireDelegationTokenResponse(expiry_timestamp_ms=reply.expiry_ms)


async def describe_tokens(call: KafkaCall, request: DescribeDelegationTokenRequest) -> DescribeDelegationTokenResponse:
    """Return the tokens of the owners that the request names, except tokens that the client may not see.

    If the request has no list of owners, it asks for all tokens. An empty list means the client's own tokens:
    ``kafka-delegation-tokens.sh`` sends it for the current user.
    """
    owners: tuple[str, ...] | None = None
    if request.owners is not None:
        named = (f"{owner.principal_type}:{owner.principal_name}" for owner in request.owners[:MAX_ENTRIES])
        owners = tuple(named) or (str(call.connection.principal),)
    try:
        reply = await call.native(DescribeDelegationTokens(0, owners))
    except FAILURES as failure:
        return DescribeDelegationTokenResponse(error_code=item_error(failure).code)
    assert isinstance(reply, DescribeDelegationTokensReply)
    return DescribeDelegationTokenResponse(tokens=[_described(token) for token in reply.tokens])


def _described(token: TokenDescription) -> DescribedDelegationToken:
    owner = parse_principal(token.owner)
    renewers = map(parse_principal, token.renewers)
    return DescribedDelegationToken(
        principal_type=owner.kind,
        principal_name=owner.name,
        token_requester_principal_type=owner.kind,
        token_requester_principal_name=owner.name,
        issue_timestamp=token.issue_ms,
        expiry_timestamp=token.expiry_ms,
        max_timestamp=token.max_ms,
        token_id=token.token_id,
        hmac=hmac_of_id(token.token_id),
        renewers=[
            DescribedDelegationTokenRenewer(principal_type=one.kind, principal_name=one.name) for one in renewers
        ],
    )
