"""The quotas of clients in ZooKeeper, in the nodes in which Kafka stores them.

The nodes are ``/config/users/<user>``, ``/config/clients/<client id>``, ``/config/users/<user>/clients/<client id>``
and ``/config/ips/<address>``. A name is quoted, and ``<default>`` stands for the default entity. The value is Kafka's
JSON object, whose ``config`` has the quotas as text. In the node of a user, ``config`` may also have the user's
credentials. A write of quotas keeps them.

Every write also updates the index, the value of the node ``/config/quotas``. The index has all entities with quotas,
and the entities of the last changes. Its version grows by one with each change. So a broker that watches the index
reads only the nodes that have changed. Each write is a compare-and-set on the index and on the entity's node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from sparklog.errors import BrokerError, ErrorCode
from sparklog.security.quotas import DEFAULT, QUOTA_NAMES, QuotaEntity, QuotaValues, check_quota
from sparklog.zk import codecs, paths
from sparklog.zk.errors import ZkBadVersion, ZkMultiFailed, ZkNodeExists, ZkNoNode, ZkNotEmpty
from sparklog.zk.ops import Create, Delete, Op, SetData
from sparklog.zk.session import Node, ZkSession
from sparklog.zk.unreadable import Unreadable
from sparklog.zk.user_store import decode_secret

_DEFAULT_NODE = "<default>"
#: The number of nodes that one read operation requests.
_AT_ONCE = 1000
#: The number of changes in the index. A broker that has missed more changes reads all quotas.
_REMEMBERED = 100
#: The maximum number of entities with quotas in a cluster. The number is bounded because the index is one node.
MAX_ENTITIES = 5_000
#: The maximum size of the index. ZooKeeper closes the connection if a request has 1 MB.
_MAX_INDEX_BYTES = 900_000


class QuotaIndex(msgspec.Struct, frozen=True):
    """The value of ``/config/quotas``: the entities with quotas, and the entities of the last changes.

    The newest change is the last in ``changed``.
    """

    entities: tuple[QuotaEntity, ...] = ()
    changed: Annotated[tuple[QuotaEntity, ...], msgspec.Meta(max_length=10_000)] = ()
    version: int = codecs.VERSION


class _ConfigNode(msgspec.Struct, frozen=True):
    config: dict[str, Any] = {}
    version: int = codecs.VERSION


def quota_path(entity: QuotaEntity) -> str:
    """Return the path of the entity's node. Different entities have different paths."""
    if entity.ip is not None:
        return f"{paths.QUOTAS_OF_ADDRESSES}/{_node_name(entity.ip)}"
    if entity.user is None:
        return f"{paths.QUOTAS_OF_CLIENTS}/{_node_name(entity.client_id or DEFAULT)}"
    of_user = f"{paths.USERS}/{_node_name(entity.user)}"
    return of_user if entity.client_id is None else f"{of_user}/clients/{_node_name(entity.client_id)}"


def _node_name(name: str) -> str:
    if name == DEFAULT:
        return _DEFAULT_NODE
    quoted = quote(name, safe="")
    # ZooKeeper allows no node of these names.
    return quoted.replace(".", "%2E") if quoted in {".", ".."} else quoted


def decode_index(node: Node | None) -> QuotaIndex:
    """Decode the index. If ``node`` is None, the node does not exist, and the index is empty. Raises ZkFormatError."""
    if node is None or not node.data:
        return QuotaIndex()
    return codecs.decode(paths.QUOTAS, node.data, QuotaIndex)


