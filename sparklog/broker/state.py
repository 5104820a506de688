"""The state that all parts of one broker process share: its identity, its replicas, its counters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from sparklog.broker.asyncio_tasks import end_tasks
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.requests.access import Access
from sparklog.broker.requests.slices import Slices
from sparklog.config import BrokerConfig
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH
from sparklog.net.greeting import Credentials
from sparklog.protocol.messages import ControlUpdate
from sparklog.protocol.proof import Identity, KeyRing
from sparklog.protocol.senders import Sender

if TYPE_CHECKING:
    from sparklog.broker.lifecycle.zk_registration import ZkRegistration
    from sparklog.broker.replication.partition import Partition
    from sparklog.broker.replication.partitions import Partitions
    from sparklog.broker.replication.set_aside import SetAsideLogs
    from sparklog.broker.requests.fetch import Fetches
    from sparklog.broker.transactions.coordinator_epochs import CoordinatorEpochs
    from sparklog.broker.transactions.coordinator_registry import Coordinators
    from sparklog.broker.transactions.hanging_transactions import HangingTransactions
    from sparklog.broker.transactions.marker_append import MarkerAppend
    from sparklog.broker.transactions.marker_sender import MarkerSender
    from sparklog.broker.transactions.verification import TransactionVerification

_log = logging.getLogger(__name__)


class BrokerState:
    """The shared state of one broker.

    Owner: its event loop; ``process`` creates it, and every request handler gets it.
    """

    partitions: Partitions
    fetches: Fetches
    coordinators: Coordinators
    coordinator_epochs: CoordinatorEpochs
    marker_sender: MarkerSender
    markers: MarkerAppend
    verifications: TransactionVerification
    hanging: HangingTransactions
    set_aside: SetAsideLogs

    def __init__(
        self,
        broker_id: int,
        cluster_id: str,
        *,
        log_dir: str,
        config: BrokerConfig,
        on_log_failed: Callable[[Partition | None, Exception], None],
        on_id_taken: Callable[[Exception], None],
        restart: Callable[[], None],
        keys: KeyRing | None = None,
    ) -> None:
        self.broker_id = broker_id
        self.cluster_id = cluster_id
        self.config = config
        self.cache = MetadataCache(cluster_id, config.topic_defaults)
        self.counters: Counter[str] = Counter()
        self._incarnation = NO_EPOCH
        #: The cluster's secrets; empty if this broker was started without any.
        self.keys = KeyRing() if keys is None else keys
        self.credentials = Credentials(self.keys, lambda: Identity(Sender.BROKER, self.broker_id, self._incarnation))
        self.access = Access(self.keys, self.cache, self.counters)
        #: running, stopping
        self.state = "running"
        #: Leaderships are moving to other brokers: acks=1 now waits until all in-sync replicas have a record.
        self.moves_leaderships = False
        #: The broker accepts no new writes: the cluster is stopping, and followers must reach the leaders' ends.
        self.quiesced = False
        #: ISR changes that were postponed while quiesced, performed if this broker serves on after all.
        self.put_off: list[Callable[[], None]] = []
        self.log_dir = log_dir
        #: Called with the first error of the log directory, by the partition that finds it.
        self.log_failed = on_log_failed
        #: Called with each applied update of a controller.
        self.on_update: Callable[[ControlUpdate], None] = lambda update: None
        #: Called after a log was set aside.
        self.on_log_set_aside: Callable[[], None] = lambda: None
        #: Called when a broker elsewhere is registered under this one's id, and stays.
        self.id_taken = on_id_taken
        #: Begins a controlled shutdown after which the supervisor starts the broker again. Raises BrokerError.
        self.restart = restart
        #: Held while an update of the controller is applied: updates are applied one after the other.
        self.control_turn = asyncio.Lock()
        #: Held while an internal topic is created.
        self.internal_topics_turn = asyncio.Lock()
        #: Work on requests that takes more than a turn of the event loop.
        self.slices = Slices()
        self._wall_ahead_ms = time.time_ns() // 1_000_000 - self.now_ms()
        self._registry: ZkRegistration | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: Called after each applied update of the controller.
        self.metadata_listeners: list[Callable[[], None]] = []
        #: Called after each registration of this process.
        self.registration_listeners: list[Callable[[], None]] = []
        self._metadata_waiters: list[asyncio.Future[None]] = []
        self._role_waiters: list[asyncio.Future[None]] = []
        self._registration_waiters: list[asyncio.Future[None]] = []

    @property
    def registry(self) -> ZkRegistration:
        """Return the registration. Raise BrokerError BROKER_NOT_AVAILABLE until this broker is registered."""
        if self._registry is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {self.broker_id} is still starting")
        return self._registry

    @registry.setter
    def registry(self, registry: ZkRegistration) -> None:
        self._registry = registry

    def resume(self) -> None:
        """Accept writes again, and perform the postponed ISR changes."""
        self.quiesced = False
        put_off, self.put_off = self.put_off, []
        for work in put_off:
            work()

    @property
    def incarnation(self) -> int:
        """Return the version of this broker's incarnation node; -1 until registered."""
        return self._incarnation

    @incarnation.setter
    def incarnation(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self.cache.relieved = False  # the controller confirmed it to the incarnation before
        for listener in self.registration_listeners:
            listener()
        _wake(self._registration_waiters)

    async def registered(self, incarnation: int, *, timeout_s: float) -> None:
        """Wait until this broker has this ``incarnation`` or a later one, or the time is up."""
        end = time.monotonic() + timeout_s
        while self._incarnation < incarnation and (left_s := end - time.monotonic()) > 0:
            await asyncio.wait({_waiter(self._registration_waiters)}, timeout=left_s)

    def now_ms(self) -> int:
        """Return the time of the replicas' clock, which is monotonic."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Return milliseconds since the epoch, for values that outlive the process; monotonic within the process."""
        return self.now_ms() + self._wall_ahead_ms

    def next_metadata(self) -> asyncio.Future[None]:
        """Return a future that completes after the controller's next update."""
        return _waiter(self._metadata_waiters)

    def metadata_changed(self) -> None:
        for listener in list(self.metadata_listeners):
            listener()
        _wake(self._metadata_waiters)

    def next_role_change(self) -> asyncio.Future[None]:
        """Return a future that completes when a replica's role changes, or the way in which the process ends."""
        return _waiter(self._role_waiters)

    def roles_changed(self) -> None:
        _wake(self._role_waiters)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run work beside the requests; ``end_tasks`` cancels it if it still runs."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def end_tasks(self) -> None:
        self.slices.close()
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
