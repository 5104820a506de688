"""The controller's thread: it takes part in elections and serves the terms that it wins.

The process that creates the ephemeral node ``/controller`` is the active controller. All other controllers stand by
until the node disappears. After its session has expired, a controller takes part in elections again: a driver that was
only suspended must not leave the cluster without a controller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace

from sparklog.cluster.controller_term import ControllerTerm
from sparklog.cluster.retry_pauses import growing_pauses
from sparklog.config import broker_config
from sparklog.controller.controller import Controller, ControllerSettings
from sparklog.errors import ClusterError
from sparklog.model import BrokerEndpoint
from sparklog.net.loop import new_event_loop
from sparklog.net.peer_security import controller_peers
from sparklog.protocol.proof import KeyRing
from sparklog.zk import paths
from sparklog.zk.controller_store import ControllerStore
from sparklog.zk.errors import ZkError, ZkUnreachable
from sparklog.zk.security import zookeeper_security
from sparklog.zk.session import SessionState, ZkSession

log = logging.getLogger(__name__)

#: The pause after a failed term. It grows if terms fail soon after their start several times in a row.
_RETRY_S = 0.2
#: A term that lasted longer than this resets the pause.
_LASTING_S = 30.0
_STOP_TIMEOUT_S = 20.0


class _OtherCluster(ClusterError):
    """The error that ZooKeeper belongs to another cluster than the one for which this controller was started."""


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """The status of the controller in this process.

    ``state`` is "connecting", "standby", "active", "stopped" or "failed". ``detail`` has the reason.
    """

    state: str = "connecting"
    controller_epoch: int = -1
    brokers: tuple[BrokerEndpoint, ...] = ()
    #: The ids of the brokers that have accepted the current table of live brokers.
    informed: frozenset[int] = frozenset()
    topics: int = 0
    detail: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)


class ControllerLoop:
    """A thread that takes part in elections of the controller and serves the terms that it wins. Thread-safe.

    ``on_change`` is called in this thread and must return quickly.
    """

    def __init__(
        self,
        zookeeper: str,
        cluster_id: str = "",
        *,
        session_timeout_ms: int | None = None,
        settings: Mapping[str, str] | None = None,
        on_change: Callable[[ControllerStatus], None] | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        """Read the settings.

        If ``cluster_id`` is empty, the controller uses the cluster in ZooKeeper, or creates one. ``settings`` have
        Kafka's keys. ``keys`` are the cluster's secrets. Brokers that have secrets refuse a controller without them.

        Raises:
            ConfigError: a setting is unknown or out of range, or a PEM file cannot be used.
        """
        config = broker_config(settings or {})
        self._zookeeper = zookeeper
        self._cluster_id = cluster_id
        self._keys = keys
        self._peers = controller_peers(config)
        self._session_timeout_ms = session_timeout_ms or config.session_timeout_ms
        self._connect_timeout_ms = config.zk_connection_timeout_ms
        self._security = zookeeper_security(config)
        #: The settings of the ``Controller`` of every term.
        self.settings = ControllerSettings(
            session_timeout_ms=self._session_timeout_ms,
            unclean_recovery_timeout_ms=config.unclean_recovery_timeout_ms,
            topic_defaults=dict(config.topic_defaults),
            preferred_leader_rebalance_interval_ms=(
                config.preferred_leader_rebalance_interval_ms if config.preferred_leader_rebalance else 0
            ),
            broker_replace_after_ms=config.broker_replace_after_ms,
        )
        self._on_change = on_change
        self.controller_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._status = ControllerStatus()
        #: Whether this thread has found the expected cluster in ZooKeeper before.
        self._found = False
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        #: The current session. It is public so that tests can end it.
        self.session: ZkSession | None = None

    @property
    def status(self) -> ControllerStatus:
        return self._status

    def start(self) -> None:
        """Start the thread and return immediately, before a controller is active."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._run, name="sparklog-controller", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float = 30.0) -> ControllerStatus:
        """Wait until the cluster has an active controller, in this process or in another one.

        Raises:
            ClusterError: this controller failed or was stopped, or the wait timed out.
        """

        def ready() -> bool:
            return self._status.state not in {"connecting"}

        with self._changed:
            if not self._changed.wait_for(ready, timeout_s):
                raise ClusterError(
                    f"no controller within {timeout_s:g} s at {self._zookeeper}: {self._status.detail or 'no response'}"
                )
            status = self._status
        if status.state in {"failed", "stopped"}:
            raise ClusterError(f"the controller {status.state}: {status.detail}")
        return status

    def wait_informed(self, brokers: Set[int], timeout_s: float) -> bool:
        """Wait until each of ``brokers`` knows all live brokers. Return False after ``timeout_s``.

        Before that, a broker may refuse a new topic, because it knows fewer live brokers than the topic has replicas.
        If this controller is not active, return True at once, because an active controller in another process does not
        report what brokers know.
        """

        def informed() -> bool:
            return self._status.state != "active" or brokers <= self._status.informed

        with self._changed:
            return self._changed.wait_for(informed, timeout_s)

    def stop(self) -> None:
        """Resign and end the thread. Another controller can then be elected immediately. Idempotent."""
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            if self._loop is not None and self._stopping is not None:
                self._loop.call_soon_threadsafe(self._stopping.set)
        thread.join(_STOP_TIMEOUT_S)
        if thread.is_alive():
            raise ClusterError(f"the controller's thread did not end within {_STOP_TIMEOUT_S:g} s")
        self._thread = None

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        loop = new_event_loop()
        try:
            with self._changed:
                self._loop, self._stopping = loop, asyncio.Event()
            loop.run_until_complete(self._main(self._stopping))
            self._set(replace(self._status, state="stopped", brokers=()))
        except ClusterError as error:
            log.error("the controller failed: %s", error)
            self._set(ControllerStatus("failed", detail=str(error)))
        except Exception as error:
            log.exception("the controller failed")
            self._set(ControllerStatus("failed", detail=f"{type(error).__name__}: {error}"))
        finally:
            with self._changed:
                self._loop = None
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    async def _main(self, stopping: asyncio.Event) -> None:
        work = asyncio.ensure_future(self._stand_for_election())
        stop = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            stop.cancel()
            results = await asyncio.gather(work, stop, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _stand_for_election(self) -> None:
        session = self.session = await self._open()
        try:
            store = ControllerStore(session)
            generation = 0
            pauses = growing_pauses(_RETRY_S)
            while True:
                await session.connected()
                # If this is not the first session, the last one has expired, and brokers' sessions may have expired as
                # well.
                cautious = generation not in (0, session.generation)
                generation = session.generation
                began = time.monotonic()
                try:
                    failed = await self._one_round(store, cautious=cautious)
                except ZkUnreachable as error:
                    log.warning("the controller restarts: %s", error)
                    self._set(replace(self._status, state="connecting", detail=str(error)))
                    await asyncio.sleep(_RETRY_S)
                    continue
                except _OtherCluster:
                    raise
                except Exception as error:
                    # Retry after any error: otherwise the cluster would have no controller until an operator starts
                    # one.
                    unforeseen = not isinstance(error, ClusterError)
                    log.error("the controller restarts: %s", error, exc_info=unforeseen)
                    detail = f"{type(error).__name__}: {error}" if unforeseen else str(error)
                    self._set(replace(self._status, state="connecting", detail=detail))
                    await self._resign(store)  # Another controller may succeed where this one failed.
                    failed = True
                if time.monotonic() - began > _LASTING_S:
                    pauses = growing_pauses(_RETRY_S)
                if failed:
                    await asyncio.sleep(next(pauses))
        finally:
            await session.close()

    async def _open(self) -> ZkSession:
        session: ZkSession | None = None
        while session is None:
            session = await self._try_open()
        return session

    async def _try_open(self) -> ZkSession | None:
        try:
            return await ZkSession.open(
                self._zookeeper,
                session_timeout_ms=self._session_timeout_ms,
                connect_timeout_ms=self._connect_timeout_ms,
                keys=self._keys,
                security=self._security,
            )
        except ClusterError as error:
            log.warning("%s; retrying", error)
            self._set(replace(self._status, detail=str(error)))
            return None

    async def _one_round(self, store: ControllerStore, *, cautious: bool) -> bool:
        """Serve one term if elected; otherwise stand by until ``/controller`` disappears.

        Return whether the term failed.
        """
        await store.cluster.prepare()
        found = await store.cluster.cluster_id()
        if self._cluster_id and found != self._cluster_id:
            detail = f"ZooKeeper at {self._zookeeper} has cluster {found!r}; expected {self._cluster_id}"
            # If the id was right before, it was changed and may be restored, so retry.
            raise ClusterError(detail) if self._found else _OtherCluster(detail)
        self._found = True
        epoch = await store.elect(self.controller_id)
        if epoch is None:
            self._set(ControllerStatus("standby"))
            await self._until_free(store.session)
            return False
        core = Controller(
            controller_id=self.controller_id,
            controller_epoch=epoch,
            settings=self.settings,
        )
        term = ControllerTerm(
            store,
            core,
            cluster_id=found,
            session_timeout_ms=self._session_timeout_ms,
            on_change=lambda: self._term_changed(term),
            keys=self._keys,
            peers=self._peers,
        )
        log.info("controller %s starts term %d", self.controller_id, epoch)
        reason = await term.run(cautious=cautious)
        log.warning("term %d ended: %s", epoch, reason)
        self._set(replace(self._status, state="connecting", detail=reason))
        await self._resign(store)
        return term.failed

    async def _resign(self, store: ControllerStore) -> None:
        """Delete the ``/controller`` node of this process, because while it exists no controller can be elected."""
        if store.session.state is not SessionState.CONNECTED:
            return
        try:
            node = await store.session.get(paths.CONTROLLER)
            if store.owns(node):
                await store.session.delete(paths.CONTROLLER, node.version)
        except ZkError as error:
            log.info("could not delete /controller: %s", error)

    async def _until_free(self, session: ZkSession) -> None:
        gone = asyncio.Event()
        while await session.exists(paths.CONTROLLER, on_change=gone.set):
            await gone.wait()
            gone.clear()

    # --- status ----------------------------------------------------------------------------------------------------

    def _term_changed(self, term: ControllerTerm) -> None:
        core = term.core
        brokers = tuple(found.endpoint for found in core.brokers.registrations.values())
        informed = frozenset(one for one in core.brokers.registrations if core.has_current_brokers(one))
        status = ControllerStatus(
            "active", core.controller_epoch, brokers, informed, len(core.state.topics), "", dict(term.counters)
        )
        if status != self._status:
            self._set(status)

    def _set(self, status: ControllerStatus) -> None:
        with self._changed:
            self._status = status
            self._changed.notify_all()
        if self._on_change is not None:
            self._on_change(status)
