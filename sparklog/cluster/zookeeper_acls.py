"""The migration of a cluster's ZooKeeper nodes: closing them to sessions without credentials, and opening them again.

In the operator's ZooKeeper, the credentials in the operator's settings protect the nodes. These nodes can be closed and
opened while the cluster runs. In the embedded ZooKeeper, the cluster's secret protects the nodes. These nodes can be
closed while the cluster runs, but opened only while it is stopped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec import structs

from sparklog.errors import ClusterError, ConfigError
from sparklog.protocol.proof import KeyRing
from sparklog.zk import paths
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkNoAuth
from sparklog.zk.protection import protect, unprotect
from sparklog.zk.security import ZooKeeperSecurity
from sparklog.zk.session import ZkSession
from sparklog.zk.tree_acls import (
    TreeCount,
    check_identities,
    close_tree,
    open_tree,
    processes_with_closed_nodes,
    processes_with_open_nodes,
    roots_of,
)

Progress = Callable[[int], None]
_FORCE = "pass --force to do it anyway"


async def secure(connect: str, security: ZooKeeperSecurity, *, force: bool, progress: Progress) -> TreeCount:
    """Restrict a cluster's nodes in the operator's ZooKeeper by ACLs to sessions with the credentials of ``security``.

    If ``force`` is false, refuse the change while a process of the cluster runs without ``zookeeper.set.acl``.

    Raises:
        ConfigError: ``security`` has no credentials, or the ZooKeeper is a cluster's embedded one.
        ClusterError: there is no cluster; a process would lose access, or creates nodes without ACLs; or these
            credentials have no access to some nodes.
    """
    if not security.has_identity:
        raise ConfigError(
            "no credentials: set zookeeper.digest.file or zookeeper.ssl.keystore.location, and pass the"
            " file of settings as --zookeeper-config"
        )
    async with _opened(connect, structs.replace(security, set_acl=True)) as session:
        if not force and (careless := await processes_with_open_nodes(session)):
            raise ClusterError(
                f"{', '.join(careless)}: zookeeper.set.acl is not true there. Such a process leaves new nodes open, and"
                f" without credentials it could no longer change a node. Restart it with the settings, or {_FORCE}"
            )
        await check_identities(session)
        count = await close_tree(session, roots=await roots_of(session), progress=progress)
        if count.found_open:
            raise ClusterError(
                f"{count.found_open} nodes were created open during the last of several walks: a process of the cluster"
                " runs without zookeeper.set.acl=true"
            )
        return count


async def unsecure(
    connect: str, security: ZooKeeperSecurity, *, with_secrets: bool, force: bool, progress: Progress
) -> TreeCount:
    """Remove the ACLs of a cluster's nodes in the operator's ZooKeeper, so that every session may change them.

    Nodes with secrets stay restricted unless ``with_secrets`` is true. If ``force`` is false, refuse the change while a
    process of the cluster runs with ``zookeeper.set.acl``.

    Raises:
        ConfigError: the ZooKeeper is a cluster's embedded one.
        ClusterError: there is no cluster, a process would create nodes with ACLs, or the credentials have no access.
    """
    async with _opened(connect, security) as session:
        if not force and (closing := await processes_with_closed_nodes(session)):
            raise ClusterError(
                f"{', '.join(closing)}: zookeeper.set.acl is true there, or was when it started, so it may close new"
                f" nodes. Restart it without the setting, or {_FORCE}"
            )
        return await open_tree(session, roots=await roots_of(session), with_secrets=with_secrets, progress=progress)


async def secure_embedded(
    connect: str, keys: KeyRing, security: ZooKeeperSecurity, *, force: bool, progress: Progress
) -> TreeCount:
    """Restrict a cluster's nodes in its embedded ZooKeeper by ACLs to sessions with the cluster's secret.

    If ``force`` is false, refuse the change while brokers without the secret run.

    Raises:
        ClusterError: brokers would lose access, or another secret protects the nodes.
    """
    session = await ZkSession.open(connect, keys=keys, security=security)
    try:
        brokers = await ClusterStore(session).live_brokers()
        without = ", ".join(f"broker {broker.broker_id}" for broker in brokers if not broker.proves)
        if without and not force:
            raise ClusterError(
                f"{without}: it does not know the cluster's secret and could no longer change a node. Restart it with"
                f" this release, or {_FORCE}"
            )
        return await protect(session, keys, again=True, progress=progress)
    finally:
        await session.close()


async def unsecure_embedded(
    connect: str, keys: KeyRing, security: ZooKeeperSecurity, *, with_secrets: bool, progress: Progress
) -> TreeCount:
    """Remove the ACLs of a stopped cluster's nodes in its embedded ZooKeeper, so that every session may change them.

    Nodes with secrets stay restricted unless ``with_secrets`` is true.

    Raises:
        ClusterError: a process of the cluster runs, or the secret in ``keys`` does not give access. A running process
            would continue to create nodes with ACLs, which a process that starts later could not change.
    """
    session = await ZkSession.open(connect, keys=keys, security=security)
    try:
        running = [name for name in (paths.DRIVER, paths.CONTROLLER) if await session.exists(name)]
        if running or await ClusterStore(session).live_brokers():
            raise ClusterError("the cluster runs: stop it before you open its embedded ZooKeeper")
        return await unprotect(session, with_secrets=with_secrets, progress=progress)
    except ZkNoAuth as error:
        raise ClusterError(f"{error}: pass the secret as --secret-file") from None
    finally:
        await session.close()


@asynccontextmanager
async def _opened(connect: str, security: ZooKeeperSecurity) -> AsyncIterator[ZkSession]:
    """Open a session to the operator's ZooKeeper for a ``with`` block.

    Raises:
        ConfigError: the ZooKeeper is a cluster's embedded one.
        ClusterError: there is no cluster, or the credentials have no access to a node.
    """
    session = await ZkSession.open(connect, security=security)
    try:
        await ClusterStore(session).cluster_id(create=False)
        if await session.exists(paths.PROTECTED):
            raise ConfigError(
                f"ZooKeeper at {connect} is the embedded one of a cluster: pass --data-dir instead of --zookeeper"
            )
        yield session
    except ZkNoAuth as error:
        raise ClusterError(f"{error}: pass other credentials") from None
    finally:
        await session.close()
