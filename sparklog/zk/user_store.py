"""The SCRAM credentials of users in ZooKeeper, in Kafka's format.

Each user has a node ``/config/users/<name>`` with the quoted name. Its value is Kafka's JSON object. A write of
credentials keeps all other keys in the object's ``config``. If nodes are protected, only sessions that have proved an
identity to ZooKeeper can read these nodes (``paths.is_secret``).

Every write also updates the index, the value of the node ``/config/users``. The index has the names of the users that
changed last, and the secret from which brokers derive the credentials of unknown users. Its version grows by one with
each change of a user. So a broker that watches the index reads only the users that have changed. Each write is a
compare-and-set on the index.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, unquote

import msgspec

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.sasl import SCRAM_MECHANISMS
from sparklog.protocol.scram import ScramCredential, check_credential
from sparklog.zk import codecs, paths
from sparklog.zk.errors import ZkBadVersion, ZkMultiFailed, ZkNodeExists, ZkNoNode
from sparklog.zk.ops import Create, Delete, Op, SetData
from sparklog.zk.session import Node, ZkSession
from sparklog.zk.unreadable import Unreadable

_T = TypeVar("_T", bound=msgspec.Struct)
#: The credentials of one user, by mechanism.
Credentials = Mapping[str, ScramCredential]
#: The number of nodes that one read operation requests.
_AT_ONCE = 1000
#: The number of changes in the index. A broker that has missed more changes reads all users.
_REMEMBERED = 100
#: The length of the secret from which brokers derive the credentials of unknown users.
KEY_BYTES = 32


class UserIndex(msgspec.Struct, frozen=True):
    """The value of ``/config/users``. ``changed`` has the names of the last changed users, the newest change last."""

    version: int = codecs.VERSION
    changed: Annotated[tuple[str, ...], msgspec.Meta(max_length=10_000)] = ()
    unknown_users_key: bytes = b""

    def __repr__(self) -> str:
        return f"UserIndex(changed={len(self.changed)})"


class _UserNode(msgspec.Struct, frozen=True):
    config: dict[str, Any] = {}
    version: int = codecs.VERSION


def user_path(name: str) -> str:
    """Return the path of a user's node. Different names have different paths."""
    quoted = quote(name, safe="")
    # ZooKeeper allows no node of these names.
    return f"{paths.USERS}/{quoted.replace('.', '%2E') if quoted in {'.', '..'} else quoted}"


def decode_index(node: Node | None) -> UserIndex:
    """Decode the index. If ``node`` is None, the node does not exist, and the index is empty. Raises ZkFormatError."""
    if node is None or not node.data:
        return UserIndex()
    return decode_secret(paths.USERS, node.data, UserIndex)


def decode_secret(path: str, data: bytes, kind: type[_T]) -> _T:
    """Decode the value of the node ``path``. Raises ZkFormatError, which does not quote the value of a secret node."""
    try:
        return codecs.decode(path, data, kind)
    except codecs.ZkFormatError as error:
        what = "a newer format" if error.newer else "not a value of this node"
        raise codecs.ZkFormatError(f"ZooKeeper node {path}: {what}", newer=error.newer) from None


def encode_credential(credential: ScramCredential) -> str:
    """Encode a credential as the text that Kafka stores in ZooKeeper."""
    parts = {
        "salt": credential.salt,
        "stored_key": credential.stored_key,
        "server_key": credential.server_key,
    }
    encoded = [f"{name}={base64.b64encode(value).decode()}" for name, value in parts.items()]
    return ",".join([*encoded, f"iterations={credential.iterations}"])


def decode_credential(mechanism: str, text: str) -> ScramCredential:
    """Parse the text that Kafka stores for a credential. Raises ConfigError, which does not quote the text."""
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    try:
        salt, stored_key, server_key = (
            base64.b64decode(parts[name], validate=True) for name in ("salt", "stored_key", "server_key")
        )
        iterations = int(parts["iterations"])
    except (KeyError, ValueError, binascii.Error):
        raise ConfigError("expected salt, stored_key, server_key and iterations of a credential") from None
    return check_credential(mechanism, ScramCredential(salt, iterations, stored_key, server_key))


