"""Tests of one generation with a real ZooKeeper and brokers, without Spark: start, adoption, the ordered stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparklog.cluster.barrier_task import alone, supervise
from sparklog.cluster.driver_registration import DriverRegistration
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.generation import Directive, GenerationReport, GenerationSpec, Phase
from sparklog.cluster.process import identify, send_signal
from sparklog.errors import ClusterError
from sparklog.zk import codecs, paths
from sparklog.zk.errors import ZkError, ZkNoNode, ZkUnreachable
from sparklog.zk.session import Node
from tests.cluster.support import eventually, kill_noted, spec
from tests.ports import FirstPort

pytestmark = pytest.mark.integration

#: Longer than any wait here: the end of a broker becomes known before its session expires.
SESSION_S = 120
PATIENCE_S = 60.0


class Host:
    """A data directory with its ZooKeeper and a driver's registration."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.zookeeper = EmbeddedZookeeper.start(data_dir / "zookeeper")
        self.registration = DriverRegistration.take(self.zookeeper.connect)

    def spec(self, generation: int, **changes: object) -> GenerationSpec:
        return spec(
            self.data_dir,
            generation=generation,
            **{
                "zookeeper": self.zookeeper.connect,
                "cluster_id": self.registration.cluster_id,
                "driver_epoch": self.registration.epoch,
                "brokers_per_task": 3,
                "port": FirstPort.GENERATIONS,
                "session_timeout_ms": SESSION_S * 1000,
                **changes,
            },
        )

    async def say(self, generation: int, course: Phase) -> None:
        await asyncio.to_thread(self.registration.direct, Directive(self.registration.epoch, generation, course))

    async def begin(self, generation: int, **changes: object) -> tuple[asyncio.Task[str], GenerationReport]:
        await self.say(generation, Phase.RUN)
        task = self.submit(generation, **changes)
        return task, await self.reported(generation, task)

    def submit(self, generation: int, **changes: object) -> asyncio.Task[str]:
        return asyncio.create_task(supervise(self.spec(generation, **changes), task=0, gather=alone))

    async def reported(self, generation: int, task: asyncio.Task[str]) -> GenerationReport:
        await eventually(lambda: task.done() or self.registration.report(generation) is not None, timeout_s=PATIENCE_S)
        if task.done():
            task.result()
        report = self.registration.report(generation)
        assert report is not None
        return report

    def close(self) -> None:
        self.registration.close()
        for slot in self.data_dir.glob("slot-*"):
            kill_noted(slot)
        self.zookeeper.stop()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    try:
        yield host
    finally:
        host.close()


def test_brokers_live_through_generations_and_end_in_order(host: Host) -> None:
    async def story() -> None:
        first, report = await host.begin(1)
        assert [broker.broker_id for broker in report.brokers] == [0, 1, 2]
        assert report.problems == ()
        pids = [broker.pid for broker in report.brokers]
        live = await asyncio.to_thread(host.registration.live_brokers)
        assert [broker.broker_id for broker in live] == [0, 1, 2]
        own = Path("/proc/self/ns/pid").stat().st_ino
        assert [(broker.pid, broker.pid_namespace) for broker in live] == [(pid, own) for pid in pids]

        # The next generation may start before the last one has ended: it waits for the claims, and adopts.
        second = host.submit(2)
        await host.say(1, Phase.REGROUP)
        # before the node of directives contains another one
        assert await asyncio.wait_for(first, PATIENCE_S) == "regroup"
        await host.say(2, Phase.RUN)
        report = await host.reported(2, second)
        assert [(broker.pid, broker.adopted) for broker in report.brokers] == [(pid, True) for pid in pids]

        # A generation that received no directive, or received it too late, releases its slots when the next one is
        # announced.
        third, report = await host.begin(3)
        assert await asyncio.wait_for(second, PATIENCE_S) == "superseded"
        assert [(broker.pid, broker.adopted) for broker in report.brokers] == [(pid, True) for pid in pids]

        # ZooKeeper learns of the death of a process long before its session would expire.
        process = identify(pids[1])
        assert process is not None
        send_signal(process, signal.SIGKILL)

        def registrations() -> list[tuple[int, int]]:
            return [(live.broker_id, live.incarnation) for live in host.registration.live_brokers()]

        await eventually(lambda: (1, 1) not in registrations(), timeout_s=PATIENCE_S)
        await eventually(lambda: (1, 2) in registrations())

        await host.say(3, Phase.STOP)
        assert await asyncio.wait_for(third, PATIENCE_S) == "stop"
        assert host.registration.live_brokers() == ()
        assert all(identify(pid) is None for pid in pids)

        fourth, report = await host.begin(4)
        assert [broker.adopted for broker in report.brokers] == [False, False, False]
        assert [broker.port for broker in report.brokers] == [FirstPort.GENERATIONS + k for k in range(3)]
        await host.say(4, Phase.STOP)
        assert await asyncio.wait_for(fourth, PATIENCE_S) == "stop"

    asyncio.run(story())


def test_a_second_driver_is_refused_while_the_first_lives(host: Host) -> None:
    with pytest.raises(
        ClusterError, match=rf"another driver runs this cluster: .* driver epoch {host.registration.epoch}"
    ):
        DriverRegistration.take(host.zookeeper.connect)
    host.registration.close()
    second = DriverRegistration.take(host.zookeeper.connect)
    assert second.epoch == host.registration.epoch + 1
    second.close()


@pytest.mark.parametrize("gone", [ZkNoNode("/driver"), ZkUnreachable("no answer", True)])
def test_a_driver_registers_again_over_an_unreadable_node(host: Host, gone: ZkError) -> None:
    """After an expiry the node of the last session may still exist, and disappear between the refusal and the read
    of it; or ZooKeeper stops."""
    registration = host.registration

    async def taken_again() -> None:
        session, looks = registration._zk, []
        read = session.get

        def get(path: str, **more: Any) -> asyncio.Future[Node]:
            if path != paths.DRIVER:
                return read(path, **more)
            session.get = read  # type: ignore[method-assign]
            looks.append(path)
            answer: asyncio.Future[Node] = asyncio.get_running_loop().create_future()
            answer.set_exception(gone)
            return answer

        session.get = get  # type: ignore[method-assign]
        await registration._reclaim()  # its own node exists: the claim is refused, and one read fails
        assert looks == [paths.DRIVER]
        assert (await session.get(paths.DRIVER)).ephemeral_owner == session.session_id
        await session.delete(paths.DRIVER_EPOCH)
        again = asyncio.create_task(registration._reclaim())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(again), 0.5)
        await session.create(paths.DRIVER_EPOCH, codecs.encode(codecs.CounterNode(registration.epoch)))
        await again

    asyncio.run_coroutine_threadsafe(taken_again(), registration._loop).result(PATIENCE_S)
    assert not registration.lost.is_set()


def test_more_brokers_than_log_directories_is_a_short_report(host: Host) -> None:
    async def story() -> None:
        task, report = await host.begin(1, log_dirs=(str(host.data_dir / "slot-7"),))
        assert len(report.brokers) == 1
        await host.say(1, Phase.STOP)
        await task

    asyncio.run(story())
