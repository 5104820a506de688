"""The ACLs of the cluster in ZooKeeper.

Each resource pattern with ACLs has a node ``/acls/<type>:<pattern type>:<quoted name>``. Its value has the field names
of Kafka's ACL nodes. Every write also updates the node ``/acls_changes``. The value of this node has the names of the
ACL nodes that changed last, and its version grows by one with each change. So a broker that watches this node reads
only the ACLs that have changed. Each write is a compare-and-set on the pattern's node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Annotated
from urllib.parse import quote, unquote

import msgspec

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.security.acls import AclBinding, AclFilter, ResourcePattern, binding
from sparklog.zk import codecs, paths
from sparklog.zk.errors import ZkBadVersion, ZkMultiFailed, ZkNodeExists, ZkNoNode
from sparklog.zk.ops import Create, Delete, Op, SetData
from sparklog.zk.session import Node, ZkSession
from sparklog.zk.unreadable import Unreadable

#: The number of nodes that one read operation requests.
_AT_ONCE = 1000
#: The number of changes in ``/acls_changes``. A broker that has missed more changes reads all ACLs.
_REMEMBERED = 50
#: The maximum number of ACLs of one resource pattern. This limit keeps the pattern's node below 1 MB, even with long
#: principals.
MOST_OF_PATTERN = 500


class _AclRule(msgspec.Struct, frozen=True):
    principal: str
    operation: str
    permissionType: str  # noqa: N815 - Kafka's field name
    host: str = "*"


class _AclNode(msgspec.Struct, frozen=True):
    acls: tuple[_AclRule, ...]
    version: int = codecs.VERSION


class AclChanges(msgspec.Struct, frozen=True):
    """The value of ``/acls_changes``. ``changed`` has the names of the last changed nodes, the newest change last."""

    version: int = codecs.VERSION
    changed: Annotated[tuple[str, ...], msgspec.Meta(max_length=10_000)] = ()


def node_name(pattern: ResourcePattern) -> str:
    """Return the name of the node for a resource pattern. Different patterns have different names."""
    return f"{pattern.resource_type}:{pattern.pattern_type}:{quote(pattern.name, safe='')}"


def decode_changes(node: Node | None) -> AclChanges:
    """Decode the last changes from ``/acls_changes``.

    If ``node`` is None, the node does not exist, and there are no changes. Raises ZkFormatError.
    """
    return AclChanges() if node is None or not node.data else codecs.decode(paths.ACL_CHANGES, node.data, AclChanges)


def encode_acls(acls: Iterable[AclBinding]) -> bytes:
    """Encode the value of an ACL node. The ACLs must all have the same resource pattern."""
    rules = (_AclRule(str(acl.principal), acl.operation.value, acl.permission.value, acl.host) for acl in acls)
    return codecs.encode(_AclNode(tuple(rules)))


def decode_acls(name: str, data: bytes) -> frozenset[AclBinding]:
    """Decode the ACLs in the value of the node with this name.

    Raises:
        ZkFormatError: the name or the value is not that of an ACL node, or this release does not know one of its ACLs.
    """
    path = f"{paths.ACLS}/{name}"
    resource_type, _, rest = name.partition(":")
    pattern_type, _, quoted = rest.partition(":")
    found = codecs.decode(path, data, _AclNode)
    try:
        return frozenset(
            binding(
                resource_type,
                unquote(quoted),
                rule.principal,
                rule.operation,
                host=rule.host,
                permission=rule.permissionType,
                pattern_type=pattern_type,
            )
            for rule in found.acls
        )
    except ConfigError as error:
        raise codecs.ZkFormatError(f"ZooKeeper node {path}: {error}") from None


def _nothing_allowed(name: str) -> frozenset[AclBinding]:
    """Return ACLs in place of those of an unreadable node. They deny its resources to every principal.

    The node may contain an ACL that denies, so to ignore the node would be unsafe. If its name is not readable either,
    return no ACLs.
    """
    resource_type, _, rest = name.partition(":")
    pattern_type, _, quoted = rest.partition(":")
    with suppress(ConfigError):
        resource = unquote(quoted)
        return frozenset(
            {binding(resource_type, resource, "User:*", "All", permission="Deny", pattern_type=pattern_type)}
        )
    return frozenset()


class AclStore:
    """A store of the cluster's ACLs in ZooKeeper, over one session.

    The store keeps no copy of the ACLs. It counts and logs nodes that this release cannot read.
    """

    def __init__(self, session: ZkSession, unreadable: Unreadable) -> None:
        self._session = session
        self._unreadable = unreadable

    def watch(self, on_changes: Callable[[Node | None], None]) -> Callable[[], None]:
        """Call ``on_changes`` with the node ``/acls_changes``, now and after every change and every reconnection.

        Return a function that ends the watch.
        """
        return self._session.watch_data(paths.ACL_CHANGES, on_changes)

    async def read_all(self) -> dict[str, frozenset[AclBinding]]:
        """Return the ACLs of all nodes, by the name of the node. Raises ZkError.

        For an unreadable node, return an ACL that denies every access to the node's resources.
        """
        try:
            names = await self._session.children(paths.ACLS)
        except ZkNoNode:
            return {}
        found: dict[str, frozenset[AclBinding]] = {}
        for first in range(0, len(names), _AT_ONCE):
            found |= await self.read(names[first : first + _AT_ONCE])
        return found

    async def read(self, names: Iterable[str]) -> dict[str, frozenset[AclBinding]]:
        """Return the ACLs of the nodes with these names. A node that does not exist has no ACLs. Raises ZkError.

        For an unreadable node, return an ACL that denies every access to the node's resources.
        """
        wanted = list(dict.fromkeys(names))
        found = await asyncio.gather(*map(self._read_one, wanted))
        return dict(zip(wanted, found, strict=True))

    async def _read_one(self, name: str) -> frozenset[AclBinding]:
        try:
            node = await self._session.get(f"{paths.ACLS}/{name}")
        except ZkNoNode:
            return frozenset()
        try:
            return decode_acls(name, node.data)
        except codecs.ZkFormatError as error:
            self._unreadable.skip(f"{paths.ACLS}/{name}", error)
            return _nothing_allowed(name)

    async def add(self, acls: Iterable[AclBinding]) -> int:
        """Add ACLs, and return the version of ``/acls_changes`` after the last write.

        Raises:
            BrokerError: INVALID_REQUEST, a pattern would have too many ACLs. The ACLs of earlier patterns are stored.
            ZkFormatError: this release cannot read a node. The node is not overwritten.
            ZkError: with ZkUnreachable the outcome may be unknown. The call may be repeated.
        """
        by_pattern: dict[ResourcePattern, set[AclBinding]] = {}
        for acl in acls:
            by_pattern.setdefault(acl.pattern, set()).add(acl)
        version = -1
        for pattern, added in sorted(by_pattern.items()):
            version = await self._change(node_name(pattern), added=frozenset(added))
        return version

    async def remove(self, conditions: Iterable[AclFilter]) -> tuple[frozenset[AclBinding], int]:
        """Remove all ACLs that satisfy at least one of the conditions.

        Return the removed ACLs, and the version of ``/acls_changes`` after the last write. Raises the same errors as
        ``add``.
        """
        accepted = tuple(conditions)
        removed: set[AclBinding] = set()
        version = -1
        for name, acls in sorted((await self.read_all()).items()):
            await asyncio.sleep(0)  # the comparisons of one node may take long
            unwanted = frozenset(acl for acl in acls if any(condition.accepts(acl) for condition in accepted))
            if unwanted:
                version = await self._change(name, removed=unwanted)
                removed |= unwanted
        return frozenset(removed), version

    async def _change(
        self,
        name: str,
        *,
        added: frozenset[AclBinding] = frozenset(),
        removed: frozenset[AclBinding] = frozenset(),
    ) -> int:
        path = f"{paths.ACLS}/{name}"
        await self._session.ensure(paths.ACLS)
        await self._session.ensure(paths.ACL_CHANGES)
        while True:
            changes = await self._session.get(paths.ACL_CHANGES)
            node: Node | None = None
            with suppress(ZkNoNode):
                node = await self._session.get(path)
            known = decode_acls(name, node.data) if node is not None else frozenset()
            wanted = (known | added) - removed
            if wanted == known:
                return changes.version
            if len(wanted) > MOST_OF_PATTERN:
                detail = f"{len(wanted)} ACLs found for one resource pattern, at most {MOST_OF_PATTERN} expected"
                raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
            changed = (*decode_changes(changes).changed, name)[-_REMEMBERED:]
            ops = [
                SetData(paths.ACL_CHANGES, codecs.encode(AclChanges(changed=changed)), changes.version),
                _write(path, node, wanted),
            ]
            try:
                return int((await self._session.multi(ops))[0])
            except ZkMultiFailed as error:
                # Otherwise another writer was faster.
                if not isinstance(error.cause, (ZkBadVersion, ZkNodeExists, ZkNoNode)):
                    raise


def _write(path: str, node: Node | None, wanted: frozenset[AclBinding]) -> Op:
    if node is None:
        return Create(path, encode_acls(sorted(wanted)))
    return SetData(path, encode_acls(sorted(wanted)), node.version) if wanted else Delete(path, node.version)


def merge(
    known: Mapping[str, frozenset[AclBinding]], read: Mapping[str, frozenset[AclBinding]]
) -> dict[str, frozenset[AclBinding]]:
    """Return ``known`` updated with the nodes in ``read``. Both map the name of a node to its ACLs."""
    return {name: acls for name, acls in {**known, **read}.items() if acls}
