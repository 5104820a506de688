"""The controller's connections to brokers: one per broker, opened on demand and closed on failure.

This module has no queue, because ``Controller`` has at most one update in flight per broker and decides when to retry.
"""

from __future__ import annotations

import asyncio
import logging

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import DEFAULT_LISTENER, BrokerEndpoint, host_and_port
from sparklog.net.async_client import AsyncConnection
from sparklog.net.client_security import ClientSecurity
from sparklog.net.greeting import Credentials
from sparklog.protocol.messages import Reply, Request

log = logging.getLogger(__name__)
_PLAINTEXT = ClientSecurity()

#: The time-out of a response. It is long, because a broker may have to create thousands of logs first.
_ANSWER_TIMEOUT_S = 30.0


class BrokerConnections:
    """The pool of the connections of one controller term to brokers. ``close`` closes all of them.

    Not thread-safe: use it only on the event loop of the term.
    """

    def __init__(
        self,
        *,
        client_id: str,
        cluster_id: str,
        connect_timeout_s: float,
        credentials: Credentials | None = None,
        listener: str = DEFAULT_LISTENER,
        security: ClientSecurity = _PLAINTEXT,
    ) -> None:
        """Create the pool without any connection. It will use the brokers' ``listener``, with ``security``."""
        self._security = security
        self._listener = listener
        self._credentials = credentials
        self._client_id = client_id
        self._cluster_id = cluster_id
        self._connect_timeout_s = connect_timeout_s
        self._open: dict[int, tuple[BrokerEndpoint, AsyncConnection]] = {}
        self._opening: dict[int, asyncio.Lock] = {}

    async def request(self, broker: BrokerEndpoint, message: Request) -> Reply:
        """Send a request to this incarnation of the broker and return the reply.

        Raises:
            BrokerError: the broker is unreachable, the connection was lost, or the request timed out. The connection is
                then closed.
        """
        connection = await self._connection(broker)
        try:
            reply, _ = await asyncio.wait_for(connection.request(message), _ANSWER_TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError):
            self._drop(broker.broker_id, connection)
            raise BrokerError(
                ErrorCode.REQUEST_TIMED_OUT, f"broker {broker.broker_id} did not respond within {_ANSWER_TIMEOUT_S:g} s"
            ) from None
        except BrokerError:
            self._drop(broker.broker_id, connection)
            raise
        return reply

    async def _connection(self, broker: BrokerEndpoint) -> AsyncConnection:
        async with self._opening.setdefault(broker.broker_id, asyncio.Lock()):
            known = self._open.get(broker.broker_id)
            if known is not None:
                endpoint, connection = known
                if endpoint == broker and not connection.closed:
                    return connection
                # Another incarnation may be another process on the same port: open a new connection and check its
                # hello.
                self._drop(broker.broker_id, connection)
            address = broker.at(self._listener)
            if address is None:
                detail = f"broker {broker.broker_id} has no listener {self._listener}"
                raise BrokerError(ErrorCode.NETWORK_EXCEPTION, detail)
            connection = await AsyncConnection.open(
                address.host,
                address.port,
                client_id=self._client_id,
                cluster_id=self._cluster_id,
                connect_timeout_s=self._connect_timeout_s,
                credentials=self._credentials,
                proof_required=broker.proves,
                security=self._security,
            )
            found = connection.hello.broker_id if connection.hello is not None else None
            if found != broker.broker_id:
                # Another broker may now use a dead broker's port, and each broker counts its own incarnations.
                connection.close()
                raise BrokerError(
                    ErrorCode.NETWORK_EXCEPTION,
                    f"{host_and_port(address.host, address.port)}: expected broker {broker.broker_id}, found {found}",
                )
            self._open[broker.broker_id] = (broker, connection)
            return connection

    def _drop(self, broker_id: int, connection: AsyncConnection) -> None:
        connection.close()
        known = self._open.get(broker_id)
        if known is not None and known[1] is connection:
            del self._open[broker_id]

    async def close(self) -> None:
        """Close the connections, and wait until they have ended."""
        closing = [connection for _, connection in self._open.values()]
        self._open.clear()
        for connection in closing:
            connection.close()
        await asyncio.gather(*(connection.ended() for connection in closing))
