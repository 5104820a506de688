"""Delegation tokens in ZooKeeper, without their secrets.

Each token has a node ``/config/tokens/<id>`` with the token and its SCRAM credentials. Only sessions that have proved
an identity to ZooKeeper can read these nodes. Every write also updates the index, the value of the node
``/config/tokens``. The index has the ids of the tokens that changed last.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated

import msgspec

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.scram import ScramCredential
from sparklog.security.delegation_tokens import DelegationToken, checked_scope
from sparklog.zk import codecs, paths
from sparklog.zk.errors import ZkBadVersion, ZkMultiFailed, ZkNodeExists, ZkNoNode
from sparklog.zk.ops import Create, Delete, Op, SetData
from sparklog.zk.session import Node, ZkSession
from sparklog.zk.unreadable import Unreadable
from sparklog.zk.user_store import decode_credential, decode_secret, encode_credential

#: The form of a token's id. A client may send any text as an id.
TOKEN_ID = re.compile(r"[A-Za-z0-9_-]{1,100}\Z")
#: The maximum number of tokens of a cluster, so that a client that creates tokens in a loop cannot fill ZooKeeper.
MAX_TOKENS = 10_000
_AT_ONCE = 1000
_REMEMBERED = 100


class StoredToken(msgspec.Struct, frozen=True):
    """A delegation token without its secret, and its SCRAM credentials by mechanism."""

    token: DelegationToken
    credentials: dict[str, ScramCredential]


class _TokenNode(msgspec.Struct, frozen=True):
    token: DelegationToken
    credentials: dict[str, str]
    version: int = codecs.VERSION


class TokenIndex(msgspec.Struct, frozen=True):
    """The value of ``/config/tokens``. ``changed`` has the ids of the last changed tokens, the newest change last."""

    changed: Annotated[tuple[str, ...], msgspec.Meta(max_length=10_000)] = ()
    version: int = codecs.VERSION


def decode_index(node: Node | None) -> TokenIndex:
    """Decode the index. If ``node`` is None, the node does not exist, and the index is empty. Raises ZkFormatError."""
    if node is None or not node.data:
        return TokenIndex()
    return decode_secret(paths.TOKENS, node.data, TokenIndex)


class TokenStore:
    """A store of the delegation tokens in ZooKeeper, over one session.

    The store keeps no copy of the tokens. It counts and logs nodes that this release cannot read.
    """

    def __init__(self, session: ZkSession, unreadable: Unreadable) -> None:
        self._session = session
        self._unreadable = unreadable

    def watch(self, on_index: Callable[[Node | None], None]) -> Callable[[], None]:
        """Call ``on_index`` with the index node ``/config/tokens``, now and after every change and every reconnection.

        Return a function that ends the watch.
        """
        return self._session.watch_data(paths.TOKENS, on_index)

    async def all_tokens(self) -> dict[str, StoredToken]:
        """Return all tokens, by id. Raises ZkError."""
        try:
            ids = await self._session.children(paths.TOKENS)
        except ZkNoNode:
            return {}
        found: dict[str, StoredToken] = {}
        for first in range(0, len(ids), _AT_ONCE):
            found |= await self.tokens(ids[first : first + _AT_ONCE])
        return found

    async def tokens(self, ids: Iterable[str]) -> dict[str, StoredToken]:
        """Return the tokens with these ids. Omit tokens that do not exist. Raises ZkError."""
        wanted = [token_id for token_id in dict.fromkeys(ids) if TOKEN_ID.match(token_id)]
        found = await asyncio.gather(*map(self._read, wanted))
        return {token_id: one for token_id, one in zip(wanted, found, strict=True) if one is not None}

    async def create(self, stored: StoredToken) -> int:
        """Store a new token, and return the new version of the index.

        Raises:
            BrokerError: THROTTLING_QUOTA_EXCEEDED, there are too many tokens.
            ZkError: with ZkUnreachable the outcome may be unknown.
        """
        await self._session.ensure(paths.CONFIG)
        await self._session.ensure(paths.TOKENS)
        if len(await self._session.children(paths.TOKENS)) >= MAX_TOKENS:
            raise BrokerError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, f"the cluster has {MAX_TOKENS} delegation tokens")
        path = _path(stored.token.token_id)
        return await self._write(stored.token.token_id, lambda _: Create(path, _encoded(stored)))

    async def change(self, token_id: str, change: Callable[[DelegationToken], DelegationToken | None]) -> int:
        """Replace a token with the result of ``change``, or delete it if the result is None.

        Return the new version of the index, or the current version if ``change`` returns the same token.

        Raises:
            BrokerError: DELEGATION_TOKEN_NOT_FOUND, or an error that ``change`` raises.
            ZkError: with ZkUnreachable the outcome may be unknown. The call may be repeated.
        """

        def write(found: tuple[StoredToken, int] | None) -> Op | None:
            if found is None:
                raise BrokerError(ErrorCode.DELEGATION_TOKEN_NOT_FOUND, f"delegation token {token_id[:100]!r}")
            stored, version = found
            wanted = change(stored.token)
            if wanted == stored.token:
                return None
            if wanted is None:
                return Delete(_path(token_id), version)
            return SetData(_path(token_id), _encoded(StoredToken(wanted, stored.credentials)), version)

        return await self._write(token_id, write)

    async def _write(self, token_id: str, write: Callable[[tuple[StoredToken, int] | None], Op | None]) -> int:
        while True:
            found: tuple[StoredToken, int] | None = None
            root = Node(b"", 0, 0)
            if TOKEN_ID.match(token_id):
                with suppress(ZkNoNode):
                    root = await self._session.get(paths.TOKENS)
                    found = await self._read_node(_path(token_id))
            op = write(found)
            if op is None:
                return root.version
            index = decode_index(root)
            wanted = msgspec.structs.replace(index, changed=(*index.changed, token_id)[-_REMEMBERED:])
            try:
                results = await self._session.multi([SetData(paths.TOKENS, codecs.encode(wanted), root.version), op])
            except ZkMultiFailed as error:
                if isinstance(error.cause, (ZkBadVersion, ZkNoNode)):
                    continue  # Another writer was faster.
                if isinstance(error.cause, ZkNodeExists):
                    raise BrokerError(ErrorCode.DUPLICATE_RESOURCE, f"delegation token {token_id}") from None
                raise
            return int(results[0])

    async def _read(self, token_id: str) -> StoredToken | None:
        path = _path(token_id)
        try:
            return (await self._read_node(path))[0]
        except ZkNoNode:
            return None
        except (codecs.ZkFormatError, ConfigError) as error:
            self._unreadable.skip(path, error)
            return None

    async def _read_node(self, path: str) -> tuple[StoredToken, int]:
        node = await self._session.get(path)
        found = decode_secret(path, node.data, _TokenNode)
        if found.token.scope is not None:
            checked_scope(found.token.scope)  # A later release may have other operations.
        credentials = {name: decode_credential(name, text) for name, text in found.credentials.items()}
        return StoredToken(found.token, credentials), node.version


def _path(token_id: str) -> str:
    return f"{paths.TOKENS}/{token_id}"


def _encoded(stored: StoredToken) -> bytes:
    credentials = {name: encode_credential(one) for name, one in stored.credentials.items()}
    return codecs.encode(_TokenNode(stored.token, credentials))
