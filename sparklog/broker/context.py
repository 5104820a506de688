"""The context that all parts of one broker share: its identity, settings, clock, metadata, counters and tasks.

The context does not refer to any part of the broker. Each part gets the other parts that it uses through its
constructor: see ``lifecycle.broker``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from sparklog.broker.asyncio_tasks import end_tasks
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.security.audit_log import Audit
from sparklog.config import BrokerConfig
from sparklog.model import NO_EPOCH
from sparklog.net.greeting import Credentials
from sparklog.net.peer_security import broker_peers
from sparklog.protocol.proof import Identity, KeyRing
from sparklog.protocol.senders import SenderKind

_log = logging.getLogger(__name__)


class BrokerContext:
    """The context that all parts of one broker share: its identity, settings, clock, metadata, counters and tasks.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self, broker_id: int, cluster_id: str, *, log_dir: str, config: BrokerConfig, keys: KeyRing | None = None
    ) -> None:
        self.broker_id = broker_id
        self.cluster_id = cluster_id
        self.log_dir = log_dir
        self.config = config
        #: The listener and the security settings of connections from this broker to other brokers.
        self.peers = broker_peers(config)
        self.cache = MetadataCache(cluster_id, config.topic_defaults, self.peers.listener.name)
        self.counters: Counter[str] = Counter()
        self.audit = Audit(self.counters)
        self._incarnation = NO_EPOCH
        #: The cluster's secrets; empty if this broker was started without any.
        self.keys = KeyRing() if keys is None else keys
        self.credentials = Credentials(
            self.keys,
            lambda: Identity(SenderKind.BROKER, self.broker_id, self._incarnation),
            self.peers.certificates(cluster_id),
        )
        #: ``running``, ``stopping`` or ``failed``
        self.state = "running"
        #: Whether leaderships are moving to other brokers. Produce requests with acks=1 then wait for all in-sync
        #: replicas.
        self.moves_leaderships = False
        #: Whether the broker refuses new writes, because the cluster is stopping and followers must reach the leaders'
        #: log ends.
        self.quiesced = False
        #: Called after each applied update of the controller.
        self.metadata_listeners: list[Callable[[], None]] = []
        #: Called after each registration of this process.
        self.registration_listeners: list[Callable[[], None]] = []
        self._wall_ahead_ms = time.time_ns() // 1_000_000 - self.now_ms()
        self._tasks: set[asyncio.Task[None]] = set()
        self._metadata_waiters: list[asyncio.Future[None]] = []
        self._role_waiters: list[asyncio.Future[None]] = []
        self._registration_waiters: list[asyncio.Future[None]] = []

    # --- registration ---

    @property
    def incarnation(self) -> int:
        """Return this broker's incarnation, a number that grows with each registration; -1 before the first one.

        The number is the version of the broker's incarnation node in ZooKeeper.
        """
        return self._incarnation

    @incarnation.setter
    def incarnation(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self.cache.relieved = False  # the controller's confirmation was for the earlier incarnation
        for listener in self.registration_listeners:
            listener()
        _wake(self._registration_waiters)

    async def registered(self, incarnation: int, *, timeout_s: float) -> None:
        """Wait until this broker has registered with ``incarnation`` or a later one, for at most ``timeout_s``."""
        end = time.monotonic() + timeout_s
        while self._incarnation < incarnation and (left_s := end - time.monotonic()) > 0:
            await asyncio.wait({_waiter(self._registration_waiters)}, timeout=left_s)

    # --- time ---

    def now_ms(self) -> int:
        """Return the time in milliseconds of the monotonic clock that all replicas use."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Return the time in milliseconds since the Unix epoch, for values that outlive the process.

        The time never goes back while the process runs.
        """
        return self.now_ms() + self._wall_ahead_ms

    # --- changes ---

    def next_metadata(self) -> asyncio.Future[None]:
        """Return a future that completes after the next update from the controller is applied."""
        return _waiter(self._metadata_waiters)

    def metadata_changed(self) -> None:
        for listener in list(self.metadata_listeners):
            listener()
        _wake(self._metadata_waiters)

    def next_role_change(self) -> asyncio.Future[None]:
        """Return a future that completes when a replica's role or this process's ``StopMode`` changes next."""
        return _waiter(self._role_waiters)

    def roles_changed(self) -> None:
        _wake(self._role_waiters)

    # --- tasks ---

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a coroutine as a background task. ``end_tasks`` cancels all such tasks that still run."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def end_tasks(self) -> None:
        await end_tasks(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.counters["tasks.failed"] += 1
            _log.error("%s failed", task.get_name(), exc_info=task.exception())


def _waiter(waiters: list[asyncio.Future[None]]) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(future)
    return future


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for future in waiters:
        if not future.done():
            future.set_result(None)
    waiters.clear()
