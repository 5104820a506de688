"""The protection of the cluster's own ZooKeeper against writes by sessions without the cluster's secret.

Every node has an ACL under which sessions with the secret may do everything. Other sessions may read the node, unless
the node is secret. ZooKeeper's ACLs are not inherited. Therefore the driver that creates the node ``PROTECTED`` sets
the ACLs of all existing nodes, and every session that sees this node creates its own nodes with such an ACL. If the
operator names a ZooKeeper, the operator's credentials secure it instead: see ``security``.

A session sends ZooKeeper a password to prove that it knows the secret. The password is derived from the secret and used
for nothing else. It is not sent to a ZooKeeper without the node ``PROTECTED``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from sparklog.errors import ClusterError
from sparklog.protocol.proof import KeyRing
from sparklog.zk import paths
from sparklog.zk.errors import ZkNoAuth, ZkNoNode
from sparklog.zk.session import ZkSession
from sparklog.zk.tree_acls import TreeCount, close_tree, open_tree


async def is_fresh(session: ZkSession) -> bool:
    """Return whether this ZooKeeper is new to the cluster: no broker has ever registered."""
    try:
        return not await session.children(paths.INCARNATIONS)
    except ZkNoNode:
        return True


async def protect(
    session: ZkSession, keys: KeyRing, *, again: bool = False, progress: Callable[[int], None] | None = None
) -> TreeCount:
    """Set the ACLs of all nodes so that only sessions that know one of the secrets in ``keys`` can change them.

    Do nothing if ``keys`` has a single secret and an earlier call has protected all nodes by this secret, unless
    ``again`` is set. Return how many nodes were visited and changed.

    Raises:
      ClusterError: ZooKeeper is protected by another secret.
      ZkUnreachable: the connection broke. The caller may repeat the call.
    """
    wanted = ",".join(secret.key_id for secret in keys.secrets).encode()
    await session.authenticate()
    try:
        await session.ensure("/cluster")
        await session.ensure(paths.PROTECTED)
        # While the secret is being changed, sessions that know only the old secret still create nodes that only it
        # opens. So do not stop here.
        if (await session.get(paths.PROTECTED)).data == wanted and len(keys.secrets) == 1 and not again:
            return TreeCount()
        # Other sessions may create nodes without the ACL until they see the node ``PROTECTED``.
        count = await close_tree(session, progress=progress)
        await session.set(paths.PROTECTED, wanted)
    except ZkNoAuth:
        raise ClusterError(
            f"ZooKeeper at {session.connect_string} is protected by a cluster secret other than {wanted.decode()},"
            " the one of this driver: restore its file cluster.secret, or start once with skipACL=yes in zoo.cfg"
        ) from None
    return count


async def unprotect(
    session: ZkSession, *, with_secrets: bool = False, progress: Callable[[int], None] | None = None
) -> TreeCount:
    """Remove the protection: set the ACLs of all nodes so that every session may do everything with them.

    Without ``with_secrets`` the secret nodes keep their ACLs. No process of the cluster may run meanwhile.

    Raises:
      ZkNoAuth: this session may not change a node's ACL.
      ZkUnreachable: the connection broke. The caller may repeat the call.
    """
    count = await open_tree(session, with_secrets=with_secrets, progress=progress)
    with suppress(ZkNoNode):
        await session.delete(paths.PROTECTED)
    return count