class QuotaStore:
    """A store of the quotas in ZooKeeper, over one session.

    The store keeps no copy of the quotas. It counts and logs nodes that this release cannot read.
    """

    def __init__(self, session: ZkSession, unreadable: Unreadable) -> None:
        self._session = session
        self._unreadable = unreadable

    def watch(self, on_index: Callable[[Node | None], None]) -> Callable[[], None]:
        """Call ``on_index`` with the index node ``/config/quotas``, now and after every change and every reconnection.

        Return a function that ends the watch.
        """
        return self._session.watch_data(paths.QUOTAS, on_index)

    async def read(
        self,
        node: Node | None,
        known: Mapping[QuotaEntity, QuotaValues] | None = None,
        changed: Set[QuotaEntity] | None = None,
    ) -> dict[QuotaEntity, QuotaValues]:
        """Return all quotas. ``node`` is the index node ``/config/quotas`` as read, or None if it does not exist.

        With ``changed`` read only the quotas of these entities, and take the quotas of all other entities from
        ``known``. Raises ZkError.
        """
        entities = frozenset(decode_index(node).entities)
        if known is None or changed is None:
            return await self._values(entities)
        kept = {entity: values for entity, values in known.items() if entity in entities - changed}
        return {**kept, **await self._values(entities & changed)}

    async def index(self) -> Node | None:
        """Return the index node with all writes that completed before the call, or None if there is none.

        Raises ZkError.
        """
        await self._session.sync(paths.CONFIG)
        try:
            return await self._session.get(paths.QUOTAS)
        except ZkNoNode:
            return None

    async def current(self) -> dict[QuotaEntity, QuotaValues]:
        """Return all quotas, including all writes that completed before the call. Raises ZkError."""
        return await self.read(await self.index())

    async def alter(self, entity: QuotaEntity, changes: Mapping[str, float | None]) -> int:
        """Change quotas of one entity. Return the new version of the index.

        ``changes`` maps the name of a quota to its new value, or to None to remove the quota. Removing a quota that
        does not exist has no effect.

        Raises:
            BrokerError: INVALID_CONFIG, there are too many entities with quotas.
            ZkError: with ZkUnreachable the outcome may be unknown. The call may be repeated.
        """
        await self._session.ensure(paths.CONFIG)
        await self._session.ensure(paths.QUOTAS)
        while True:
            for parent in _parents(entity):
                await self._session.ensure(parent)
            root = await self._session.get(paths.QUOTAS)
            op, has_quotas = await self._change(entity, changes)
            index = _indexed(decode_index(root), entity, has_quotas=has_quotas)
            try:
                version = (await self._session.multi([SetData(paths.QUOTAS, index, root.version), op]))[0]
            except ZkMultiFailed as error:
                if isinstance(error.cause, (ZkBadVersion, ZkNodeExists, ZkNoNode, ZkNotEmpty)):
                    continue  # Another writer was faster.
                raise
            if isinstance(op, Delete):
                await self._remove_containers(entity)
            return int(version)

    async def _remove_containers(self, entity: QuotaEntity) -> None:
        """Delete the empty parent nodes of the user's client ids, after the last client id has lost its quotas."""
        if entity.user is None or entity.client_id is None:
            return
        of_user = quota_path(QuotaEntity(entity.user))
        with suppress(ZkNoNode, ZkMultiFailed, codecs.ZkFormatError):
            node = await self._session.get(of_user)
            ops: list[Op] = [Delete(f"{of_user}/clients")]
            if not node.data or not decode_secret(of_user, node.data, _ConfigNode).config:
                ops.append(Delete(of_user, node.version))
            await self._session.multi(ops)

    async def _change(self, entity: QuotaEntity, changes: Mapping[str, float | None]) -> tuple[Op, bool]:
        """Return the write operation for the entity's node, and whether the entity has quotas after the write."""
        path = quota_path(entity)
        node: Node | None = None
        with suppress(ZkNoNode):
            node = await self._session.get(path)
        found = decode_secret(path, node.data, _ConfigNode) if node is not None and node.data else _ConfigNode()
        config = {key: value for key, value in found.config.items() if key not in changes}
        config |= {name: _text(value) for name, value in changes.items() if value is not None}
        has_quotas = not config.keys().isdisjoint(QUOTA_NAMES)
        data = codecs.encode(msgspec.structs.replace(found, config=config))
        if node is None:
            return Create(path, data), has_quotas
        if config or await self._session.children(path):
            return SetData(path, data, node.version), has_quotas
        return Delete(path, node.version), has_quotas

    async def _values(self, entities: Iterable[QuotaEntity]) -> dict[QuotaEntity, QuotaValues]:
        wanted = list(entities)
        found: dict[QuotaEntity, QuotaValues] = {}
        for first in range(0, len(wanted), _AT_ONCE):
            some = wanted[first : first + _AT_ONCE]
            found |= zip(some, await asyncio.gather(*map(self._read_one, some)), strict=True)
        return {entity: values for entity, values in found.items() if values}

    async def _read_one(self, entity: QuotaEntity) -> QuotaValues:
        path = quota_path(entity)
        try:
            node = await self._session.get(path)
            config = decode_secret(path, node.data, _ConfigNode).config if node.data else {}
        except ZkNoNode:
            return {}
        except codecs.ZkFormatError as error:
            self._unreadable.skip(path, error)
            return {}
        values: dict[str, float] = {}
        for name in QUOTA_NAMES:
            if name in config:
                try:
                    values[name] = float(config[name])
                    check_quota(entity, name, values[name])
                except (TypeError, ValueError, BrokerError) as error:
                    values.pop(name, None)
                    self._unreadable.skip(path, f"{name}: {error}")
        return values


def _parents(entity: QuotaEntity) -> tuple[str, ...]:
    """Return the paths of the parents of the entity's node, the highest first."""
    if entity.ip is not None:
        return paths.CONFIG, paths.QUOTAS_OF_ADDRESSES
    if entity.user is None:
        return paths.CONFIG, paths.QUOTAS_OF_CLIENTS
    if entity.client_id is None:
        return paths.CONFIG, paths.USERS
    of_user = quota_path(QuotaEntity(entity.user))
    return paths.CONFIG, paths.USERS, of_user, f"{of_user}/clients"


def _indexed(index: QuotaIndex, entity: QuotaEntity, *, has_quotas: bool) -> bytes:
    """Return the value of the index after a change of this entity."""
    entities = [known for known in index.entities if known != entity] + [entity] * has_quotas
    encoded = codecs.encode(
        msgspec.structs.replace(
            index, entities=tuple(sorted(entities, key=str)), changed=(*index.changed, entity)[-_REMEMBERED:]
        )
    )
    if has_quotas and (len(entities) > MAX_ENTITIES or len(encoded) > _MAX_INDEX_BYTES):
        detail = f"{len(entities)} entities would have quotas, at most {MAX_ENTITIES} may; long names count for more"
        raise BrokerError(ErrorCode.INVALID_CONFIG, detail)
    return encoded


def _text(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)
