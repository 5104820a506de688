"""A broker's cache of all delegation tokens, which ZooKeeper stores, and the removal of expired tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from sparklog.broker.security.index_follower import IndexFollower
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal
from sparklog.protocol.scram import TokenCredential
from sparklog.security.acls import AclTable
from sparklog.security.delegation_tokens import DelegationToken, scope_table
from sparklog.zk.errors import ZkError
from sparklog.zk.session import Node, ZkSession
from sparklog.zk.token_store import StoredToken, TokenStore, decode_index
from sparklog.zk.unreadable import Unreadable

_log = logging.getLogger(__name__)

#: The scope of a token that does not exist any more. The broker closes its connections shortly after.
_NOTHING = AclTable()


class Tokens:
    """A cache of all delegation tokens, which it reads from ZooKeeper. It also deletes expired tokens there.

    If a token is deleted before it expires, the broker closes the connections that have logged in with it. Not
    thread-safe: use it on the broker's event loop, from ``open`` to ``close``.
    """

    def __init__(self, *, wall_ms: Callable[[], int], check_interval_ms: int) -> None:
        #: Called with each token that is deleted before it expires.
        self.revoked_listeners: list[Callable[[DelegationToken], object]] = []
        self.follower = IndexFollower("delegation tokens", lambda node: decode_index(node).changed, self._apply)
        self._wall_ms = wall_ms
        self._check_interval_ms = check_interval_ms
        self._store: TokenStore | None = None
        self._tokens: dict[str, StoredToken] = {}
        #: The scopes of tokens that have logged in, by token id.
        self._scopes: dict[str, AclTable] = {}
        self._task: asyncio.Task[None] | None = None

    def open(self, session: ZkSession) -> None:
        """Start to watch the tokens in ZooKeeper. ``session`` must stay open until ``close``."""
        self._store = TokenStore(session, Unreadable())
        self.follower.open(session, self._store.watch)
        self._task = asyncio.get_running_loop().create_task(self._remove_expired(), name="remove expired tokens")

    def close(self) -> None:
        """End the watch of the tokens and the removal of expired tokens."""
        self.follower.close()
        if self._task is not None:
            self._task.cancel()

    @property
    def store(self) -> TokenStore:
        """Return the store of tokens in ZooKeeper. Raises BrokerError BROKER_NOT_AVAILABLE before ``open``."""
        if self._store is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, "the broker is still starting")
        return self._store

    def credential(self, mechanism: str, token_id: str) -> TokenCredential | None:
        """Return the credential of a token; None if there is no such token or credential, or the token has expired."""
        found = self._tokens.get(token_id)
        credential = found.credentials.get(mechanism) if found is not None else None
        if found is None or credential is None or self._wall_ms() >= found.token.expiry_ms:
            return None
        return TokenCredential(credential, found.token.owner, found.token.expiry_ms)

    def valid(self) -> list[DelegationToken]:
        """Return the tokens that have not expired, sorted by id."""
        now_ms = self._wall_ms()
        return [self._tokens[key].token for key in sorted(self._tokens) if self._tokens[key].token.expiry_ms > now_ms]

    def get(self, token_id: str) -> DelegationToken | None:
        """Return a token, which may have expired, or None if it does not exist."""
        found = self._tokens.get(token_id)
        return None if found is None else found.token

    def scope(self, token_id: str) -> AclTable | None:
        """Return the table that decides what the holder of a token may do, or None if the token has no scope.

        If the token does not exist any more, the table allows nothing.
        """
        found = self._tokens.get(token_id)
        if found is None:
            return _NOTHING
        if found.token.scope is None:
            return None
        table = self._scopes.get(token_id)
        if table is None:
            table = self._scopes[token_id] = scope_table(found.token.scope)
        return table

    async def end_tokens_of(self, owner: Principal) -> None:
        """Delete all tokens of a principal. Raises ZkError."""
        for token_id, stored in (await self.store.all_tokens()).items():
            if stored.token.owner == owner:
                with suppress(BrokerError):  # Another broker has deleted it.
                    await self.store.change(token_id, lambda token: None)

    async def _apply(self, node: Node | None, ids: set[str] | None) -> None:
        if ids is None:
            found = await self.store.all_tokens()
            ids = found.keys() | self._tokens.keys()
        else:
            found = await self.store.tokens(ids)
        now_ms = self._wall_ms()
        for token_id in ids:
            before, after = self._tokens.get(token_id), found.get(token_id)
            if after is not None:
                self._tokens[token_id] = after
                continue
            self._tokens.pop(token_id, None)
            self._scopes.pop(token_id, None)
            if before is not None and before.token.expiry_ms > now_ms:
                _log.info("delegation token %s of %s was ended: ending its connections", token_id, before.token.owner)
                for listener in self.revoked_listeners:
                    listener(before.token)

    async def _remove_expired(self) -> None:
        while True:
            await asyncio.sleep(self._check_interval_ms / 1000)
            now_ms = self._wall_ms()

            def unless_renewed(token: DelegationToken, now_ms: int = now_ms) -> DelegationToken | None:
                return token if token.expiry_ms > now_ms else None

            for token_id in [key for key, one in self._tokens.items() if one.token.expiry_ms <= now_ms]:
                try:
                    await self.store.change(token_id, unless_renewed)
                except BrokerError:  # noqa: PERF203 - another broker has deleted it
                    continue
                except ZkError as error:
                    _log.warning("expired delegation tokens are removed later: %s", error)
                    break
