"""Tests that the embedded ZooKeeper is restarted when it dies, and only then."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.process import send_signal
from sparklog.cluster.zookeeper_supervisor import ZookeeperSupervisor
from sparklog.zk.session import ZkSession
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[ZookeeperSupervisor]:
    keeper = ZookeeperSupervisor(EmbeddedZookeeper.start(tmp_path / "zookeeper"))
    try:
        yield keeper
    finally:
        keeper.stop()


def test_a_killed_server_resumes_its_sessions(keeper: ZookeeperSupervisor) -> None:
    async def story() -> None:
        session = await ZkSession.open(keeper.server.connect, session_timeout_ms=20_000)
        try:
            await session.create("/kept", b"data")
            first = keeper.server
            send_signal(first.process, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: keeper.server is not first)
            assert keeper.server.connect == first.connect
            await session.connected(timeout_ms=20_000)
            assert (await session.get("/kept")).data == b"data"
            assert session.generation == 1  # the session survived as well
        finally:
            await session.close()

    asyncio.run(story())


def test_a_server_that_another_driver_has_stopped_stays_down(keeper: ZookeeperSupervisor) -> None:
    ours = keeper.server
    EmbeddedZookeeper.start(ours.directory).stop()
    wait_until(lambda: not keeper._thread.is_alive())
    assert keeper.server is ours
    assert not ours.is_alive
