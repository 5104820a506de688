"""A fetcher whose leader does not keep to the protocol: it says so and begins anew, and does not end in silence."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from sparklog.broker.fetcher import Fetchers
from sparklog.broker.partition import Partition
from sparklog.broker.state import BrokerState
from sparklog.config import broker_config
from sparklog.model import BrokerEndpoint, TopicPartition
from sparklog.net.server import ServerConnection, serve
from sparklog.protocol.messages import ControlUpdate, Fetch, FetchedPartition, FetchReply, HelloReply, Request

LEADER = 1


class Liar:
    """Announces a batch and sends no bytes of it."""

    def __init__(self) -> None:
        self.connections: list[ServerConnection] = []
        self.asked = asyncio.Event()

    def __call__(self, connection: ServerConnection) -> Liar:
        self.connections.append(connection)
        return self

    def request_received(self, request: Request, body: memoryview) -> None:
        assert isinstance(request, Fetch)
        lie = FetchedPartition("t", 0, 0, 0, 0, 0, 1, 1, 0)
        self.connections[-1].reply(FetchReply(request.cid, 0, 7, (lie,)))
        if len(self.connections) > 2:
            self.asked.set()

    def connection_lost(self) -> None: ...


def test_an_answer_that_cannot_be_read_costs_its_connection_and_not_the_fetcher(tmp_path: Path) -> None:
    async def scenario() -> None:
        liar = Liar()
        server = await serve(
            liar,
            host="127.0.0.1",
            port=0,
            describe=lambda cid, version: HelloReply(cid, version, LEADER, 1, "cluster", 2**20),
            max_frame_bytes=2**20,
            max_in_flight=10,
            queued_max_bytes=2**20,
        )
        broker = BrokerState(
            2,
            "cluster",
            log_dir=str(tmp_path),
            config=broker_config({}),
            on_log_failed=lambda *_: None,
            restart=lambda: None,
        )
        endpoint = BrokerEndpoint(LEADER, "127.0.0.1", server.port, 1)
        broker.cache.apply(ControlUpdate(0, "c", 1, 1, False, (endpoint,), (), ()))
        fetchers = Fetchers(broker)
        log = SimpleNamespace(log_end_offset=0, last_epoch=-1, log_start_offset=0)
        followed = SimpleNamespace(tp=TopicPartition("t", 0), topic_id="id", log=log, stopped=False)
        fetchers.follow(cast(Partition, followed), LEADER, 0)
        await asyncio.wait_for(liar.asked.wait(), 60)
        assert broker.counters["fetcher.connections.failed"] >= 2
        await fetchers.close()
        await server.close()

    asyncio.run(scenario())
