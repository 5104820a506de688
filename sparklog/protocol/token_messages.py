"""Messages about delegation tokens (KIP-48). Only the reply to CreateDelegationToken contains a secret.

A broker of release 0.1.0 does not know these messages.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from sparklog.protocol.acl_messages import LongName
from sparklog.protocol.fields import Entries, Listed, Message, Name

#: The maximum number of renewers of one token, and of entries of its scope.
MAX_RENEWERS = 100
MAX_SCOPE = 1000
#: The maximum number of entries of the scope in a description, which is part of a list of thousands of tokens.
MAX_DESCRIBED = 3
_T = TypeVar("_T")
Renewers = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_RENEWERS)]
#: A time span in milliseconds.
Span = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]


class ScopeEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a token's scope: an operation that the scope allows on some resources.

    The fields have the same values as in an ACL. ``pattern_type`` defines whether ``name`` is a name, a prefix, or
    ``*`` for all names.
    """

    operation: Name
    resource_type: Name
    name: LongName
    pattern_type: Name = "Literal"


class TokenDescription(msgspec.Struct, frozen=True, array_like=True):
    """A delegation token without its secret.

    Principals have the form ``User:anna``. Times are in ms since the Unix epoch. ``scope`` has the first entries of the
    token's scope, and ``scope_size`` is the number of all entries. The size -1 means that the token has no scope. Then
    its holder may do everything that its owner may do. The holder can renew the token for ``period_ms`` at a time.
    """

    token_id: str
    owner: str
    renewers: Renewers[str]
    issue_ms: int
    expiry_ms: int
    max_ms: int
    scope: Annotated[tuple[ScopeEntry, ...], msgspec.Meta(max_length=MAX_DESCRIBED)] = ()
    scope_size: int = -1
    period_ms: int = 0


class CreateDelegationToken(Message, frozen=True, tag="create_delegation_token"):
    """A request to create a delegation token for the connection's principal.

    ``renewers`` are the principals that may renew or end the token. If ``max_lifetime_ms`` is -1, the broker's maximum
    applies. The token expires after ``period_ms`` unless it is renewed; -1 means the broker's default, which is also
    the maximum. A client that logs in with the token may do only what ``scope`` allows, and only what the owner may do.
    If ``scope`` is None, the client may do everything that the owner may do.
    """

    renewers: Renewers[Name] = ()
    max_lifetime_ms: Span = -1
    period_ms: Span = -1
    scope: Annotated[tuple[ScopeEntry, ...], msgspec.Meta(max_length=MAX_SCOPE)] | None = None


class CreateDelegationTokenReply(Message, frozen=True, tag="create_delegation_token_reply"):
    """The reply to CreateDelegationToken: the new token.

    ``secret`` is the password for a login with the token's id. No other message contains this secret.
    """

    token: TokenDescription
    secret: str

    def __repr__(self) -> str:
        return f"CreateDelegationTokenReply({self.cid}, {self.token})"

    throttle_time_ms: int = 0


class RenewDelegationToken(Message, frozen=True, tag="renew_delegation_token"):
    """A request to renew a token, so that it expires ``period_ms`` from now; -1 means the default period.

    The default period is a setting of the broker. If the token's holder sends the request, the token's own period
    replaces ``period_ms``. No renewal extends a token beyond its maximum lifetime.
    """

    token_id: Name
    period_ms: Span = -1


class ExpireDelegationToken(Message, frozen=True, tag="expire_delegation_token"):
    """A request to change a token so that it expires ``period_ms`` from now; -1 ends the token at once."""

    token_id: Name
    period_ms: Span = -1


class DelegationTokenExpiryReply(Message, frozen=True, tag="delegation_token_expiry_reply"):
    """The reply to RenewDelegationToken and ExpireDelegationToken: the token's new expiry time.

    ``left_ms`` is the time until then, for clients whose clock differs from the broker's; -1 if a broker of an earlier
    release replied.
    """

    expiry_ms: int
    left_ms: int = -1
    throttle_time_ms: int = 0


class DescribeDelegationTokens(Message, frozen=True, tag="describe_delegation_tokens"):
    """A request for the delegation tokens of these owners, or of all owners if ``owners`` is None.

    The broker returns only the tokens that the connection's principal may see.
    """

    owners: Entries[Name] | None = None


class DescribeDelegationTokensReply(Message, frozen=True, tag="describe_delegation_tokens_reply"):
    """The reply to DescribeDelegationTokens: the tokens, sorted by id."""

    tokens: Listed[TokenDescription]
    throttle_time_ms: int = 0
