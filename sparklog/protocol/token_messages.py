"""Messages about delegation tokens (KIP-48). Only the reply to CreateDelegationToken contains a secret.

A broker of release 0.1.0 does not know these messages.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from sparklog.protocol.fields import Entries, Listed, Message, Name

#: The maximum number of renewers of one token.
MAX_RENEWERS = 100
_T = TypeVar("_T")
Renewers = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_RENEWERS)]
#: A time span in milliseconds.
Span = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]


class TokenDescription(msgspec.Struct, frozen=True, array_like=True):
    """A delegation token without its secret.

    Principals have the form ``User:anna``. Times are in ms since the Unix epoch.
    """

    token_id: str
    owner: str
    renewers: Renewers[str]
    issue_ms: int
    expiry_ms: int
    max_ms: int


class CreateDelegationToken(Message, frozen=True, tag="create_delegation_token"):
    """A request to create a delegation token for the connection's principal.

    ``renewers`` are the principals that may renew or end the token. If ``max_lifetime_ms`` is -1, the broker's maximum
    applies.
    """

    renewers: Renewers[Name] = ()
    max_lifetime_ms: Span = -1


class CreateDelegationTokenReply(Message, frozen=True, tag="create_delegation_token_reply"):
    """The reply to CreateDelegationToken: the new token.

    ``secret`` is the password for a login with the token's id. No other message contains this secret.
    """

    token: TokenDescription
    secret: str

    def __repr__(self) -> str:
        return f"CreateDelegationTokenReply({self.cid}, {self.token})"


class RenewDelegationToken(Message, frozen=True, tag="renew_delegation_token"):
    """A request to renew a token, so that it expires ``period_ms`` from now; -1 means the broker's default period."""

    token_id: Name
    period_ms: Span = -1


class ExpireDelegationToken(Message, frozen=True, tag="expire_delegation_token"):
    """A request to change a token so that it expires ``period_ms`` from now; -1 ends the token at once."""

    token_id: Name
    period_ms: Span = -1


class DelegationTokenExpiryReply(Message, frozen=True, tag="delegation_token_expiry_reply"):
    """The reply to RenewDelegationToken and ExpireDelegationToken: the token's new expiry time."""

    expiry_ms: int


class DescribeDelegationTokens(Message, frozen=True, tag="describe_delegation_tokens"):
    """A request for the delegation tokens of these owners, or of all owners if ``owners`` is None.

    The broker returns only the tokens that the connection's principal may see.
    """

    owners: Entries[Name] | None = None


class DescribeDelegationTokensReply(Message, frozen=True, tag="describe_delegation_tokens_reply"):
    """The reply to DescribeDelegationTokens: the tokens, sorted by id."""

    tokens: Listed[TokenDescription]
