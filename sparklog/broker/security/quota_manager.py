"""The enforcement of quotas in one broker.

The broker handles a request, and charges the client for its bytes and for the time that it used the event loop. If the
client exceeds a quota, each reply contains a wait (``throttle_time_ms``), and the broker delays the connection's next
request by this time. During this time, the broker does not read from the socket. A client could open a new connection
for each request to avoid the wait. So the first request that uses a quota on a connection waits until the bucket of the
quota (``TokenBucket``) has no debt from the client's earlier requests.

Brokers and controllers are exempt. While no quota is set, the broker uses the handlers without quotas.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from msgspec.structs import replace

from sparklog.broker.requests.dispatch import HandleRequest, Handlers
from sparklog.broker.requests.slices import Slices, answer_failure
from sparklog.broker.security.forwarding_connections import client_of
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.connection_slots import ConnectionStanding
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Fetch, Produce
from sparklog.security.connection_limits import ConnectionLimits
from sparklog.security.quotas import (
    CONSUMER_BYTE_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    QuotaBuckets,
    QuotaTable,
    TokenBucket,
)

_log = logging.getLogger(__name__)

#: Requests that wait because of a quota may use this part of ``queued.max.bytes``: one eighth.
_HELD_PART = 8
#: A wait may end early by this time, because the event loop rounds its timers to milliseconds.
_EARLY_S = 0.002
_PERCENT = 0.01
#: By the type of a request: the quota that limits the bytes of the request or of its reply.
_QUOTA_OF: dict[type, str] = {Produce: PRODUCER_BYTE_RATE, Fetch: CONSUMER_BYTE_RATE}


_R = TypeVar("_R")
_T = TypeVar("_T")
#: A function that responds to a request if the request had to wait and its handler then failed.
_OnFailure = Callable[[ServerConnection, Any, Exception], None]


class _Size:
    """A substitute for the body of a request, of which only the size is known here."""

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


class Fetching(Protocol):
    """The part of the fetch handler that the quota manager uses to learn the bytes and the time that consumers use.

    The fetch handler calls ``consumer_sent`` with the bytes of each reply to a consumer. It calls ``time_used`` with
    the seconds of each later read for a fetch that waits for data.
    """

    consumer_sent: Callable[[ServerConnection, int], int] | None
    time_used: Callable[[ServerConnection, float], None] | None


@dataclass(eq=False)
class _Client:
    """The quota state of one connection: its buckets, by the quota's name, and its wait."""

    buckets: dict[str, TokenBucket]
    #: The quotas that no request of this connection has used yet.
    unused: set[str] = field(default_factory=set)
    #: The monotonic time until which the connection waits; 0 if it does not wait.
    until_s: float = 0.0
    timer: asyncio.TimerHandle | None = None
    #: The monotonic time up to which the current request has been charged; 0 while no request is being handled.
    began_s: float = 0.0
    #: The seconds for which this connection's requests have been charged so far.
    charged_s: float = 0.0
    #: The size of each request that waits, and the function that handles it. Only a connection that may
    #: have several requests in progress, such as a Kafka client's, can have more than one request that waits.
    held: list[tuple[int, Callable[[], None]]] = field(default_factory=list)


_EXEMPT = _Client({})


