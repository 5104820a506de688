"""The protection of the cluster's own ZooKeeper against sessions that do not know the cluster's secret.

Every node has an ACL under which sessions with the secret may do everything, and any session may read. ZooKeeper's ACLs
are not inherited: each session creates its nodes with that ACL after the node ``PROTECTED`` exists, and the driver that
creates that node sets the ACLs of the existing nodes. Nothing secret is stored in ZooKeeper.

The password is derived from the secret for this purpose alone, and is sent to no ZooKeeper without that node.
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
#: A node that ZooKeeper keeps for itself.
_NOT_OURS = "/zookeeper"


async def is_fresh(session: ZkSession) -> bool:
    """Return whether no broker has ever registered."""
    try:
        return not await session.children(paths.INCARNATIONS)
    except ZkNoNode:
        return True


async def protect(session: ZkSession, keys: KeyRing) -> None:
    """Close this ZooKeeper to sessions that do not know one of ``keys``.

    Nothing happens if that is done already for the only secret. A walk through the nodes that was interrupted is
    repeated.

    Raises:
      ClusterError: it is closed by another secret.
      ZkUnreachable: the connection broke; the caller may repeat the call.
    """
    wanted = ",".join(secret.key_id for secret in keys.secrets).encode()
    await session.authenticate()
    try:
        await session.ensure("/cluster")
        await session.ensure(paths.PROTECTED)
        # During a change of the secret, sessions with only the older one create nodes for that one alone.
        if (await session.get(paths.PROTECTED)).data == wanted and len(keys.secrets) == 1:
            return
        # Walk twice: the second walk finds nodes that other sessions created after the first walk passed, before they
        # knew of the node.
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
