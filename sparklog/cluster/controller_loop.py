"""The controller as the driver runs it: a thread with a loop that stands for election, term after term.

Whoever creates the ephemeral ``/controller`` is it; all others stand by and try when it goes. After an expiry of its
own session it stands again: a driver that slept must not leave the cluster without a controller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from sparklog.cluster.controller_term import ControllerTerm
from sparklog.cluster.retry_pauses import growing_pauses
from sparklog.config import broker_config
from sparklog.controller.controller import Controller, ControllerSettings
from sparklog.errors import ClusterError
from sparklog.model import BrokerEndpoint
from sparklog.net.loop import new_event_loop
from sparklog.protocol.proof import KeyRing
from sparklog.zk import paths
from sparklog.zk.controller_store import ControllerStore
from sparklog.zk.errors import ZkError, ZkUnreachable
from sparklog.zk.session import SessionState, ZkSession

log = logging.getLogger(__name__)

#: Between attempts that failed for a reason that may pass; longer each time when they fail at once.
_RETRY_S = 0.2
#: A term of this length has not failed at once.
_LASTING_S = 30.0
_STOP_TIMEOUT_S = 20.0


class _OtherCluster(ClusterError):
    """ZooKeeper holds another cluster than this controller was started for."""


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """What this controller is doing. ``state``: connecting, standby, active, stopped or failed (see ``detail``)."""

    state: str = "connecting"
    controller_epoch: int = -1
    brokers: tuple[BrokerEndpoint, ...] = ()
    topics: int = 0
    detail: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)


class ControllerLoop:
    """Thread-safe outside, one loop inside. ``on_change`` is called in the controller's thread: be quick there."""

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
        """``cluster_id`` empty: whatever cluster is there, or a new one. ``settings`` are Kafka's keys. ``keys``: the
        cluster's secrets, without which brokers that have them refuse this controller.

        Raises:
            ConfigError: a setting is unknown or out of range.
        """
        config = broker_config(settings or {})
        self._zookeeper = zookeeper
        self._cluster_id = cluster_id
        self._keys = keys
        self._session_timeout_ms = session_timeout_ms or config.session_timeout_ms
        self._connect_timeout_ms = config.zk_connection_timeout_ms
        #: Of every term's core.
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
        #: ZooKeeper had the expected cluster.
        self._found = False
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        #: The session in use; for tests that end it.
        self.session: ZkSession | None = None

    @property
    def status(self) -> ControllerStatus:
        return self._status

    def start(self) -> None:
        """Begin; returns at once."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._run, name="sparklog-controller", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float = 30.0) -> ControllerStatus:
        """Wait until a controller is at work: this one is active, or stands by for another.

        Raises:
            ClusterError: it failed, or it took longer.
        """

        def ready() -> bool:
            return self._status.state not in {"connecting"}

        with self._changed:
            if not self._changed.wait_for(ready, timeout_s):
                raise ClusterError(
                    f"no controller within {timeout_s:g} s at {self._zookeeper}: {self._status.detail or 'no answer'}"
                )
            status = self._status
        if status.state in {"failed", "stopped"}:
            raise ClusterError(f"the controller {status.state}: {status.detail}")
        return status

    def stop(self) -> None:
        """Give the election up and end the thread; another controller can follow at once. Idempotent."""
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
                # A session that is not the first one: the last expired, and brokers' sessions may have, too.
                cautious = generation not in (0, session.generation)
                generation = session.generation
                began = time.monotonic()
                try:
                    failed = await self._one_round(store, cautious=cautious)
                except ZkUnreachable as error:
                    log.warning("the controller starts over: %s", error)
                    self._set(replace(self._status, state="connecting", detail=str(error)))
                    await asyncio.sleep(_RETRY_S)
                    continue
                except _OtherCluster:
                    raise
                except Exception as error:
                    # Whatever it is: a cluster without a controller needs somebody to mend it and to start one.
                    unforeseen = not isinstance(error, ClusterError)
                    log.error("the controller starts over: %s", error, exc_info=unforeseen)
                    detail = f"{type(error).__name__}: {error}" if unforeseen else str(error)
                    self._set(replace(self._status, state="connecting", detail=detail))
                    await self._resign(store)  # another controller may know what to do
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
            )
        except ClusterError as error:
            log.warning("%s; trying on", error)
            self._set(replace(self._status, detail=str(error)))
            return None

    async def _one_round(self, store: ControllerStore, *, cautious: bool) -> bool:
        """Be elected and serve one term, or stand by until ``/controller`` goes. Return whether the term has failed."""
        await store.cluster.prepare()
        found = await store.cluster.cluster_id()
        if self._cluster_id and found != self._cluster_id:
            detail = f"ZooKeeper at {self._zookeeper} has cluster {found!r}; expected {self._cluster_id}"
            # Of one that was right before somebody has changed the id: it may be put back.
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
        )
        log.info("controller %s begins term %d", self.controller_id, epoch)
        reason = await term.run(cautious=cautious)
        log.warning("term %d is over: %s", epoch, reason)
        self._set(replace(self._status, state="connecting", detail=reason))
        await self._resign(store)
        return term.failed

    async def _resign(self, store: ControllerStore) -> None:
        """A node of our own must not keep others, or our next term, from being elected."""
        if store.session.state is not SessionState.CONNECTED:
            return
        try:
            node = await store.session.get(paths.CONTROLLER)
            if store.owns(node):
                await store.session.delete(paths.CONTROLLER, node.version)
        except ZkError as error:
            log.info("could not give /controller up: %s", error)

    async def _until_free(self, session: ZkSession) -> None:
        gone = asyncio.Event()
        while await session.exists(paths.CONTROLLER, on_change=gone.set):
            await gone.wait()
            gone.clear()

    # --- status ----------------------------------------------------------------------------------------------------

    def _term_changed(self, term: ControllerTerm) -> None:
        core = term.core
        brokers = tuple(found.endpoint for found in core.brokers.registrations.values())
        status = ControllerStatus(
            "active", core.controller_epoch, brokers, len(core.state.topics), "", dict(term.counters)
        )
        if status != self._status:
            self._set(status)

    def _set(self, status: ControllerStatus) -> None:
        with self._changed:
            self._status = status
            self._changed.notify_all()
        if self._on_change is not None:
            self._on_change(status)
