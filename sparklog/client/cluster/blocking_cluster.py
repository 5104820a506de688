"""Blocking connections to the brokers of one cluster, with metadata and retries, for Admin, Consumer and readers.

The client has no thread and no event loop. The client works in the caller's thread, and opens connections when they are
needed. ``RoutingCore`` chooses brokers, ``Retry`` decides about retries, and this module does the I/O. The module does
not depend on the content of requests.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from sparklog.client.cluster import forks
from sparklog.client.cluster.backoff import Backoff
from sparklog.client.cluster.bootstrap import Address
from sparklog.client.cluster.metadata import Leader
from sparklog.client.cluster.retry import Retry
from sparklog.client.cluster.routing_core import (
    Ask,
    Connect,
    Disconnect,
    Effect,
    ListOpen,
    NoResponse,
    Prepare,
    RoutingCore,
    RoutingSteps,
    check_broker,
)
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition, assert_never
from sparklog.net.blocking import BlockingConnection
from sparklog.net.client_security import Security, client_security
from sparklog.net.tls import client_context
from sparklog.protocol.messages import Metadata, MetadataReply, Reply, Request, TopicMetadata

T = TypeVar("T")
R = TypeVar("R", bound=Reply)

#: The maximum time that ``confirm`` waits for each broker.
_DOUBT_TIMEOUT_S = 2.0


class Deadline:
    """A deadline: ``timeout_s`` after its creation, by the monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())


