"""The producer's connections: a failed attempt is followed by another, whatever the clock says when a timer fires."""

from __future__ import annotations

import asyncio

from sparklog.client.async_link import AsyncLink
from sparklog.client.bootstrap import Address
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint
from sparklog.net.async_client import AsyncConnection


class _Refused(AsyncLink):
    """Its clock stands still, as a loop's may for a moment around a timer."""

    attempts = 0

    def _now(self) -> float:
        return 0.0

    async def _open(self, address: Address) -> AsyncConnection:
        self.attempts += 1
        raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"{address}: refused")


def test_a_refused_connection_is_tried_again() -> None:
    async def test() -> None:
        enough = asyncio.Event()

        def pump() -> None:  # as the sender does
            link.connection(0)
            if link.attempts >= 3:
                enough.set()

        link = _Refused("127.0.0.1:1", client_id="test", changed=pump, request_timeout_s=1.0)
        link.metadata.brokers[0] = BrokerEndpoint(0, "127.0.0.1", 1, 1)
        pump()
        await asyncio.wait_for(enough.wait(), 10)
        link.close()
        await link.closed()

    asyncio.run(test())
