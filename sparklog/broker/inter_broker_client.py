"""Requests that this broker sends to other brokers as a coordinator or as a leader.

There is one connection to each broker, opened for the first request and closed after a failure. A request ends early if
an update of the controller makes it pointless: the broker is no longer registered, or another broker is now the right
receiver. Otherwise requests to a broker that hangs would wait for their timeout, because such a broker keeps its
connections open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparklog.broker.context import BrokerContext
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint
from sparklog.net.async_client import AsyncConnection
from sparklog.protocol.messages import Reply, Request

_CONNECT_TIMEOUT_S = 3.0


@dataclass(eq=False, slots=True)
class _Asking:
    endpoint: BrokerEndpoint
    still: Callable[[], bool]
    given_up: asyncio.Future[None]


class InterBrokerClient:
    """A client for requests to other brokers, with one connection to each.

    ``purpose`` appears in the other broker's log. Not thread-safe: use it on the broker's event loop, until ``close``.
    """

    def __init__(self, context: BrokerContext, purpose: str) -> None:
        self._context = context
        self._client_id = f"broker {context.broker_id} {purpose}"
        self._open: dict[int, tuple[BrokerEndpoint, AsyncConnection]] = {}
        self._opening: dict[int, asyncio.Lock] = {}
        self._asking: set[_Asking] = set()
        context.metadata_listeners.append(self._metadata_changed)

    async def ask(self, broker_id: int, message: Request, *, timeout_s: float, still: Callable[[], bool]) -> Reply:
        """Send a request to a broker and return its reply.

        ``still`` returns whether the request is still needed. It is called after each change of the metadata. If it
        returns false, the request ends with an error.

        Raises:
            BrokerError: the broker's error, or NETWORK_EXCEPTION if the broker was not reached, gave no response in
                time, or the request is no longer needed.
        """
        endpoint = self._context.cache.peer(broker_id)
        if endpoint is None:
            raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"broker {broker_id} is not known to be live")
        asking = _Asking(endpoint, still, asyncio.get_running_loop().create_future())
        work = asyncio.ensure_future(self._ask(endpoint, message))
        self._asking.add(asking)
        try:
            waited: set[asyncio.Future[Any]] = {work, asking.given_up}
            await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            self._drop(broker_id)
            why = (
                "is no longer the broker for this request"
                if asking.given_up.done()
                else f"gave no response in {timeout_s:g} s"
            )
            raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"broker {broker_id} {why}")
        finally:
            self._asking.discard(asking)
            asking.given_up.cancel()
            if not work.done():
                work.cancel()

    async def _ask(self, endpoint: BrokerEndpoint, message: Request) -> Reply:
        try:
            connection = await self._connection(endpoint)
            reply, _ = await connection.request(message)
        except BrokerError as error:
            if error.code is not ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
                raise
            # The request itself is valid: the two brokers learn of a new cluster secret at different times. The next
            # connection repeats the proof of identity.
            self._drop(endpoint.broker_id)
            raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"broker {endpoint.broker_id}: {error.detail}") from None
        return reply

    async def _connection(self, endpoint: BrokerEndpoint) -> AsyncConnection:
        broker_id = endpoint.broker_id
        async with self._opening.setdefault(broker_id, asyncio.Lock()):
            known = self._open.get(broker_id)
            if known is not None:
                if known[0] == endpoint and not known[1].closed:
                    return known[1]
                self._drop(broker_id)
            connection = await AsyncConnection.open(
                endpoint.host,
                endpoint.port,
                client_id=self._client_id,
                cluster_id=self._context.cluster_id,
                connect_timeout_s=_CONNECT_TIMEOUT_S,
                credentials=self._context.credentials,
                broker_id=broker_id,
                proof_required=endpoint.proves,
                security=self._context.peers.client,
            )
            self._open[broker_id] = (endpoint, connection)
            return connection

    def _drop(self, broker_id: int) -> None:
        known = self._open.pop(broker_id, None)
        if known is not None:
            known[1].abort()

    def _metadata_changed(self) -> None:
        for asking in list(self._asking):
            gone = self._context.cache.peer(asking.endpoint.broker_id) != asking.endpoint
            if (gone or not asking.still()) and not asking.given_up.done():
                asking.given_up.set_result(None)

    def close(self) -> None:
        for _, connection in self._open.values():
            connection.close()
        self._open.clear()
