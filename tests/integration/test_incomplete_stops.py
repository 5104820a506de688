"""Tests of stops that leave brokers running: they report it and keep ZooKeeper.

The brokers are real, and there is no Spark: the driver stops the brokers itself, or a generation of one task does.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from sparklog.cluster import directory_locks, embedded_zookeeper
from sparklog.cluster.barrier import Generations
from sparklog.cluster.barrier_task import STOPPED_IN_PART, alone, supervise
from sparklog.cluster.cluster_driver import ClusterDriver
from sparklog.cluster.cluster_secret import driver_keys
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.generation import Directive, GenerationSpec, Phase
from sparklog.cluster.local import LocalCluster
from sparklog.cluster.options import ClusterOptions, Sizing
from sparklog.cluster.process import boot_id
from sparklog.cluster.runtime_directory import noted_process
from sparklog.errors import ClusterError
from sparklog.model import BrokerRegistration
from sparklog.storage.directory_meta import Claim, claim_directory
from sparklog.zk.broker_registry import BrokerRegistry
from tests.cluster.support import eventually, kill_noted
from tests.ports import FirstPort
from tests.tiers import marked_after
from tests.zk.support import broker, opened

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0


class Drivers:
    """Successive drivers of a data directory, each with a generation without Spark."""

    def __init__(self, data_dir: Path) -> None:
        self.options = ClusterOptions(data_dir=data_dir, brokers=2, port=FirstPort.INCOMPLETE_STOPS)
        self._made: list[ClusterDriver] = []

    def take(self) -> ClusterDriver:
        driver = ClusterDriver(self.options)
        self.attach(driver)
        return driver

    def attach(self, driver: ClusterDriver) -> None:
        self._made.append(driver)
        driver.register()
        driver._generations = Generations(
            cast(Any, None), driver.registration, self.spec(driver), sizing=Sizing(1, spare=0)
        )

    def spec(self, driver: ClusterDriver, *, generation: int = 0, brokers: int = 2) -> GenerationSpec:
        spec = driver._spec("local[1]")
        return msgspec.structs.replace(spec, brokers=brokers, brokers_per_task=brokers, generation=generation)

    async def run(self, driver: ClusterDriver, course: Phase, *, generation: int = 1, brokers: int = 2) -> str:
        """Start a generation, give it the directive ``course``, and return its end."""
        registration, spec = driver.registration, self.spec(driver, generation=generation, brokers=brokers)
        await asyncio.to_thread(registration.direct, Directive(registration.epoch, generation, Phase.RUN))
        task = asyncio.create_task(supervise(spec, task=0, gather=alone))
        await eventually(lambda: task.done() or registration.report(generation) is not None, timeout_s=PATIENCE_S)
        await asyncio.to_thread(registration.direct, Directive(registration.epoch, generation, course))
        return await asyncio.wait_for(task, PATIENCE_S)

    @property
    def running(self) -> list[str]:
        slots = sorted(self.options.data_dir.glob("slot-*"))
        return [slot.name for slot in slots if noted_process(slot) is not None]

    def close(self) -> None:
        for driver in self._made:
            driver.leave()
        for slot in self.options.data_dir.glob("slot-*"):
            kill_noted(slot)
        note = embedded_zookeeper._read_note(self.options.data_dir / "zookeeper")
        if note is not None and note.process is not None:
            EmbeddedZookeeper.start(self.options.data_dir / "zookeeper").stop()


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drivers]:
    monkeypatch.setattr(directory_locks, "LOCK_TIMEOUT_S", 0.2)
    drivers = Drivers(tmp_path)
    try:
        yield drivers
    finally:
        drivers.close()


def held(driver: ClusterDriver, slot: str) -> Claim:
    """Hold the claim of a supervisor that should have ended long ago and hangs."""
    claim = claim_directory([driver.data_dir / slot], cluster_id=driver.registration.cluster_id)
    assert claim is not None
    return claim


def zookeeper_of(driver: ClusterDriver) -> EmbeddedZookeeper:
    assert driver._embedded is not None
    return driver._embedded.server


def test_a_stop_refused_a_directory_keeps_zookeeper_until_the_next(
    drivers: Drivers,
) -> None:
    first = drivers.take()
    asyncio.run(drivers.run(first, Phase.REGROUP))
    assert drivers.running == ["slot-0", "slot-1"]
    server, claim = zookeeper_of(first), held(first, "slot-1")
    assert first.stop().startswith("brokers that the driver could not stop keep running: 1: ")
    assert drivers.running == ["slot-1"]
    assert server.is_alive
    claim.release()
    second = drivers.take()
    assert second.stop() == ""
    assert drivers.running == []
    assert not server.is_alive


@pytest.mark.extended
def test_a_generation_refused_a_directory_has_not_stopped_its_broker(drivers: Drivers) -> None:
    driver = drivers.take()
    asyncio.run(drivers.run(driver, Phase.REGROUP))
    claim = held(driver, "slot-1")
    assert asyncio.run(drivers.run(driver, Phase.STOP, generation=2)) == STOPPED_IN_PART
    claim.release()
    assert asyncio.run(drivers.run(driver, Phase.STOP, generation=3)) == "stop"
    assert drivers.running == []


@pytest.mark.extended
def test_a_smaller_cluster_stops_brokers_an_earlier_one_left(drivers: Drivers) -> None:
    driver = drivers.take()
    asyncio.run(drivers.run(driver, Phase.REGROUP))
    assert asyncio.run(drivers.run(driver, Phase.STOP, generation=2, brokers=1)) == STOPPED_IN_PART
    assert drivers.running == ["slot-1"]
    assert driver._generations is not None
    driver._generations.generation = 2
    driver._generations._spec = drivers.spec(driver, brokers=0)
    assert driver.stop() == "", "even if the new cluster is smaller"
    assert drivers.running == []


@pytest.mark.parametrize(
    "where",
    marked_after(
        1, ["elsewhere", "here", "in another container", "in an earlier release's container"], pytest.mark.extended
    ),
)
def test_brokers_of_other_hosts_cannot_be_stopped_from_here(drivers: Drivers, where: str) -> None:
    """A dead broker of this host that is only still registered does not count. A broker of another container cannot
    be examined here."""
    driver = drivers.take()
    dead = subprocess.Popen(["true"])
    dead.wait()

    async def story() -> str:
        async with opened(driver.zookeeper, keys=driver_keys(driver.data_dir)) as store:
            registry = BrokerRegistry(store.session, broker(7))
            own = registry._registration.pid_namespace
            boot, namespace = {
                "elsewhere": ("boot-of-another", own),
                "in another container": (boot_id(), own + 1),
                "in an earlier release's container": (boot_id(), 0),
                "here": (boot_id(), own),
            }[where]
            registry._registration = msgspec.structs.replace(
                registry._registration, boot_id=boot, pid=dead.pid, pid_namespace=namespace
            )
            await registry.start()
            return await asyncio.to_thread(driver.stop)

    left = asyncio.run(story())
    if where == "here":
        assert left == ""
    else:
        assert left.startswith("brokers that the driver could not stop keep running: 7: ")


@pytest.mark.extended
def test_a_remotely_killed_broker_is_awaited_until_its_session_ends(
    drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, looked = drivers.take(), threading.Event()
    registration, read = driver.registration, driver.registration.live_brokers

    def live_brokers() -> tuple[BrokerRegistration, ...]:
        found = read()
        looked.set()
        return found

    monkeypatch.setattr(registration, "live_brokers", live_brokers)

    async def story() -> str:
        async with opened(driver.zookeeper, keys=driver_keys(driver.data_dir)) as store:
            await BrokerRegistry(store.session, broker(7)).start()
            stopping = asyncio.create_task(asyncio.to_thread(driver.stop))
            await asyncio.to_thread(looked.wait, PATIENCE_S)
        return await stopping

    assert asyncio.run(story()) == ""


@pytest.mark.extended
def test_a_stop_without_zookeeper_cannot_confirm_the_end(drivers: Drivers) -> None:
    driver = drivers.take()
    assert driver._generations is not None and driver._embedded is not None
    driver._generations._stopped_in_order = True
    driver._embedded.stop()
    assert driver.stop().startswith("brokers may still run on hosts where Spark placed no task: ")


@pytest.mark.extended
def test_a_driver_stops_brokers_even_inside_a_running_loop(drivers: Drivers) -> None:
    """A notebook has a running event loop."""
    driver = drivers.take()

    async def cell() -> str:
        return driver.stop()

    assert asyncio.run(cell()) == ""


@pytest.mark.extended
def test_an_incomplete_stop_is_reported_until_its_brokers_are_unknown(
    drivers: Drivers,
) -> None:
    server = EmbeddedZookeeper.start(drivers.options.data_dir / "zookeeper")
    drivers.options = msgspec.structs.replace(drivers.options, zookeeper=server.connect)
    driver = drivers.take()

    async def story() -> None:
        async with opened(server.connect) as store:
            await BrokerRegistry(store.session, broker(7)).start()
            left = await asyncio.to_thread(driver.stop)
            assert left.startswith("brokers that the driver could not stop keep running: 7: ")
            assert await asyncio.to_thread(driver.stop) == left
            assert driver.stop() == left, "the loop must still run"
        assert await asyncio.to_thread(driver.stop) == ""

    asyncio.run(story())
    server.stop()
    assert driver.stop() == "", "no broker is left to ask"


@pytest.mark.parametrize("is_failing", marked_after(1, [False, True], pytest.mark.extended))
def test_a_local_cluster_that_cannot_stop_keeps_its_directory(
    drivers: Drivers, is_failing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the block raises another error, which this one would hide."""
    cluster = LocalCluster(cast(Any, None), brokers=2)
    drivers.options = cluster._driver._options = msgspec.structs.replace(
        cluster._driver._options, port=FirstPort.INCOMPLETE_STOPS
    )
    drivers.attach(cluster._driver)
    asyncio.run(drivers.run(cluster._driver, Phase.REGROUP))
    claim = held(cluster._driver, "slot-1")
    if is_failing:
        cluster.__exit__(KeyError, KeyError("the user's"), None)
        assert f"the cluster in {cluster.data_dir}: brokers " in caplog.text
    else:
        with pytest.raises(ClusterError, match=f"the cluster in {cluster.data_dir}: brokers "):
            cluster.__exit__(None, None, None)
    assert drivers.running == ["slot-1"]
    with pytest.raises(ClusterError, match=f"the cluster in {cluster.data_dir}: brokers "):
        cluster.stop()
    claim.release()
    second = drivers.take()
    assert second.stop() == ""
    cluster.stop()
    assert cluster.data_dir.is_dir(), "the broker was started again there"
    shutil.rmtree(cluster.data_dir)