class BlockingCluster:
    """A blocking client of one cluster, which keeps a connection to each broker. Use it from one thread at a time."""

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        *,
        client_id: str = "sparklog",
        timeout_s: float = 30.0,
        request_timeout_s: float = 10.0,
        connect_timeout_s: float = 5.0,
        first_contact_s: float | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008 - an immutable value
        security: Security = None,
    ) -> None:
        """Create the client without connecting.

        ``timeout_s`` limits each call including its retries. ``request_timeout_s`` limits one wait for a broker, so
        that a broker that hangs does not use up the whole time of the call. ``first_contact_s`` limits calls as long as
        no broker has ever responded, because the user may have given a wrong address. ``security`` has the settings of
        TLS and the login.

        Raises:
            ConfigError: ``bootstrap`` has no address, or ``security`` is not valid.
        """
        self.security = client_security(security)
        client_context(self.security)  # raises ConfigError for a file that cannot be used
        self.timeout_s = timeout_s
        self.request_timeout_s = min(request_timeout_s, timeout_s)
        self.core = RoutingCore(bootstrap, request_timeout_s=self.request_timeout_s, roll=random.Random().random)
        self.metadata = self.core.metadata
        self._client_id = client_id
        self._first_contact_s = first_contact_s
        if first_contact_s is not None:
            # Addresses are tried one after the other. An address that does not respond must not use up the whole time.
            connect_timeout_s = min(connect_timeout_s, max(first_contact_s / len(self.core.bootstrap), 0.3))
        self._connect_timeout_s = connect_timeout_s
        self._backoff = backoff
        self._connections: dict[int, BlockingConnection] = {}
        self._closed = False
        forks.watch(self)

    def close(self) -> None:
        """Close the client permanently. A later request, perhaps of another thread, raises ConfigError."""
        self._closed = True
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def __enter__(self) -> BlockingCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- asking ---

    def run(self, steps: RoutingSteps[T], *, over: BlockingConnection | None = None) -> T:
        """Perform the effects that the generator ``steps`` yields, and return the generator's result.

        If ``over`` is given, send all requests on this connection instead of the client's own connections.

        Raises:
            BrokerError: the error that ``steps`` raises.
        """
        try:
            effect = next(steps)
            while True:
                try:
                    event = self._perform(effect, over)
                except BrokerError as error:  # noqa: PERF203 - the steps handle it
                    effect = steps.throw(error)
                else:
                    effect = steps.send(event)
        except StopIteration as done:
            result: T = done.value
            return result

    def _perform(self, effect: Effect, over: BlockingConnection | None) -> object:
        match effect:
            case ListOpen():
                return {broker_id: 0.0 for broker_id, open_one in self._connections.items() if not open_one.closed}
            case Connect(address):
                connection = self._open(address)
                self._keep(connection.hello.broker_id, connection)
                return connection.hello.broker_id
            case Prepare(broker_id):
                with contextlib.suppress(BrokerError):
                    self.connection(broker_id)
            case Ask(broker_id, request, timeout_s):
                connection = over or self.connection(broker_id)
                try:
                    return connection.request(request, at_most_s=timeout_s)[0]
                except BrokerError:
                    if connection.timed_out:
                        raise NoResponse(connection.address, min(timeout_s, self.request_timeout_s)) from None
                    raise
            case Disconnect(broker_id):
                (over or self._connections[broker_id]).close()
            case _:
                assert_never(effect)
        return None

    def ask_any(self, request: Request, expected: type[R]) -> R:
        """Send a request once, to any reachable broker, and wait for the response for up to the request timeout."""
        return self.run(self.core.ask_any(request, expected, is_long=True))

    def ask_broker(self, broker_id: int, request: Request, expected: type[R]) -> R:
        """Send a request once, to this broker."""
        return self.run(self.core.ask(broker_id, request, expected))

    def ask_metadata(self, request: Metadata, broker_id: int | None = None) -> MetadataReply:
        """Send a metadata request to this broker, or to any reachable broker.

        Return the response without caching it.
        """
        return self.run(self.core.ask_metadata(request, broker_id))

    def broker_timeout_ms(self, timeout_s: float | None = None) -> int:
        """Return the timeout, in ms, to send in a request, so that the broker's response arrives in time.

        The result is 80 % of ``timeout_s`` or of the request timeout, whichever is less. If ``timeout_s`` is None, the
        client's timeout is used.
        """
        return max(1, int(min(self.timeout_s if timeout_s is None else timeout_s, self.request_timeout_s) * 800))

    def retrying(self, what: str, attempt: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Call ``attempt`` until it succeeds, fails permanently, or the time is up.

        ``attempt`` itself must refresh the metadata, because it knows which topics it needs.

        Raises:
            BrokerError: an error that is not retriable; also if a topic was unknown for the whole grace period.
            ClientTimeout: the time is up. The message has ``what`` and the last error.
        """
        retry = Retry(
            now_s=time.monotonic(),
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            backoff=self._backoff,
            first_contact_s=self._first_contact_s,
        )
        while True:
            try:
                result = attempt()
            except BrokerError as error:  # noqa: PERF203 - a retry loop
                if error.refresh_metadata:
                    self.core.on_useless()
                contacted = bool(self.metadata.brokers or self._connections)
                now_s, roll = time.monotonic(), self.core.roll()
                time.sleep(retry.delay_s(what, error, now_s=now_s, roll=roll, contacted=contacted))
            else:
                self.core.on_progress()
                return result

    def refresh(self, topics: Iterable[str] | None = ()) -> MetadataReply:
        """Request metadata once, from any broker, and cache the response.

        If ``topics`` is None, request all topics. If it is empty, request only the brokers.
        """
        return self.run(self.core.refresh(None if topics is None else tuple(topics)))

    def topic(self, name: str, *, timeout_s: float | None = None, refresh: bool = False) -> TopicMetadata:
        """Return the topic from the cache. If it is unknown or ``refresh`` is set, request it first.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION.
            ClientTimeout: no broker responded.
        """
        cached = None if refresh else self.metadata.topic(name)
        if cached is not None:
            return cached
        what = f"metadata of {name!r}"
        return self.retrying(what, lambda: self.run(self.core.fetch_topic(name)), timeout_s=timeout_s)

    def leader(self, tp: TopicPartition, *, refresh: bool = False) -> Leader:
        """Return the leader of a partition from the cache. If it is unknown or ``refresh`` is set, refresh once.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE, NETWORK_EXCEPTION: all retriable.
        """
        return self.run(self.core.leader(tp, refresh=refresh))

    def confirm(self, tp: TopicPartition, leader: Leader) -> None:
        """Check that ``leader`` is still the leader, before the caller trusts its log end offset.

        A leader that is cut off from the cluster may not know that it has a successor. A client that knows no later
        epoch cannot detect the successor either. So this method asks all other brokers, which include the possible
        successor.

        Raises:
            BrokerError: retriable. FENCED_LEADER_EPOCH if there is another leader; BROKER_NOT_AVAILABLE unless more
                than half of the brokers, including ``leader``, confirm the leader.
        """
        others = [broker_id for broker_id in self.metadata.brokers if broker_id != leader.broker_id]
        confirmed = 1
        for broker_id in others:
            try:
                with self.open_connection(broker_id, at_most_s=_DOUBT_TIMEOUT_S) as connection:
                    reply = self.run(self.core.ask_metadata(Metadata(0, (tp.topic,)), broker_id), over=connection)
            except BrokerError:
                continue
            self.metadata.update(reply)
            if self.metadata.leader(tp) != leader:
                raise BrokerError(
                    ErrorCode.FENCED_LEADER_EPOCH,
                    f"{tp}: broker {leader.broker_id} no longer leads in epoch {leader.epoch},"
                    f" according to broker {broker_id}",
                )
            confirmed += not self.metadata.is_stale(reply)
        if confirmed * 2 <= len(others) + 1:
            raise BrokerError(
                ErrorCode.BROKER_NOT_AVAILABLE,
                f"{tp}: only {confirmed} of {len(others) + 1} brokers confirm that broker {leader.broker_id} leads",
            )

    # --- connections ---

    def connection(self, broker_id: int) -> BlockingConnection:
        """Return the open connection to a broker, or open one.

        Raises:
            BrokerError: BROKER_NOT_AVAILABLE if the broker's address is unknown, NETWORK_EXCEPTION.
        """
        open_one = self._connections.get(broker_id)
        if open_one is not None and not open_one.closed:
            return open_one
        connection = self.open_connection(broker_id)
        self._keep(broker_id, connection)
        return connection

    def open_connection(self, broker_id: int, *, at_most_s: float | None = None) -> BlockingConnection:
        """Return a new connection that the caller owns.

        The caller may use the connection for long requests that must not delay other requests. ``at_most_s`` limits
        each wait for the broker, in addition to the client's own timeouts.

        Raises:
            BrokerError: for the same reasons as in ``connection``.
        """
        endpoint = self.metadata.endpoint(broker_id)
        if endpoint is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {broker_id} is not registered")
        connection = self._open(Address(endpoint.host, endpoint.port), at_most_s=at_most_s)
        try:
            check_broker(connection.address, found=connection.hello.broker_id, expected=broker_id)
        except BrokerError:
            connection.close()
            raise
        return connection

    def any_connection(self) -> BlockingConnection:
        """Return an open connection. If there is none, connect to a known broker, or else to a bootstrap address.

        Raises:
            BrokerError: NETWORK_EXCEPTION with all addresses that were tried, or another error of one of them.
        """
        return self._connections[self.run(self.core.any_broker())]

    def _keep(self, broker_id: int, connection: BlockingConnection) -> None:
        """Store a new connection, and close the earlier one to the same broker."""
        earlier = self._connections.get(broker_id)
        self._connections[broker_id] = connection
        self.core.on_connected(broker_id)
        if earlier is not None:
            earlier.close()

    def pause_ms(self, count: int) -> float:
        """Return the delay, in ms with jitter, after failure number ``count`` (from 0)."""
        return self._backoff.delay_ms(count, self.core.roll())

    def _open(self, address: Address, *, at_most_s: float | None = None) -> BlockingConnection:
        if self._closed:
            raise ConfigError("this client is closed")
        limit_s = self.timeout_s if at_most_s is None else min(at_most_s, self.timeout_s)
        return BlockingConnection(
            address.host,
            address.port,
            client_id=self._client_id,
            cluster_id=self.metadata.cluster_id,
            connect_timeout_s=min(self._connect_timeout_s, limit_s),
            timeout_s=min(self.request_timeout_s, limit_s),
            security=self.security,
        )
