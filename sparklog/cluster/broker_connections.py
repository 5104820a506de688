"""The controller's connections to brokers: one each, opened when there is something to say, dropped when it fails.

Nothing is queued here: the core has at most one update under way per broker and decides when to try again.
"""

from __future__ import annotations

import asyncio
import logging

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, host_and_port
from sparklog.net.async_client import AsyncConnection
from sparklog.net.greeting import Credentials
from sparklog.protocol.messages import Reply, Request

log = logging.getLogger(__name__)


#: For one answer. Long: a broker may have thousands of logs to create first.
_ANSWER_TIMEOUT_S = 30.0


class BrokerConnections:
    """Owner: one controller term, on its loop. ``close`` ends all."""

    def __init__(
        self, *, client_id: str, cluster_id: str, connect_timeout_s: float, credentials: Credentials | None = None
    ) -> None:
        self._credentials = credentials
        self._client_id = client_id
        self._cluster_id = cluster_id
        self._connect_timeout_s = connect_timeout_s
        self._open: dict[int, tuple[BrokerEndpoint, AsyncConnection]] = {}
        self._opening: dict[int, asyncio.Lock] = {}

    async def request(self, broker: BrokerEndpoint, message: Request) -> Reply:
        """Ask this incarnation of the broker.

        Raises:
            BrokerError: not reached, connection lost, or no answer in time; the connection is dropped.
        """
        connection = await self._connection(broker)
        try:
            reply, _ = await asyncio.wait_for(connection.request(message), _ANSWER_TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError):
            self._drop(broker.broker_id, connection)
            raise BrokerError(
                ErrorCode.REQUEST_TIMED_OUT, f"broker {broker.broker_id} did not answer within {_ANSWER_TIMEOUT_S:g} s"
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
                # Another incarnation may be another process on the same port: its hello decides, not an old socket.
                self._drop(broker.broker_id, connection)
            connection = await AsyncConnection.open(
                broker.host,
                broker.port,
                client_id=self._client_id,
                cluster_id=self._cluster_id,
                connect_timeout_s=self._connect_timeout_s,
                credentials=self._credentials,
                proof_required=broker.proves,
            )
            found = connection.hello.broker_id if connection.hello is not None else None
            if found != broker.broker_id:
                # A dead broker's port may be another one's by now, and incarnations are counted for each alone.
                connection.close()
                raise BrokerError(
                    ErrorCode.NETWORK_EXCEPTION,
                    f"{host_and_port(broker.host, broker.port)}: broker {found} found, {broker.broker_id} expected",
                )
            self._open[broker.broker_id] = (broker, connection)
            return connection

    def _drop(self, broker_id: int, connection: AsyncConnection) -> None:
        connection.close()
        known = self._open.get(broker_id)
        if known is not None and known[1] is connection:
            del self._open[broker_id]

    def close(self) -> None:
        for _, connection in self._open.values():
            connection.close()
        self._open.clear()
