"""DescribeUserScramCredentials and AlterUserScramCredentials requests. Their replies never contain keys or salts."""

from __future__ import annotations

import os
from collections import defaultdict

from sparklog.broker.context import BrokerContext
from sparklog.broker.requests.delayed_replies import reply_later
from sparklog.broker.security.tokens import Tokens
from sparklog.broker.security.users import Users
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import USER, Principal
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    AlterUserScramCredentials,
    AlterUserScramCredentialsReply,
    DescribeUserScramCredentials,
    DescribeUserScramCredentialsReply,
    Reply,
)
from sparklog.protocol.sasl import SCRAM_MECHANISMS
from sparklog.protocol.saslprep import saslprep
from sparklog.protocol.scram import ScramCredential, check_credential
from sparklog.protocol.user_messages import MAX_ALTERATIONS, AlteredUser, DescribedUser, ScramCredentialInfo
from sparklog.zk.user_store import KEY_BYTES, Credentials

#: The maximum number of users with credentials. Every broker has all of them in memory.
MOST_USERS = 50_000
#: The maximum time that a reply waits until this broker uses the change for logins.
_APPLIED_S = 5.0
#: The changes of one user: by mechanism the new credential, or None for a deletion.
Changes = dict[str, ScramCredential | None]


class UserRequests:
    """The handlers of requests that describe and change the SCRAM credentials of users."""

    def __init__(self, context: BrokerContext, users: Users, tokens: Tokens) -> None:
        self._context = context
        self._users = users
        self._tokens = tokens

    def describe(self, connection: ServerConnection, request: DescribeUserScramCredentials, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._describe(request))

    async def _describe(self, request: DescribeUserScramCredentials) -> Reply:
        store = self._users.store
        await store.synchronised()
        if request.users is None:
            found = await store.all_users()
            return DescribeUserScramCredentialsReply(
                request.cid, tuple(_described(name, found[name]) for name in sorted(found))
            )
        names = sorted(set(request.users))
        found = await store.users(names)
        return DescribeUserScramCredentialsReply(
            request.cid,
            tuple(_described(name, found[name]) if name in found else _missing(name) for name in names),
        )

    def alter(self, connection: ServerConnection, request: AlterUserScramCredentials, body: memoryview) -> None:
        changes, refused = _changes(request)
        reply_later(self._context, connection, request, self._alter(request, changes, refused))

    async def _alter(
        self, request: AlterUserScramCredentials, changes: dict[str, Changes], refused: dict[str, AlteredUser]
    ) -> Reply:
        results: list[AlteredUser] = []
        version = -1
        for name, wanted in changes.items():
            if name in refused:
                results.append(refused[name])
                continue
            try:
                self.check_count(name, len(results))
                version = await self._users.store.alter(name, wanted, new_key=os.urandom(KEY_BYTES))
                if not await self._users.store.users([name]):
                    await self._tokens.end_tokens_of(Principal(USER, name))
                results.append(AlteredUser(name))
            except BrokerError as error:
                results.append(AlteredUser(name, error.code, error.detail))
        await self._users.follower.applied(version, timeout_s=_APPLIED_S)
        return AlterUserScramCredentialsReply(request.cid, tuple(results))

    def check_count(self, name: str, before: int) -> None:
        """Raise BrokerError INVALID_REQUEST if a change of the user ``name`` would lead to too many users.

        ``before`` is the number of users that the same request has already changed.
        """
        if not self._users.has(name) and self._users.count + before >= MOST_USERS:
            detail = f"user {name!r}: {self._users.count} users exist, at most {MOST_USERS} may"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)


def _described(name: str, credentials: Credentials) -> DescribedUser:
    infos = (ScramCredentialInfo(mechanism, one.iterations) for mechanism, one in sorted(credentials.items()))
    return DescribedUser(name, tuple(infos))


def _missing(name: str) -> DescribedUser:
    return DescribedUser(name, (), ErrorCode.RESOURCE_NOT_FOUND, f"user {name!r} does not exist")


def _changes(request: AlterUserScramCredentials) -> tuple[dict[str, Changes], dict[str, AlteredUser]]:
    """Return the changes by user, and the results of the users whose changes are refused.

    Raises:
        BrokerError: INVALID_REQUEST, there are no changes or too many.
    """
    count = len(request.deletions) + len(request.upsertions)
    if not 0 < count <= MAX_ALTERATIONS:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"{count} changes found, 1 to {MAX_ALTERATIONS} expected")
    changes: defaultdict[str, Changes] = defaultdict(dict)
    refused: dict[str, AlteredUser] = {}
    wanted: list[tuple[str, str, ScramCredential | None]] = [
        *((one.user, one.mechanism, None) for one in request.deletions),
        *((one.user, one.mechanism, one.credential) for one in request.upsertions),
    ]
    for name, mechanism, credential in wanted:
        of_user = changes[name]
        try:
            _check(name, mechanism, credential, of_user)
        except BrokerError as error:
            refused.setdefault(name, AlteredUser(name, error.code, error.detail))
        of_user[mechanism] = credential
    return changes, refused


def _check(name: str, mechanism: str, credential: ScramCredential | None, others: Changes) -> None:
    """Check one change. Raises BrokerError."""
    if mechanism in others:
        detail = f"user {name!r}: two changes for {mechanism} found"
        raise BrokerError(ErrorCode.DUPLICATE_RESOURCE, detail)
    if mechanism not in SCRAM_MECHANISMS:
        detail = f"mechanism {mechanism!r}: expected {' or '.join(SCRAM_MECHANISMS)}"
        raise BrokerError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, detail)
    if credential is None:
        return
    try:
        if saslprep(name, stored=True) != name:
            raise ConfigError("the user name is not in its prepared form")
        check_credential(mechanism, credential)
    except ConfigError as error:
        raise BrokerError(ErrorCode.UNACCEPTABLE_CREDENTIAL, f"user {name!r}: {error}") from None