class QuotaManager:
    """The component that enforces the quotas of clients in one broker.

    A client may use the allowance of ``window_s`` seconds at once. Requests that wait because of a quota may use only
    one eighth of ``queued_max_bytes``. Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self, counters: Counter[str], connections: ConnectionLimits, *, window_s: float, queued_max_bytes: int
    ) -> None:
        self._counters = counters
        self.connections = connections
        self._max_held_bytes = queued_max_bytes // _HELD_PART
        self._held_bytes = 0
        self._table = QuotaTable()
        self._buckets = {
            PRODUCER_BYTE_RATE: QuotaBuckets(PRODUCER_BYTE_RATE, window_s=window_s),
            CONSUMER_BYTE_RATE: QuotaBuckets(CONSUMER_BYTE_RATE, window_s=window_s),
            REQUEST_PERCENTAGE: QuotaBuckets(REQUEST_PERCENTAGE, window_s=window_s, unit=_PERCENT),
        }
        self._clients: dict[ServerConnection, _Client] = {}
        #: The tables that the broker uses, each with its handlers without and with quotas.
        self._tables: list[tuple[dict[type, HandleRequest], Handlers, Handlers]] = []
        self._fetching: Fetching | None = None
        self._slices: Slices | None = None
        #: Whether any quota of requests is set.
        self.active = False

    # --- the parts of the broker ---

    def limited(self, handlers: Handlers, fetching: Fetching, slices: Slices) -> Handlers:
        """Return a table of handlers for the broker to use in place of ``handlers``.

        While quotas are set, the handlers in this table enforce them: ``apply`` exchanges the handlers when the quotas
        change. A broker calls this for each of its tables of handlers, before the first ``apply``.
        """
        limited = {kind: self._wrapped(kind, handle) for kind, handle in handlers.items()}
        in_use = dict(handlers)
        self._tables.append((in_use, handlers, limited))
        self._fetching = fetching
        self._slices = slices
        return in_use

    def apply(self, table: QuotaTable) -> None:
        """Enforce these quotas from now on. The connections that wait because of earlier quotas continue at once."""
        self._table = table
        self.active = table.limits_clients
        for in_use, plain, limited in self._tables:
            in_use.update(limited if self.active else plain)
        if self._fetching is not None:
            self._fetching.consumer_sent = self._consumer_sent if table.has(CONSUMER_BYTE_RATE) else None
            self._fetching.time_used = self._time_used if table.has(REQUEST_PERCENTAGE) else None
        if self._slices is not None:
            self._slices.used = self._time_used if table.has(REQUEST_PERCENTAGE) else None
        self.connections.apply(table)
        for buckets in self._buckets.values():
            buckets.keep_only(table)
        clients, self._clients = self._clients, {}
        for connection, client in clients.items():
            self._end_wait(connection, client)

    @property
    def table(self) -> QuotaTable:
        return self._table

    @property
    def limits_consumers(self) -> bool:
        """Return whether a quota for consumers exists.

        If so, consumers on this host must not read log files directly.
        """
        return self._table.has(CONSUMER_BYTE_RATE)

    def throttle_ms(self, connection: ServerConnection) -> int:
        """Return the time in milliseconds that the next request of this connection must wait."""
        client = self._clients.get(cast(ServerConnection, client_of(connection)))
        if client is None or not client.until_s:
            return 0
        return max(0, math.ceil((client.until_s - time.monotonic()) * 1000))

    def connection_lost(self, connection: ServerConnection) -> None:
        client = self._clients.pop(connection, None)
        connection.throttle_ms = None
        if client is not None:
            if client.timer is not None:
                client.timer.cancel()
            self._held_bytes -= sum(size for size, _ in client.held)

    # --- requests ---

    def begin(
        self,
        connection: ServerConnection,
        kind: type,
        request: _R,
        size: int,
        handle: Callable[[ServerConnection, _R, Sized], None],
        *,
        failed: Callable[[Exception], None],
    ) -> None:
        """Handle a request of another protocol, and enforce the quotas as for a request of this ``kind``.

        ``size`` is the size of its records. A fetch gets a smaller ``max_bytes`` if a quota limits it. If the request
        has to wait and ``handle`` then raises an error, ``failed`` is called with it.

        Raises:
            BrokerError: THROTTLING_QUOTA_EXCEEDED, the requests that wait would have too many bytes in total.
        """
        if self.active:
            limited = self._wrapped(kind, handle, lambda _connection, _request, error: failed(error))
            limited(connection, request, cast(memoryview, _Size(size)))
        else:
            handle(connection, request, _Size(size))

    def _wrapped(
        self, kind: type, handle: Callable[[ServerConnection, Any, Any], None], failed: _OnFailure = answer_failure
    ) -> HandleRequest:
        quota = _QUOTA_OF.get(kind, "")

        def limited(connection: ServerConnection, request: Any, body: memoryview) -> None:
            owner = cast(ServerConnection, client_of(connection))
            client = self._clients.get(owner) or self._new_client(owner)
            if client is _EXEMPT:
                handle(connection, request, body)
                return
            if client.unused:
                wait_s = self._earlier_excess_s(client, quota)
                if wait_s > 0:
                    self._hold(
                        connection, client, wait_s=wait_s, request=request, body=body, limited=limited, failed=failed
                    )
                    return
            began_s = time.monotonic()
            if quota and (bucket := client.buckets.get(quota)) is not None:
                if quota == PRODUCER_BYTE_RATE:
                    self._wait(owner, client, bucket.charge(len(body), began_s))
                else:
                    # A reply of at most one window's bytes keeps the wait short.
                    request = replace(request, max_bytes=min(request.max_bytes, max(1, int(bucket.burst))))
            client.began_s = began_s
            try:
                handle(connection, request, body)
            finally:
                self._charge_so_far(owner, client)
                client.began_s = 0.0

        return limited

    def _charge_so_far(self, owner: ServerConnection, client: _Client) -> None:
        """Charge the time of the request that is being handled, up to now."""
        if client.began_s:
            began_s, client.began_s = client.began_s, time.monotonic()
            self._charge_time(owner, client, client.began_s - began_s)

    def _time_of_reply(self, owner: ServerConnection, client: _Client) -> int:
        """Return the throttle time of a reply. Most handlers reply before they return, so charge their time first."""
        if self._clients.get(owner) is not client:  # The quotas have changed.
            owner.throttle_ms = None
            return 0
        self._charge_so_far(owner, client)
        if not client.began_s and self._slices is not None and client_of(self._slices.connection) is owner:
            self._charge_time(owner, client, self._slices.take_time())
        return self.throttle_ms(owner)

    def _charge_time(self, owner: ServerConnection, client: _Client, took_s: float) -> None:
        if (bucket := client.buckets.get(REQUEST_PERCENTAGE)) is not None:
            client.charged_s += took_s
            self._wait(owner, client, bucket.charge(took_s, time.monotonic()))

    def timed(self, connection: ServerConnection, step: Callable[[], _T]) -> _T:
        """Do one step of a request of another protocol, and return its result. Charge the client for its time.

        If the step handles a request of sparklog's protocol, the time of that request is not charged twice.
        """
        client = self._clients.get(connection) or self._new_client(connection)
        before_s, began_s = client.charged_s, time.monotonic()
        try:
            return step()
        finally:
            own_s = time.monotonic() - began_s - (client.charged_s - before_s)
            if own_s > 0 and not connection.closed and self._clients.get(connection) is client:
                self._charge_time(connection, client, own_s)

    @property
    def limits_time(self) -> bool:
        """Return whether a quota for the time of requests exists."""
        return self._table.has(REQUEST_PERCENTAGE)

    def _new_client(self, connection: ServerConnection) -> _Client:
        if connection.identity is not None or connection.standing is ConnectionStanding.PEER:
            return _EXEMPT
        now_s, user, client_id = time.monotonic(), connection.principal.name, connection.client_id
        found: dict[str, TokenBucket] = {}
        for name, buckets in self._buckets.items():
            limit = self._table.limit(name, user=user, client_id=client_id)
            if limit is not None:
                found[name] = buckets.bucket(limit, now_s)
        client = self._clients[connection] = _Client(found, set(found))
        if found:
            connection.throttle_ms = partial(self._time_of_reply, connection, client)
        return client

    def _earlier_excess_s(self, client: _Client, quota: str) -> float:
        """Return the time for which the first request that uses a quota has to wait."""
        now_s, wait_s = time.monotonic(), 0.0
        for name in client.unused & {quota, REQUEST_PERCENTAGE}:
            client.unused.discard(name)
            wait_s = max(wait_s, client.buckets[name].wait_s(now_s))
        return wait_s

    def _hold(
        self,
        connection: ServerConnection,
        client: _Client,
        *,
        wait_s: float,
        request: Any,
        body: memoryview,
        limited: HandleRequest,
        failed: _OnFailure,
    ) -> None:
        """Handle the request after ``wait_s``. If this fails, call ``failed``.

        Raises:
            BrokerError: THROTTLING_QUOTA_EXCEEDED, the requests that wait would have too many bytes in total.
        """
        if self._held_bytes + len(body) > self._max_held_bytes:
            client.unused.update(client.buckets)
            if isinstance(request, Produce) and not request.acks:  # such a producer gets no replies
                connection.done(request.cid)
                connection.close()
                return
            who = f"client {connection.client_id!r} of {connection.principal}"
            detail = f"{who} has exceeded a quota and must wait {wait_s:.1f} s"
            raise BrokerError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, detail)

        def handle() -> None:
            try:
                limited(connection, request, body)
            except Exception as error:
                _answer(connection, partial(failed, connection, request, error))

        self._held_bytes += len(body)
        client.held.append((len(body), handle))
        self._wait(cast(ServerConnection, client_of(connection)), client, wait_s)

    def _consumer_sent(self, connection: ServerConnection, size: int) -> int:
        """Charge the bytes of a reply to a consumer, and return the time that the reply has to contain."""
        connection = cast(ServerConnection, client_of(connection))
        client = self._clients.get(connection)
        bucket = client.buckets.get(CONSUMER_BYTE_RATE) if client is not None else None
        if client is None or bucket is None:
            return 0
        self._wait(connection, client, bucket.charge(size, time.monotonic()))
        return self.throttle_ms(connection)

    def _time_used(self, connection: object, took_s: float) -> None:
        """Charge the time of a slice of a long request, or of a later read for a fetch that waits.

        If this happens while a request of the same connection is being handled, the time of that request includes it.
        """
        connection = client_of(connection)
        client = self._clients.get(connection) if isinstance(connection, ServerConnection) else None
        if client is not None and not client.began_s:
            self._charge_time(cast(ServerConnection, connection), client, took_s)

    # --- waits ---

    def _wait(self, connection: ServerConnection, client: _Client, wait_s: float) -> None:
        """Delay the next request of the connection for at least ``wait_s`` from now on."""
        if wait_s <= 0 or connection.closed:
            return
        if not client.until_s:
            self._counters["quotas.waits"] += 1
            connection.pause_requests()
            client.timer = asyncio.get_running_loop().call_later(wait_s, self._check_wait, connection, client)
        client.until_s = max(client.until_s, time.monotonic() + wait_s)

    def _check_wait(self, connection: ServerConnection, client: _Client) -> None:
        left_s = client.until_s - time.monotonic()
        if left_s > _EARLY_S:
            client.timer = asyncio.get_running_loop().call_later(left_s, self._check_wait, connection, client)
        else:
            self._end_wait(connection, client)

    def _end_wait(self, connection: ServerConnection, client: _Client) -> None:
        if not client.until_s:
            return
        client.until_s = 0.0
        if client.timer is not None:
            client.timer.cancel()
            client.timer = None
        held, client.held = client.held, []
        self._held_bytes -= sum(size for size, _ in held)
        for _, handle in held:  # before ``resume_requests``, so that no later request overtakes them
            handle()
        connection.resume_requests()


def _answer(connection: ServerConnection, failed: Callable[[], None]) -> None:
    """Answer a held request that has failed. If this fails too, close the connection.

    The other held requests must get their answers, so this raises no error.
    """
    try:
        failed()
    except Exception:
        _log.exception("a request of %s that a quota had delayed got no response", connection.peer)
        connection.close()
