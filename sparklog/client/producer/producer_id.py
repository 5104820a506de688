"""The request for a producer id, repeated until a broker returns one or no batch needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.producer.partition_queues import PartitionQueues, ProducerIdentity
from sparklog.errors import BrokerError
from sparklog.protocol.messages import InitProducerId, InitProducerIdReply


class ProducerIdRequest:
    """The request and its retries. Owner: the ``Sender``. Everything runs on its loop."""

    def __init__(self, cluster: LoopCluster, queues: PartitionQueues, *, changed: Callable[[], None]) -> None:
        """Create the request without sending it. ``changed`` is called when there is an id or none is needed."""
        self._cluster = cluster
        self._queues = queues
        self._changed = changed
        self._is_in_flight = False

    def begin(self) -> None:
        """Start the request without waiting. Idempotent while a request is in flight."""
        if not self._is_in_flight:
            self._is_in_flight = True
            self._cluster.start(self._ask())

    async def _ask(self) -> None:
        failures = 0
        while not self._queues.empty:
            try:
                reply = await self._cluster.ask_any(InitProducerId(0), InitProducerIdReply)
            except BrokerError as error:
                self._cluster.last_problem = str(error)
                await asyncio.sleep(self._cluster.pause_s(failures))
                failures += 1
                continue
            self._queues.set_identity(ProducerIdentity(reply.producer_id, reply.producer_epoch))
            break
        self._is_in_flight = False
        self._changed()
