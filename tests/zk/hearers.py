"""Brokers with a real wire protocol that only store a controller's updates, and a controller for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sparklog.cluster.controller_loop import ControllerLoop
from sparklog.errors import ErrorCode
from sparklog.model import LeaderAndIsr, TopicPartition, TopicRecord
from sparklog.net.server import Server, serve
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    ControlUpdate,
    ControlUpdateReply,
    DescribeBroker,
    DescribeBrokerReply,
    HelloReply,
    PartitionDecision,
    ReplicaDescription,
    Request,
)
from sparklog.zk.broker_registry import BrokerRegistry
from sparklog.zk.cluster_store import ClusterStore

from .support import broker, opened, until

SESSION_TIMEOUT_MS = 1500
RECORD = TopicRecord("t", "id-1", ((1, 2, 3), (2, 3, 1), (3, 1, 2)), ())


class Hearer:
    """A broker that registers, responds to updates, and stores the newest version of each decision."""

    def __init__(self, broker_id: int, store: ClusterStore) -> None:
        self.broker_id = broker_id
        self.store = store
        self.known: dict[TopicPartition, LeaderAndIsr] = {}
        self.versions: dict[TopicPartition, int] = {}
        #: the last update of each decision, regardless of its version
        self.decisions: dict[TopicPartition, PartitionDecision] = {}
        self.brokers: list[int] = []
        self.topics: set[str] = set()
        self.updates: list[ControlUpdate] = []
        self.log_ends: dict[TopicPartition, tuple[int, int]] = {}
        self.registry: BrokerRegistry
        self.server: Server
        #: Responses that wait for ``release``; None if this broker responds at once.
        self.held: list[ControlUpdateReply] | None = None

    def __call__(self, connection: ServerConnection) -> Hearer:
        self.connection = connection
        return self

    def request_received(self, request: Request, body: memoryview) -> None:
        if isinstance(request, DescribeBroker):
            replicas = tuple(
                ReplicaDescription(tp.topic, tp.partition, "follower", 0, 0, 0, end, 0, "", epoch)
                for tp, (epoch, end) in self.log_ends.items()
            )
            self.connection.reply(
                DescribeBrokerReply(request.cid, self.broker_id, self.incarnation, 1, "", "", "running", replicas, {})
            )
            return
        assert isinstance(request, ControlUpdate)
        code = ErrorCode.NONE if request.incarnation == self.incarnation else ErrorCode.STALE_BROKER_EPOCH
        if code is ErrorCode.NONE:
            self._take(request)
        reply = ControlUpdateReply(request.cid, code)
        if self.held is None:
            self.connection.reply(reply)
        else:
            self.held.append(reply)

    def hold(self) -> None:
        """Send no more responses to updates until ``release``."""
        self.held = []

    def release(self) -> None:
        held, self.held = self.held or [], None
        for reply in held:
            self.connection.reply(reply)

    def _take(self, update: ControlUpdate) -> None:
        self.updates.append(update)
        if update.full:
            self.known, self.versions, self.topics = {}, {}, set()
        if update.brokers is not None:
            self.brokers = [endpoint.broker_id for endpoint in update.brokers]
        self.topics |= {change.name for change in update.topics}
        for decision in update.partitions:
            tp = TopicPartition(decision.topic, decision.partition)
            self.decisions[tp] = decision
            if decision.version > self.versions.get(tp, -1):
                self.known[tp], self.versions[tp] = decision.state, decision.version
        for name, _ in update.deleted:
            self.topics.discard(name)
            self.known = {tp: state for tp, state in self.known.items() if tp.topic != name}
            self.versions = {tp: version for tp, version in self.versions.items() if tp.topic != name}

    def connection_lost(self) -> None: ...

    @property
    def incarnation(self) -> int:
        return self.registry.incarnation

    def leaders(self) -> list[int]:
        return [state.leader for _, state in sorted(self.known.items())]


@asynccontextmanager
async def hearing(
    connect: str, broker_id: int, *, trusted: bool = True, session_timeout_ms: int = SESSION_TIMEOUT_MS
) -> AsyncIterator[Hearer]:
    async with opened(connect, session_timeout_ms=session_timeout_ms) as store:
        hearer = Hearer(broker_id, store)
        cluster_id = await store.cluster_id()
        hearer.server = await serve(
            hearer,
            host="127.0.0.1",
            port=0,
            describe=lambda cid, version: HelloReply(cid, version, broker_id, hearer.incarnation, cluster_id, 2**20),
            max_frame_bytes=2**24,
            max_in_flight=10,
            queued_max_bytes=2**24,
        )
        try:
            registration = broker(broker_id, host="127.0.0.1", port=hearer.server.port, trusted=trusted)
            hearer.registry = BrokerRegistry(store.session, registration)
            await hearer.registry.start()
            yield hearer
            await hearer.registry.close()
        finally:
            await hearer.server.close()


@asynccontextmanager
async def controlled(connect: str, session_timeout_ms: int = SESSION_TIMEOUT_MS) -> AsyncIterator[ControllerLoop]:
    loop = ControllerLoop(connect, session_timeout_ms=session_timeout_ms)
    loop.start()
    try:
        yield loop
    finally:
        await asyncio.to_thread(loop.stop)


def run_with_three(
    connect: str,
    scenario: Callable[[ControllerLoop, list[Hearer]], object],
    session_timeout_ms: int = SESSION_TIMEOUT_MS,
) -> None:
    """Start three brokers, a controller, and topic t, and wait until all know its leaders."""

    async def run() -> None:
        async with (
            hearing(connect, 1, session_timeout_ms=session_timeout_ms) as one,
            hearing(connect, 2, session_timeout_ms=session_timeout_ms) as two,
            hearing(connect, 3, session_timeout_ms=session_timeout_ms) as three,
            controlled(connect, session_timeout_ms) as loop,
        ):
            hearers = [one, two, three]
            await until(lambda: all(h.brokers == [1, 2, 3] for h in hearers), "a controller")
            await one.store.create_topic(RECORD)
            await until(lambda: all(h.leaders() == [1, 2, 3] for h in hearers), "three leaders, known to all")
            await scenario(loop, hearers)  # type: ignore[misc]

    asyncio.run(run())
