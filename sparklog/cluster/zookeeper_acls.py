"""The migration of a cluster's nodes in ZooKeeper: closing them to strangers, and opening them again.

A ZooKeeper that the operator names is secured by the credentials of the operator's settings. The embedded one is
secured by the cluster's secret. The first may be migrated while the cluster runs, and so may the closing of the second.
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
    """Close the nodes of a cluster in the operator's ZooKeeper to sessions without the credentials of ``security``.

    ``force`` does it although processes of the cluster do not close their nodes.

    Raises:
        ConfigError: ``security`` has no credentials, or the ZooKeeper is a cluster's embedded one.
        ClusterError: there is no cluster, a process would lose access or leaves its nodes open, or nodes are closed to
            these credentials.
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
    """Open the nodes of a cluster in the operator's ZooKeeper to every session. Secret nodes only ``with_secrets``.

    ``force`` does it although processes of the cluster close the nodes that they create.

    Raises:
        ConfigError, ClusterError: as ``secure``.
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
    """Close the nodes of a cluster in its embedded ZooKeeper to sessions without the cluster's secret.

    ``force`` does it although brokers without the secret run.

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
    """Open the nodes of a stopped cluster in its embedded ZooKeeper to every session.

    Raises:
        ClusterError: a process of the cluster runs. It would go on closing nodes, and a process that starts later could
            not change them.
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
    """Open a session to the operator's ZooKeeper for a ``with`` block. Raises as ``secure``."""
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
