"""The asyncio client of a cluster: connections to its brokers, and metadata that is kept up to date.

A method returns known metadata immediately. Missing metadata is requested in the background, and ``changed`` is called
when metadata has changed. So a caller never has to wait in the middle of a decision. ``RoutingCore`` decides which
broker gets a request, and when metadata is requested again. All methods are called on the client's event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from sparklog.client.cluster.backoff import Backoff
from sparklog.client.cluster.bootstrap import Address
from sparklog.client.cluster.routing_core import (
    Ask,
    BackgroundSteps,
    Connect,
    Disconnect,
    Effect,
    ListOpen,
    NoResponse,
    Prepare,
    Report,
    RoutingCore,
    RoutingSteps,
    WaitUntil,
    check_broker,
)
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition, assert_never
from sparklog.net.async_client import AsyncConnection
from sparklog.net.client_security import Security, client_security
from sparklog.net.tls import client_context
from sparklog.protocol.messages import Reply, Request

T = TypeVar("T")
R = TypeVar("R", bound=Reply)


def _ignore(connection: AsyncConnection, throttle_time_ms: int) -> None:
    """Do nothing: only ``_ask`` waits."""


class LoopCluster:
    """An asyncio client of one cluster. ``close`` ends its connections and tasks.

    Not thread-safe: use it only on its event loop.
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        *,
        client_id: str,
        changed: Callable[[], None],
        request_timeout_s: float,
        loop: asyncio.AbstractEventLoop | None = None,
        connect_timeout_s: float = 5.0,
        backoff: Backoff = Backoff(),  # noqa: B008 - an immutable value
        security: Security = None,
    ) -> None:
        """Create the client without connecting.

        ``changed`` is called after a connection was opened or lost, and after new metadata was merged. If ``loop`` is
        given, the methods may also be called while this loop is not running. ``security`` has the settings of TLS and
        the login.

        Raises:
            ConfigError: ``bootstrap`` has no address, or ``security`` is not valid.
        """
        self.security = client_security(security)
        client_context(self.security)  # raises ConfigError for a file that cannot be used
        #: Whether a connection can only be used by a running loop, because it uses TLS.
        self.needs_loop = False
        self.core = RoutingCore(bootstrap, request_timeout_s=request_timeout_s, roll=random.Random().random)
        self.metadata = self.core.metadata
        #: ``RoutingCore.on_progress``: record that a request has succeeded with the current metadata.
        self.on_progress = self.core.on_progress
        #: The topics with an error in the last responses, with their errors.
        self.topic_errors = self.core.topic_errors
        self.last_problem = ""
        #: A callback for a reply that demands a wait because of a quota, with the connection and the wait in ms.
        self.on_throttled: Callable[[AsyncConnection, int], None] = _ignore
        self._client_id = client_id
        self._changed = changed
        self._given_loop = loop
        self._connect_timeout_s = connect_timeout_s
        self._backoff = backoff
        self._connections: dict[int, AsyncConnection] = {}
        #: The brokers to which a connection is being opened, and the brokers to which no connection may be opened yet
        #: because the last attempt has failed.
        self._connecting: set[int] = set()
        #: The number of failed attempts in a row to connect to a broker.
        self._failures: dict[int, int] = {}
        #: The running tasks: connections that are being opened, metadata requests.
        self.tasks: set[asyncio.Task[None]] = set()
        self._refreshing = False
        self._closed = False

    @property
    def version(self) -> int:
        """Return the number of changes of ``metadata`` and ``topic_errors``."""
        return self.metadata.version

    # --- connections ---

    def connection(self, broker_id: int) -> AsyncConnection | None:
        """Return the open connection to a broker.

        If there is none, return None and begin to open one, unless the last attempt has just failed.
        """
        connection = self._connections.get(broker_id)
        if connection is not None and not connection.closed:
            return connection
        endpoint = self.metadata.endpoint(broker_id)
        if endpoint is not None and broker_id not in self._connecting:
            self._connecting.add(broker_id)
            self.start(self._connect(broker_id, Address(endpoint.host, endpoint.port)))
        return None

    async def _connect(self, broker_id: int, address: Address) -> None:
        try:
            check_broker(address, found=self._keep(await self._open(address)), expected=broker_id)
        except BrokerError as error:
            self.last_problem = str(error)
            # A timer must end the delay. A comparison with the clock does not work: when a timer fires, the loop's
            # clock may be slightly before the timer's time, and then nothing would end the delay.
            failures = self._failures.get(broker_id, 0)
            self._failures[broker_id] = failures + 1
            self._loop().call_later(self.pause_s(failures), self._resume, broker_id)
            self.request_metadata(self.metadata.topic_names())
        else:
            self._connecting.discard(broker_id)
        self._notify()

    def _resume(self, broker_id: int) -> None:
        self._connecting.discard(broker_id)
        self._notify()

    def _keep(self, connection: AsyncConnection) -> int:
        """Store a new connection, or close it if there already is one to this broker. Return the broker's id."""
        broker_id = connection.hello.broker_id if connection.hello else -1
        earlier = self._connections.get(broker_id)
        if self._closed or (earlier is not None and not earlier.closed):
            connection.close()  # The client is closed, or two connections were opened at the same time.
        else:
            self._connections[broker_id] = connection
            self.needs_loop = any(not one.is_direct for one in self._connections.values())
            self._failures.pop(broker_id, None)
            self.core.on_connected(broker_id)
            connection.on_lost = self._connection_lost
        return broker_id

    def _connection_lost(self) -> None:
        """Handle a lost connection.

        Either the broker has ended, or it has closed the connection because it is no longer the leader and got records
        with acks=0, for which it cannot send an error.
        """
        self.request_metadata(self.metadata.topic_names())
        self._notify()

    async def _open(self, address: Address) -> AsyncConnection:
        return await AsyncConnection.open(
            address.host,
            address.port,
            client_id=self._client_id,
            cluster_id=self.metadata.cluster_id,
            connect_timeout_s=self._connect_timeout_s,
            security=self.security,
        )

    # --- requests ---

    async def run(self, steps: RoutingSteps[T] | BackgroundSteps[T]) -> T:
        """Perform the effects that the generator ``steps`` yields, and return the generator's result.

        Raises:
            BrokerError: the error that ``steps`` raises.
            CancelledError: the client was closed. CancelledError is raised even if a cancelled wait ended with a
                connection error, because a caller that retries after that error would never end.
        """
        event: Any = None
        failed: BrokerError | None = None
        while True:
            if self._closed:
                raise asyncio.CancelledError
            try:
                effect = steps.send(event) if failed is None else steps.throw(failed)
            except StopIteration as done:
                result: T = done.value
                return result
            event = failed = None
            try:
                event = await self._perform(effect)
            except BrokerError as error:
                failed = error

    async def _perform(self, effect: Effect | WaitUntil | Report) -> object:
        match effect:
            case ListOpen():
                return {number: one.silent_s for number, one in self._connections.items() if not one.closed}
            case Connect(address):
                return self._keep(await self._open(address))
            case Prepare(broker_id):
                self.connection(broker_id)
            case Ask(broker_id, request, timeout_s):
                return await self._ask(broker_id, request, timeout_s)
            case Disconnect(broker_id):
                if broker_id in self._connections:
                    self._connections[broker_id].abort()
            case WaitUntil(at_s):
                if at_s > self._now():
                    await asyncio.sleep(at_s - self._now())
                return self._now()
            case Report(problem):
                self._report(problem)
            case _:
                assert_never(effect)
        return None

    async def _ask(self, broker_id: int, request: Request, timeout_s: float) -> Reply:
        connection = self._connections.get(broker_id)
        if connection is None:
            raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"broker {broker_id} is not connected")
        # If the request were sent during the wait that a quota demands, the delay would count towards its timeout.
        if (wait_s := connection.throttled_until_s - self._now()) > 0:
            await asyncio.sleep(min(wait_s, timeout_s))
        try:
            reply, _ = await asyncio.wait_for(connection.request(request), timeout_s)
        except asyncio.TimeoutError:
            raise NoResponse(connection.address, timeout_s) from None
        if throttle_time_ms := connection.note_throttle_time(reply):
            self.on_throttled(connection, throttle_time_ms)
        return reply

    async def ask_any(self, request: Request, expected: type[R]) -> R:
        """Send a request once, to any broker. Do not wait long if the broker hangs. Raises BrokerError."""
        return await self.run(self.core.ask_any(request, expected))

    def pause_s(self, count: int) -> float:
        """Return the delay, in seconds with jitter, after failure number ``count`` (from 0)."""
        return self._backoff.delay_ms(count, self.core.roll()) / 1000

    # --- metadata ---

    def request_metadata(self, topics: Iterable[str]) -> None:
        """Request the metadata of these topics in the background.

        The request waits until ``RoutingCore.refresh_pause_s`` after the last metadata request. This delay grows with
        each metadata request. It is reset when a request of another type, such as Produce, succeeds with the new
        metadata.
        """
        self.core.wanted.update(topics)
        if self.core.wanted and not self._refreshing and not self._closed:
            self._refreshing = True
            self.start(self._refresh())

    async def _refresh(self) -> None:
        try:
            await self.run(self.core.refresh_wanted())
        finally:
            self._refreshing = False

    async def refresh_once(self, topic: str) -> None:
        """Request the metadata of one topic now, from any broker, and merge the response. Raises BrokerError."""
        self._report(await self.run(self.core.refresh_noting_errors((topic,))))

    def merge_leader(self, tp: TopicPartition, leader: int, epoch: int) -> bool:
        """Store the new leader that a former leader has named.

        Return whether the leader is new and its address is known.
        """
        return self.metadata.merge_leader(tp, leader, epoch)

    def _report(self, problem: str) -> None:
        self.last_problem = problem or self.last_problem
        self._notify()

    # --- tasks ---

    def close(self) -> None:
        self._closed = True
        for task in self.tasks:
            task.cancel()
        for connection in self._connections.values():
            connection.on_lost = None
            connection.close()

    async def closed(self) -> None:
        """After ``close``, wait until all tasks and connections of this client have ended."""
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.gather(*(connection.ended() for connection in self._connections.values()))

    def _notify(self) -> None:
        if not self._closed:
            self._changed()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` as a task, which ``close`` cancels."""
        task = self._loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.result()  # An error here is a bug. Raise it, so that the loop's exception handler reports it.

    def _now(self) -> float:
        return self._loop().time()

    def _loop(self) -> asyncio.AbstractEventLoop:
        return self._given_loop or asyncio.get_running_loop()
