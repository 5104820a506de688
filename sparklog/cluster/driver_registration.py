"""The registration of the driver in ZooKeeper, and the messages between the driver and the tasks of the barrier job.

A cluster has one driver at a time: the process that holds the ephemeral node ``/driver`` and the newest driver epoch.
Over the same session the driver writes directives for a generation of the barrier job and reads the reports of its
tasks. All methods may be called from any thread of the driver; a separate thread with its own event loop does the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from sparklog.cluster.generation import DIRECTIVE, REPORT, Directive, GenerationReport
from sparklog.cluster.process import ProcessIdentity, boot_id, identify
from sparklog.errors import ClusterError
from sparklog.model import BrokerRegistration
from sparklog.protocol.proof import KeyRing
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkBadVersion, ZkError, ZkMultiFailed, ZkNodeExists, ZkNoNode, ZkUnreachable
from sparklog.zk.protection import is_fresh, protect
from sparklog.zk.registration_holder import pid_namespace
from sparklog.zk.security import ZooKeeperSecurity
from sparklog.zk.session import Check, Create, SessionState, ZkSession

log = logging.getLogger(__name__)

T = TypeVar("T")


class DriverRegistration:
    """The registration of this process in ZooKeeper as the cluster's driver. Thread-safe.

    ``take`` creates the registration, and ``close`` deletes it. The event ``lost`` is set when another driver has taken
    over the cluster.
    """

    def __init__(
        self,
        zookeeper: str,
        *,
        session_timeout_ms: int,
        keys: KeyRing | None = None,
        owns_zookeeper: bool = False,
        security: ZooKeeperSecurity | None = None,
    ) -> None:
        self._keys = KeyRing() if keys is None else keys
        self._owns_zookeeper = owns_zookeeper
        self._security = security
        self._zookeeper = zookeeper
        self._session_timeout_ms = session_timeout_ms
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sparklog-seat", daemon=True)
        self._thread.start()
        self._session: ZkSession | None = None
        self._reclaiming: asyncio.Task[None] | None = None
        self.cluster_id = ""
        self.epoch = 0
        self.lost = threading.Event()

    @classmethod
    def take(
        cls,
        zookeeper: str,
        *,
        session_timeout_ms: int = 6000,
        keys: KeyRing | None = None,
        owns_zookeeper: bool = False,
        security: ZooKeeperSecurity | None = None,
    ) -> DriverRegistration:
        """Connect to ZooKeeper and register as the cluster's driver.

        ``keys`` are the cluster's secrets. ``owns_zookeeper`` means that the ZooKeeper is embedded. The driver then
        protects the nodes in ZooKeeper against writes by clients without the secrets, unless brokers of release 0.1.0
        may still write to them. ``security`` has the TLS settings and credentials for the session with ZooKeeper.

        Raises:
            ClusterError: ZooKeeper does not respond, or another driver is alive. The error names its host.
        """
        registration = cls(
            zookeeper,
            session_timeout_ms=session_timeout_ms,
            keys=keys,
            owns_zookeeper=owns_zookeeper,
            security=security,
        )
        try:
            registration._call(registration._take())
        except BaseException:
            registration.close()
            raise
        return registration

    def close(self) -> None:
        """Delete the registration and end the thread of this object. Idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def direct(self, directive: Directive) -> None:
        """Write a directive, which is an order for the tasks of one generation, to ZooKeeper.

        Raises:
            ZkError: ZooKeeper is not available.
        """
        self._call(self._direct(directive))

    def live_brokers(self) -> tuple[BrokerRegistration, ...]:
        return self._call(self._store.live_brokers())

    def report(self, generation: int) -> GenerationReport | None:
        """Return the report of the tasks of this driver's ``generation``, as read from ZooKeeper.

        Return None if there is no report yet or ZooKeeper is not available.
        """
        return self._call(self._report(generation))

    # --- in the loop ---------------------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def _zk(self) -> ZkSession:
        assert self._session is not None
        return self._session

    @property
    def _store(self) -> ClusterStore:
        return ClusterStore(self._zk)

    async def _take(self) -> None:
        self._session = await ZkSession.open(
            self._zookeeper,
            session_timeout_ms=self._session_timeout_ms,
            keys=self._keys,
            security=self._security,
        )
        await self._protect()
        await self._store.prepare()
        self.cluster_id = await self._store.cluster_id()
        self.epoch = await self._claim()
        self._session.add_listener(self._session_moved)
        log.info("driver epoch %d of cluster %s", self.epoch, self.cluster_id)

    async def _protect(self) -> None:
        if not self._keys or not self._owns_zookeeper:
            return
        # Brokers of release 0.1.0 write to ZooKeeper and do not know the secret. So protect it only if there are none.
        if await self._zk.exists(paths.PROOF_REQUIRED) or await is_fresh(self._zk):
            await protect(self._zk, self._keys)

    async def _claim(self) -> int:
        """Create the driver's node and return the new driver epoch.

        The node of a killed driver disappears when its session expires. If that driver ran on this host, its node is
        removed at once.
        """
        deadline = time.monotonic() + self._session_timeout_ms / 1000 + 2
        own = _own_process()
        while True:
            try:
                return await self._store.claim_driver(
                    socket.gethostname(),
                    own.pid,
                    start_time=own.start_time,
                    boot_id=own.boot_id,
                    pid_namespace=pid_namespace(),
                )
            except ClusterError:
                if await self._holder_is_alive_here() or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    async def _holder_is_alive_here(self) -> bool:
        """Return whether a running driver on this host holds the registration; remove the node of a dead one.

        The pid alone does not identify the driver: after a reboot, or in a container, another process may have the same
        pid, often the new driver itself.
        """
        try:
            node = await self._zk.get(paths.DRIVER)
        except ZkNoNode:
            return False
        holder = codecs.decode(paths.DRIVER, node.data, codecs.DriverNode)
        if holder.host != socket.gethostname():
            return False
        if holder.boot_id and holder.boot_id != boot_id():
            return False  # Another boot, or another host with this name: wait until its session expires.
        if holder.pid_namespace and holder.pid_namespace != pid_namespace():
            return False  # The pid is of another container: wait until its session expires.
        found = identify(holder.pid)
        noted = ProcessIdentity(holder.pid, holder.start_time, holder.boot_id) if holder.boot_id else found
        if found is not None and found == noted:
            return True
        with contextlib.suppress(ZkNoNode, ZkBadVersion):
            await self._zk.delete(paths.DRIVER, node.version)
        return False

    def _session_moved(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED and (self._reclaiming is None or self._reclaiming.done()):
            self._reclaiming = self._loop.create_task(self._reclaim())

    async def _reclaim(self) -> None:
        """Create the driver's node again in a new session, unless a newer driver has registered."""
        own = _own_process()
        holder = codecs.DriverNode(
            self.epoch,
            socket.gethostname(),
            own.pid,
            start_time=own.start_time,
            boot_id=own.boot_id,
            pid_namespace=pid_namespace(),
        )
        node = codecs.encode(holder)
        while not self.lost.is_set():
            try:
                await self._zk.connected()
                counter = await self._zk.get(paths.DRIVER_EPOCH)
                if codecs.decode(paths.DRIVER_EPOCH, counter.data, codecs.CounterNode).value != self.epoch:
                    log.error("another driver has taken over the cluster; this driver releases it")
                    self.lost.set()
                    return
                await self._zk.multi(
                    [Check(paths.DRIVER_EPOCH, counter.version), Create(paths.DRIVER, node, ephemeral=True)]
                )
                return
            except ZkUnreachable:
                if self._zk.state is SessionState.CLOSED:
                    return
            except ZkMultiFailed as error:
                if isinstance(error.cause, ZkNodeExists) and await self._holds_it():
                    return
            except ZkError as error:  # Retry, because without the node another driver could register.
                log.error("could not register the driver again, retrying: %s", error)
            await asyncio.sleep(0.2)

    async def _holds_it(self) -> bool:
        """Return whether the node exists and belongs to the current session.

        Return False if ZooKeeper does not respond.
        """
        try:
            return (await self._zk.get(paths.DRIVER)).ephemeral_owner == self._zk.session_id
        except (ZkNoNode, ZkUnreachable):
            return False

    async def _direct(self, directive: Directive) -> None:
        await self._zk.connected(timeout_ms=self._session_timeout_ms)
        encoded = codecs.encode(directive)
        with contextlib.suppress(ZkNodeExists):
            await self._zk.create(DIRECTIVE, encoded)
            return
        node = await self._zk.get(DIRECTIVE)
        found = codecs.decode(DIRECTIVE, node.data, Directive)
        if found.driver_epoch > self.epoch:
            self.lost.set()
            raise ClusterError(f"driver epoch {found.driver_epoch} has taken over from {self.epoch}")
        await self._zk.set(DIRECTIVE, encoded, node.version)

    async def _report(self, generation: int) -> GenerationReport | None:
        try:
            node = await self._zk.get(REPORT)
        except (ZkNoNode, ZkUnreachable):
            return None
        found = codecs.decode(REPORT, node.data, GenerationReport)
        return found if (found.driver_epoch, found.generation) == (self.epoch, generation) else None

    async def _end(self) -> None:
        if self._reclaiming is not None:
            self._reclaiming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reclaiming
        if self._session is not None:
            await self._session.close()


def _own_process() -> ProcessIdentity:
    own = identify(os.getpid())
    assert own is not None
    return own
