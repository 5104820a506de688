"""The protection of the cluster's own ZooKeeper against writes by sessions without the cluster's secret.

Every node has an ACL under which sessions with the secret may do everything, and other sessions may only read.
ZooKeeper's ACLs are not inherited. Therefore the driver that creates the node ``PROTECTED`` sets the ACLs of all
existing nodes, and every session that sees this node creates its own nodes with the ACL. Nothing secret is stored in
ZooKeeper.

The password is derived from the secret for this purpose only. It is not sent to a ZooKeeper without the node
``PROTECTED``.
"""

from __future__ import annotations

import asyncio

from sparklog.errors import ClusterError
from sparklog.protocol.proof import KeyRing
from sparklog.zk import paths
from sparklog.zk.errors import ZkNoAuth, ZkNoNode
from sparklog.zk.session import ZkSession

#: The number of nodes whose ACLs are set at a time.
_AT_ONCE = 1000
#: ZooKeeper's own node.
_NOT_OURS = "/zookeeper"


async def is_fresh(session: ZkSession) -> bool:
    """Return whether no broker has ever registered."""
    try:
        return not await session.children(paths.INCARNATIONS)
    except ZkNoNode:
        return True


async def protect(session: ZkSession, keys: KeyRing) -> None:
    """Protect this ZooKeeper against sessions that do not know one of ``keys``.

    If ``keys`` has a single secret and the protection for it is complete, nothing happens. If an earlier call was
    interrupted, the ACLs of all nodes are set again.

    Raises:
      ClusterError: ZooKeeper is protected by another secret. ZkUnreachable: the connection broke; the caller may repeat
      the call.
    """
    wanted = ",".join(secret.key_id for secret in keys.secrets).encode()
    await session.authenticate()
    try:
        await session.ensure("/cluster")
        await session.ensure(paths.PROTECTED)
        # While the secret is being changed, sessions that know only the old secret still create nodes that only it
        # opens. So do not stop here.
        if (await session.get(paths.PROTECTED)).data == wanted and len(keys.secrets) == 1:
            return
        # Walk through all nodes twice. Where the first walk has passed, other sessions may still create nodes without
        # the ACL until they see the node ``PROTECTED``. The second walk finds these.
        for _ in range(2):
            await _walk(session)
        await session.set(paths.PROTECTED, wanted)
    except ZkNoAuth:
        raise ClusterError(
            f"ZooKeeper at {session.connect_string} is protected by a cluster secret other than {wanted.decode()},"
            " the one of this driver: restore its file cluster.secret, or start once with skipACL=yes in zoo.cfg"
        ) from None


async def _walk(session: ZkSession) -> None:
    level = ["/"]
    while level:
        below: list[str] = []
        for first in range(0, len(level), _AT_ONCE):
            part = level[first : first + _AT_ONCE]
            for children in await asyncio.gather(*(_close(session, path) for path in part)):
                below += children
        level = below


async def _close(session: ZkSession, path: str) -> list[str]:
    """Set the ACL of one node and return its children."""
    try:
        await session.set_acl(path)
        names = await session.children(path)
    except ZkNoNode:
        return []
    children = [f"{path.rstrip('/')}/{name}" for name in names]
    return [child for child in children if child != _NOT_OURS]
