"""Messages about users and their SCRAM credentials. No message contains a password.

A client that sets a password chooses the salt and derives the keys itself. The broker stores the keys that it receives.
Source: KIP-554, where the client sends the salted password instead.

A broker of release 0.1.0 does not know these messages.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from sparklog.protocol.fields import Entries, Listed, Message, Name, Token
from sparklog.protocol.scram import MAX_ITERATIONS, MAX_SALT_BYTES, ScramCredential

#: The maximum number of changes in one request. Each user takes one write to ZooKeeper.
MAX_ALTERATIONS = 1000
#: The maximum number of mechanisms of one user in a reply.
_MAX_MECHANISMS = 16
_T = TypeVar("_T")
Alterations = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_ALTERATIONS)]


class DescribeUserScramCredentials(Message, frozen=True, tag="describe_user_scram_credentials"):
    """A request for the SCRAM mechanisms and iterations of these users, or of all users if ``users`` is None."""

    users: Entries[Name] | None = None


class ScramCredentialInfo(msgspec.Struct, frozen=True, array_like=True):
    """A mechanism that a user can log in with, and the iterations of its credential."""

    mechanism: str
    iterations: int


class DescribedUser(msgspec.Struct, frozen=True, array_like=True):
    """The mechanisms that one user can log in with. ``code`` is RESOURCE_NOT_FOUND if there is no such user."""

    user: str
    credentials: Annotated[tuple[ScramCredentialInfo, ...], msgspec.Meta(max_length=_MAX_MECHANISMS)] = ()
    code: int = 0
    detail: str = ""


class DescribeUserScramCredentialsReply(Message, frozen=True, tag="describe_user_scram_credentials_reply"):
    """The reply to DescribeUserScramCredentials: the users, sorted by name."""

    users: Listed[DescribedUser]
    throttle_time_ms: int = 0


class ScramCredentialDeletion(msgspec.Struct, frozen=True, array_like=True):
    """One change in AlterUserScramCredentials: the deletion of a user's credential for one mechanism."""

    user: Name
    mechanism: Name


class ScramCredentialUpsertion(msgspec.Struct, frozen=True, array_like=True):
    """One change in AlterUserScramCredentials: a user's new credential for one mechanism.

    Its ``repr`` contains no keys.
    """

    user: Name
    mechanism: Name
    iterations: Annotated[int, msgspec.Meta(ge=0, le=MAX_ITERATIONS)]
    salt: Annotated[bytes, msgspec.Meta(max_length=MAX_SALT_BYTES)]
    stored_key: Token
    server_key: Token

    @property
    def credential(self) -> ScramCredential:
        return ScramCredential(self.salt, self.iterations, self.stored_key, self.server_key)

    def __repr__(self) -> str:
        return f"ScramCredentialUpsertion({self.user!r}, {self.mechanism!r}, {self.iterations})"


class AlterUserScramCredentials(Message, frozen=True, tag="alter_user_scram_credentials"):
    """A request to change SCRAM credentials. The changes of one user take effect together or not at all."""

    deletions: Alterations[ScramCredentialDeletion] = ()
    upsertions: Alterations[ScramCredentialUpsertion] = ()


class AlteredUser(msgspec.Struct, frozen=True, array_like=True):
    """The result of AlterUserScramCredentials for one user: an error code (0 for success) and a text."""

    user: str
    code: int = 0
    detail: str = ""


class AlterUserScramCredentialsReply(Message, frozen=True, tag="alter_user_scram_credentials_reply"):
    """The reply to AlterUserScramCredentials: one result per user, in the order of first appearance in the request."""

    users: Alterations[AlteredUser]
    throttle_time_ms: int = 0
