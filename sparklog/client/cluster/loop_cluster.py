"""The asyncio client of a cluster: connections to its brokers, and metadata that is kept up to date.

Its methods return known metadata immediately, request missing metadata, and call ``changed`` when metadata has changed.
So a caller decides synchronously and never waits in the middle of a decision. Every method is called on its loop.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from sparklog.client.cluster.backoff import Backoff
from sparklog.client.cluster.bootstrap import Address, parse_bootstrap
from sparklog.client.cluster.metadata import MetadataCache, MetadataPieces
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, TopicPartition
from sparklog.net.async_client import AsyncConnection
from sparklog.protocol.messages import Metadata, MetadataReply, Reply, Request, TopicMetadata

#: The time without a response after which a request that any broker can serve goes to another broker. It doubles with
#: each failure, up to the request timeout.
_ASK_ANOTHER_AFTER_S = 1.0
#: The time without input after which a broker with open requests may hang. A client that asked it for a new leader,
#: perhaps for its own successor, would lose ``_ASK_ANOTHER_AFTER_S``.
_SUSPICIOUS_S = 0.5
#: The backoff of metadata requests that did not help. Its maximum delays a client that waits for a new leader.
_METADATA_BACKOFF = Backoff(max_ms=200.0)
#: The number of useless metadata responses in a row after which the brokers asked may be out of date.
_ASK_OTHERS_AFTER = 3


class _Broker:
    """One broker's connection, or the state of the last attempt to open one."""

    __slots__ = ("connection", "failures", "opening", "pausing", "silent")

    def __init__(self) -> None:
        self.connection: AsyncConnection | None = None
        #: True after a request without a response that any broker could serve. Other brokers are asked first.
        self.silent = False
        self.opening = False
        self.failures = 0
        #: True after a failed attempt. A timer ends the pause and notifies the user.
        self.pausing = False

    @property
    def untried(self) -> bool:
        """Return whether the broker is neither connected nor known to have failed."""
        connected = self.connection is not None and not self.connection.closed
        return not (connected or self.opening or self.pausing or self.failures)