class UserStore:
    """A store of the users' SCRAM credentials in ZooKeeper, over one session.

    The store keeps no copy of the credentials. It counts and logs nodes that this release cannot read.
    """

    def __init__(self, session: ZkSession, unreadable: Unreadable) -> None:
        self._session = session
        self._unreadable = unreadable

    def watch(self, on_index: Callable[[Node | None], None]) -> Callable[[], None]:
        """Call ``on_index`` with the index node ``/config/users``, now and after every change and every reconnection.

        Return a function that ends the watch.
        """
        return self._session.watch_data(paths.USERS, on_index)

    async def all_users(self) -> dict[str, Credentials]:
        """Return the credentials of all users that have any. Raises ZkError."""
        try:
            names = [unquote(name) for name in await self._session.children(paths.USERS)]
        except ZkNoNode:
            return {}
        found: dict[str, Credentials] = {}
        for first in range(0, len(names), _AT_ONCE):
            found |= await self.users(names[first : first + _AT_ONCE])
        return found

    async def users(self, names: Iterable[str]) -> dict[str, Credentials]:
        """Return the credentials of the named users. Omit users that have none. Raises ZkError."""
        wanted = list(dict.fromkeys(names))
        found = await asyncio.gather(*map(self._credentials, wanted))
        return {name: credentials for name, credentials in zip(wanted, found, strict=True) if credentials}

    async def synchronised(self) -> None:
        """Wait until the ZooKeeper server has caught up, so that later reads see all earlier writes. Raises ZkError."""
        await self._session.sync(paths.USERS)

    async def alter(self, name: str, changes: Mapping[str, ScramCredential | None], *, new_key: bytes) -> int:
        """Change credentials of one user. Return the new version of the index.

        ``changes`` maps a mechanism to the new credential, or to None to delete the credential. If the index has no
        secret for the credentials of unknown users yet, ``new_key`` becomes this secret.

        Raises:
            BrokerError: RESOURCE_NOT_FOUND, a credential to delete does not exist. Nothing was changed.
            ZkError: with ZkUnreachable the outcome may be unknown. The call may be repeated.
        """
        await self._session.ensure(paths.CONFIG)
        await self._session.ensure(paths.USERS)
        while True:
            root = await self._session.get(paths.USERS)
            index = decode_index(root)
            op = await self._change(name, changes)
            wanted = msgspec.structs.replace(
                index,
                changed=(*index.changed, name)[-_REMEMBERED:],
                unknown_users_key=index.unknown_users_key or new_key,
            )
            # The index is first, so that ZooKeeper checks its version before it checks the user's node.
            ops: list[Op] = [SetData(paths.USERS, codecs.encode(wanted), root.version), op]
            try:
                version = (await self._session.multi(ops))[0]
            except ZkMultiFailed as error:
                if isinstance(error.cause, (ZkBadVersion, ZkNodeExists, ZkNoNode)):
                    continue  # Another writer was faster.
                raise
            return int(version)

    async def _change(self, name: str, changes: Mapping[str, ScramCredential | None]) -> Op:
        """Return the write operation for the user's node that makes these changes."""
        path = user_path(name)
        node: Node | None = None
        with suppress(ZkNoNode):
            node = await self._session.get(path)
        found = _UserNode() if node is None or not node.data else decode_secret(path, node.data, _UserNode)
        missing = [mechanism for mechanism, wanted in changes.items() if not wanted and mechanism not in found.config]
        if missing:
            raise BrokerError(ErrorCode.RESOURCE_NOT_FOUND, f"user {name!r} has no credential for {missing[0]}")
        config = {key: value for key, value in found.config.items() if changes.get(key, "") is not None}
        config |= {mechanism: encode_credential(wanted) for mechanism, wanted in changes.items() if wanted is not None}
        data = codecs.encode(msgspec.structs.replace(found, config=config))
        if node is None:
            return Create(path, data)
        if config or await self._session.children(path):
            return SetData(path, data, node.version)
        return Delete(path, node.version)

    async def _credentials(self, name: str) -> Credentials:
        path = user_path(name)
        try:
            node = await self._session.get(path)
        except ZkNoNode:
            return {}
        try:
            config = decode_secret(path, node.data, _UserNode).config if node.data else {}
        except codecs.ZkFormatError as error:
            self._unreadable.skip(path, error)
            return {}
        found: dict[str, ScramCredential] = {}
        for mechanism in SCRAM_MECHANISMS:
            if mechanism not in config:
                continue
            try:
                found[mechanism] = decode_credential(mechanism, str(config[mechanism]))
            except ConfigError as error:
                self._unreadable.skip(path, f"{mechanism}: {error}")
        return found
