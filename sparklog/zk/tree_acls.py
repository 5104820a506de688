"""The functions that close and open all existing nodes of a cluster, while the cluster runs.

ZooKeeper nodes do not inherit ACLs. So these functions walk through the tree, and set the ACL of each node that has a
different one. An interrupted walk may be repeated. ``security`` defines closed, open and secret nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from sparklog.errors import ClusterError
from sparklog.zk import paths
from sparklog.zk.errors import ZkNoAuth, ZkNoNode
from sparklog.zk.kazoo_patches import OPEN_ENTRIES, READ_BY_ALL, AclEntry
from sparklog.zk.session import ZkSession

Acl = frozenset[AclEntry]
#: The number of nodes whose ACLs are read and set concurrently.
_AT_ONCE = 1000
#: The maximum number of walks of ``close_tree``. After these walks ``close_tree`` returns, even if it still finds open
#: nodes.
_MOST_WALKS = 5
#: The prefix of a temporary node. From its ACL a session learns how ZooKeeper represents the session's credentials.
_SAMPLE = "/cluster/acl-"
#: The node that ZooKeeper itself creates. It does not belong to the cluster.
_NOT_OURS = "/zookeeper"


class TreeCount(NamedTuple):
    """The result of ``close_tree`` or ``open_tree``: numbers of nodes.

    ``nodes`` is the number of visited nodes, and ``changed`` the number of changes of ACLs. ``found_open`` is the
    number of nodes that sessions without credentials could still change when the last walk of ``close_tree`` came to
    them. ``found_open`` is 0 after ``open_tree``.
    """

    nodes: int = 0
    changed: int = 0
    found_open: int = 0


async def close_tree(
    session: ZkSession, *, roots: Sequence[str] = ("/",), progress: Callable[[int], None] | None = None
) -> TreeCount:
    """Restrict the ACLs of all nodes at and below ``roots`` to the credentials of ``session``.

    Sessions without these credentials cannot change the nodes. They may read the nodes, but not the secret nodes.
    ``session`` must have credentials (``closes_nodes``).
    The walk is repeated until it finds no open node, because other sessions may create open nodes meanwhile. If
    ``found_open`` in the result is not 0, another session keeps creating open nodes. ``progress`` is called with the
    number of nodes visited so far.

    Raises:
      ZkNoAuth: this session may not change a node's ACL.
      ZkUnreachable: the connection broke. The caller may repeat the call.
    """
    assert session.closes_nodes
    own = await _own_entries(session)
    closed, secret = own | READ_BY_ALL, own
    opened = changed = 0

    async def close(path: str) -> bool:
        nonlocal opened, changed
        wanted = secret if paths.is_secret(path) else closed
        found = await session.acl(path)
        if found != wanted:
            opened += not _keeps_out(found, path)
            await session.set_entries(path, wanted)
            changed += 1
        return True

    for _ in range(_MOST_WALKS):
        opened = 0
        nodes = await _walk(session, roots, close, progress)
        if not opened:
            break
    return TreeCount(nodes, changed, opened)


async def open_tree(
    session: ZkSession,
    *,
    roots: Sequence[str] = ("/",),
    with_secrets: bool = False,
    progress: Callable[[int], None] | None = None,
) -> TreeCount:
    """Set the ACLs of all nodes at and below ``roots`` so that every session may do everything with them.

    Without ``with_secrets`` the secret nodes keep their ACLs, and are not counted. Raises the same errors as
    ``close_tree``.
    """
    changed = 0

    async def open_node(path: str) -> bool:
        nonlocal changed
        if paths.is_secret(path) and not with_secrets:
            return False
        if await session.acl(path) != OPEN_ENTRIES:
            await session.set_entries(path, OPEN_ENTRIES)
            changed += 1
        return True

    nodes = await _walk(session, roots, open_node, progress)
    return TreeCount(nodes, changed)


async def roots_of(session: ZkSession) -> tuple[str, ...]:
    """Return the paths of the topmost nodes of the cluster. Other programs may use the same ZooKeeper.

    With a chroot, the only path is the chroot itself. Otherwise the paths are the children of the root that belong to
    the cluster.
    """
    if session.has_chroot:
        return ("/",)
    return tuple(f"/{name}" for name in await session.children("/") if f"/{name}" in paths.TOP)


async def processes_with_open_nodes(session: ZkSession) -> tuple[str, ...]:
    """Return the names of the processes (brokers, controller, driver) whose registration nodes any session may change.

    Such a process does not restrict the ACLs of the nodes that it creates, and may have no credentials for ZooKeeper.
    """
    return await _processes(session, lambda acl: acl >= OPEN_ENTRIES)


async def processes_with_closed_nodes(session: ZkSession) -> tuple[str, ...]:
    """Return the names of the processes (brokers, controller, driver) whose registration nodes have a restricted ACL.

    Such a process restricts the ACLs of the nodes that it creates.
    """
    return await _processes(session, lambda acl: not acl >= OPEN_ENTRIES)


async def check_identities(session: ZkSession) -> None:
    """Check that the running processes of the cluster have the same ZooKeeper credentials as this session.

    Raises:
      ClusterError: a process has other credentials. It could not change nodes whose ACL this session restricts.
    """
    own = await _own_entries(session)

    def differs(acl: Acl) -> bool:
        identities = frozenset(entry for entry in acl if not entry.is_for_all)
        return bool(identities) and not identities & own

    if others := await _processes(session, differs):
        raise ClusterError(
            f"{', '.join(others)}: they do not have the credentials of this command, so nodes that it closes would be"
            " closed to them"
        )


async def _processes(session: ZkSession, has: Callable[[Acl], bool]) -> tuple[str, ...]:
    named = {paths.CONTROLLER: "the controller", paths.DRIVER: "the driver"}
    try:
        ids = sorted(await session.children(paths.BROKER_IDS), key=lambda text: (len(text), text))
    except ZkNoNode:
        ids = []
    named = {f"{paths.BROKER_IDS}/{broker_id}": f"broker {broker_id}" for broker_id in ids} | named
    acls = await asyncio.gather(*(session.acl(path) for path in named), return_exceptions=True)
    found = []
    for name, acl in zip(named.values(), acls, strict=True):
        if isinstance(acl, ZkNoNode):
            continue
        if isinstance(acl, BaseException):
            raise acl
        if has(acl):
            found.append(name)
    return tuple(found)


async def _own_entries(session: ZkSession) -> Acl:
    """Return the ACL entries that ZooKeeper creates from the credentials of this session.

    Each process has its own certificate. So if the session has a digest too, return only the entries of the digest.
    Raises ZkNoAuth.
    """
    try:
        path = await session.create(_SAMPLE, ephemeral=True, sequence=True)
    except ZkNoAuth:
        raise ZkNoAuth(_SAMPLE.rpartition("/")[0]) from None
    found = frozenset(entry for entry in await session.acl(path) if not entry.is_for_all)
    await session.delete(path)
    return frozenset(entry for entry in found if entry.scheme == "digest") or found


def _keeps_out(acl: Acl, path: str) -> bool:
    """Return whether sessions without credentials cannot change the node, and cannot read it if it is secret."""
    for_all = frozenset(entry for entry in acl if entry.is_for_all)
    return not for_all if paths.is_secret(path) else for_all <= READ_BY_ALL


async def _walk(
    session: ZkSession,
    roots: Sequence[str],
    visit: Callable[[str], Awaitable[bool]],
    progress: Callable[[int], None] | None,
) -> int:
    """Visit all nodes, parents before children, and return the number of visited nodes.

    If ``visit`` returns false for a node, do not count this node, and do not visit the nodes below it.
    """

    async def enter(path: str) -> list[str] | None:
        try:
            if not await visit(path):
                return None
            names = await session.children(path)
        except ZkNoNode:
            return None
        except ZkNoAuth:
            raise ZkNoAuth(path) from None
        children = [f"{path.rstrip('/')}/{name}" for name in names]
        return [child for child in children if child != _NOT_OURS]

    nodes = 0
    level = list(roots)
    while level:
        below: list[str] = []
        for first in range(0, len(level), _AT_ONCE):
            for children in await asyncio.gather(*(enter(path) for path in level[first : first + _AT_ONCE])):
                if children is not None:
                    nodes += 1
                    below += children
            if progress is not None:
                progress(nodes)
        level = below
    return nodes