class LoopCluster:
    """The client of one cluster. Owner: one event loop. ``close`` ends its connections and tasks."""

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
    ) -> None:
        """Create the client without connecting.

        ``changed`` is called after a connection was opened or lost, and after new metadata. ``loop`` allows a thread
        that acts for this loop to call methods while no thread runs it.

        Raises:
            ConfigError: ``bootstrap`` has no address.
        """
        self.metadata = MetadataCache()
        #: The topics with an error in the last responses, with their errors.
        self.topic_errors: dict[str, TopicMetadata] = {}
        self.last_problem = ""
        #: The number of changes of ``metadata`` and ``topic_errors``.
        self.version = 0
        self._bootstrap = parse_bootstrap(bootstrap)
        self._client_id = client_id
        self._changed = changed
        self._given_loop = loop
        self._request_timeout_s = request_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._backoff = backoff
        self._brokers: dict[int, _Broker] = {}
        #: Work that needs a running loop: a connection that is being opened, a metadata request.
        self.tasks: set[asyncio.Task[None]] = set()
        self._wanted: set[str] = set()
        self._refreshing = False
        self._refreshes = 0
        #: The number of requests in a row without a response in time.
        self._unanswered = 0
        self._refreshed_at_s = float("-inf")
        self._random = random.Random()
        self._closed = False

    # --- connections ---

    def connection(self, broker_id: int) -> AsyncConnection | None:
        """Return the open connection to a broker, or None.

        In the latter case a connection is being opened, unless that has just failed.
        """
        broker = self._brokers.get(broker_id)
        if broker is None:
            broker = self._brokers[broker_id] = _Broker()
        if broker.connection is not None and not broker.connection.closed:
            return broker.connection
        endpoint = self.metadata.endpoint(broker_id)
        if endpoint is not None and not broker.opening and not broker.pausing:
            broker.opening = True
            self.start(self._connect(broker_id, broker, Address(endpoint.host, endpoint.port)))
        return None

    async def ask_any(self, request: Request, *, longest_s: float = math.inf) -> Reply:
        """Ask any broker once, and move on early if it hangs.

        The connection to a slow broker stays open, because the broker may be busy with other requests. ``longest_s``
        limits a request for which the broker itself may wait. Raises BrokerError.
        """
        return await self._ask(await self._any_connection(), request, longest_s=longest_s)

    async def ask_metadata(self, request: Metadata) -> MetadataReply:
        """Return the complete metadata of one broker, which is asked once. Raises BrokerError."""
        connection = await self._any_connection()
        pieces = MetadataPieces(request)
        while pieces.request is not None:
            reply = await self._ask(connection, pieces.request)
            if not isinstance(reply, MetadataReply):
                detail = f"{connection.address} responded to Metadata with {type(reply).__name__}"
                raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
            pieces.add(reply)
        return pieces.reply

    async def _ask(self, connection: AsyncConnection, request: Request, *, longest_s: float = math.inf) -> Reply:
        patience_s = min(self._request_timeout_s, longest_s, _ASK_ANOTHER_AFTER_S * 2 ** min(self._unanswered, 10))
        future = connection.request(request)
        try:
            reply, _ = await asyncio.wait_for(future, patience_s)
        except asyncio.TimeoutError:
            self._on_silence(connection, abort=patience_s >= self._request_timeout_s)
            raise BrokerError(
                ErrorCode.NETWORK_EXCEPTION, f"{connection.address}: no response within {patience_s:g} s"
            ) from None
        self._unanswered = 0
        for broker in self._brokers.values():
            broker.silent = broker.silent and broker.connection is not connection
        return reply

    async def ask_endpoint(self, broker: BrokerEndpoint, request: Request, *, patience_s: float) -> Reply:
        """Ask one broker once. Raises BrokerError; NETWORK_EXCEPTION if there is no response within ``patience_s``."""
        if self._closed:
            raise BrokerError(ErrorCode.NETWORK_EXCEPTION, "the client is closed")
        known = self._brokers.get(broker.broker_id)
        connection = known.connection if known is not None else None
        if connection is None or connection.closed:
            connection = await self._open(Address(broker.host, broker.port))
            actual_id = connection.hello.broker_id if connection.hello else -1
            self._keep(actual_id, connection)
            if actual_id != broker.broker_id:
                detail = f"{connection.address} is broker {actual_id}; expected {broker.broker_id}"
                raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, detail)
            connection = self._brokers[actual_id].connection or connection
        try:
            reply, _ = await asyncio.wait_for(connection.request(request), patience_s)
        except asyncio.TimeoutError:
            detail = f"{connection.address}: no response within {patience_s:g} s"
            raise BrokerError(ErrorCode.NETWORK_EXCEPTION, detail) from None
        return reply

    def jitter(self) -> float:
        """Return a random number in [0, 1) for delays."""
        return self._random.random()

    def _on_silence(self, connection: AsyncConnection, *, abort: bool) -> None:
        self._unanswered += 1
        for broker in self._brokers.values():
            broker.silent = broker.silent or broker.connection is connection
        if abort:
            connection.abort()

    def close(self) -> None:
        self._closed = True
        for task in self.tasks:
            task.cancel()
        for broker in self._brokers.values():
            if broker.connection is not None:
                broker.connection.on_lost = None
                broker.connection.close()

    @property
    def is_closed(self) -> bool:
        return self._closed

    async def closed(self) -> None:
        """Wait for the end of the tasks that ``close`` cancelled."""
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _connect(self, broker_id: int, broker: _Broker, address: Address) -> None:
        try:
            connection = await self._open(address)
        except BrokerError as error:
            self.last_problem = str(error)
            self._pause(broker)
            self.request_metadata(self.metadata.topic_names())
        else:
            actual_id = connection.hello.broker_id if connection.hello else -1
            self._keep(actual_id, connection)
            if actual_id != broker_id:  # another broker has the address now
                self._pause(broker)
                self.request_metadata(self.metadata.topic_names())
        finally:
            broker.opening = False
        self._notify()

    def _pause(self, broker: _Broker) -> None:
        """Make no attempt for a while.

        A timer ends the pause, not a comparison with the clock. When the timer fires, the loop's clock may be just
        before the timer's time, and then no event would end the pause.
        """
        broker.pausing = True
        self._loop().call_later(self._delay_s(broker.failures), self._resume, broker)
        broker.failures += 1

    def _resume(self, broker: _Broker) -> None:
        broker.pausing = False
        self._notify()

    async def _any_connection(self) -> AsyncConnection:
        if self._closed:
            raise BrokerError(ErrorCode.NETWORK_EXCEPTION, "the client is closed")
        if self._refreshes > _ASK_OTHERS_AFTER:
            await self._try_another()
        alive = [b for b in self._brokers.values() if b.connection is not None and not b.connection.closed]
        alive = [b for b in alive if not b.silent] or alive
        alive = [b for b in alive if b.connection is not None and b.connection.silent_s < _SUSPICIOUS_S] or alive
        # otherwise the brokers asked so far knew no broker, and others may know some
        if alive and self.metadata.brokers:
            chosen = self._random.choice(alive).connection
            assert chosen is not None
            return chosen
        known = [Address(broker.host, broker.port) for broker in self.metadata.brokers.values()]
        addresses = list(dict.fromkeys([*self._shuffled(known), *self._shuffled(self._bootstrap)]))
        failures = []
        for address in addresses:
            try:
                connection = await self._open(address)
            except BrokerError as error:  # noqa: PERF203 - the next address is tried
                if error.code != ErrorCode.NETWORK_EXCEPTION:
                    raise
                failures.append(error.detail)
            else:
                actual_id = connection.hello.broker_id if connection.hello else -1
                self._keep(actual_id, connection)
                return self._brokers[actual_id].connection or connection
        raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"no broker can be reached: {'; '.join(failures)}")

    async def _try_another(self) -> None:
        """Connect to another broker, because the ones asked so far may all be out of date."""
        untried = [
            endpoint
            for broker_id, endpoint in self.metadata.brokers.items()
            if self._brokers.setdefault(broker_id, _Broker()).untried
        ]
        if untried:
            chosen = self._random.choice(untried)
            broker = self._brokers[chosen.broker_id]
            broker.opening = True
            await self._connect(chosen.broker_id, broker, Address(chosen.host, chosen.port))

    def _keep(self, broker_id: int, connection: AsyncConnection) -> None:
        broker = self._brokers.setdefault(broker_id, _Broker())
        if self._closed or (broker.connection is not None and not broker.connection.closed):
            connection.close()  # two connections were opened at the same time
            return
        broker.connection = connection
        broker.failures = 0
        broker.silent = False
        connection.on_lost = self._connection_lost

    def _connection_lost(self) -> None:
        """Handle a lost connection.

        The broker is gone, or it closed the connection because a producer without acks sent records to a former leader.
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
        )

    # --- metadata ---

    def request_metadata(self, topics: Iterable[str]) -> None:
        """Request these topics' metadata: at once after a quiet time, with a growing delay if it is repeated."""
        self._wanted.update(topics)
        if self._wanted and not self._refreshing and not self._closed:
            self._refreshing = True
            self.start(self._refresh())

    async def refresh_once(self, topic: str) -> None:
        """Request one topic's metadata from any broker now, and merge the response. Raises BrokerError."""
        self._merge(await self.ask_metadata(Metadata(0, (topic,))))

    def progress(self) -> None:
        """Reset the delay of metadata requests, because a request succeeded with the current metadata."""
        self._refreshes = 0

    async def _refresh(self) -> None:
        try:
            # Cancelling alone does not end this loop: a cancelled wait may end with the connection's error instead.
            while self._wanted and not self._closed:
                delay_ms = _METADATA_BACKOFF.delay_ms(self._refreshes, self._random.random())
                wait_s = self._refreshed_at_s + delay_ms / 1000 - self._now()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                self._refreshes += 1
                self._refreshed_at_s = self._now()
                topics = tuple(sorted(self._wanted))
                try:
                    reply = await self.ask_metadata(Metadata(0, topics))
                except BrokerError as error:
                    self.last_problem = str(error)
                    if not error.retriable:
                        self.topic_errors.update(
                            (name, TopicMetadata(int(error.code), name, detail=error.detail)) for name in topics
                        )
                        self._wanted.difference_update(topics)
                        self.version += 1
                    self._notify()
                    continue
                self._wanted.difference_update(topics)
                self._merge(reply)
        finally:
            self._refreshing = False

    def _merge(self, reply: MetadataReply) -> None:
        self.version += 1
        stale = self.metadata.is_stale(reply)
        self.metadata.update(reply)
        for topic in reply.topics:
            if topic.code == ErrorCode.NONE:
                self.topic_errors.pop(topic.name, None)
            elif stale and topic.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                self.last_problem = (
                    f"topic {topic.name!r} is unknown to a broker that lacks the current controller's update"
                )
            else:
                self.topic_errors[topic.name] = topic
        self._notify()

    def merge_leader(self, tp: TopicPartition, leader: int, epoch: int) -> bool:
        """Merge the leader that a former leader named. Return True if it is news about a known broker."""
        if not self.metadata.merge_leader(tp, leader, epoch):
            return False
        self.version += 1
        return True

    # --- small things ---

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
            task.result()  # our bug: pass the error to the loop's exception handler

    def _delay_s(self, count: int) -> float:
        return self._backoff.delay_ms(count, self._random.random()) / 1000

    def _now(self) -> float:
        return self._loop().time()

    def _loop(self) -> asyncio.AbstractEventLoop:
        return self._given_loop or asyncio.get_running_loop()

    def _shuffled(self, addresses: Iterable[Address]) -> list[Address]:
        items = list(addresses)
        self._random.shuffle(items)
        return items
