"""Real brokers under real supervisors, without Spark: a thread of the test runs what a barrier task runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

from sparklog.broker.lifecycle.secret_file import new_secret, write_secret_file
from sparklog.client.admin.admin import Admin
from sparklog.cluster.barrier_task import retire_through
from sparklog.cluster.cluster_secret import driver_secret_file
from sparklog.cluster.controller_loop import ControllerLoop
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.slots import Slot
from sparklog.cluster.supervisor import BrokerSupervisor
from sparklog.protocol.proof import KeyRing
from sparklog.testing.reserved_ports import ReservedPorts
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.protection import protect
from sparklog.zk.session import ZkSession
from tests.cluster.support import eventually, kill_noted, spec

_PORTS = ReservedPorts()

START_TIMEOUT_S = 60.0


class SupervisedCluster:
    """A cluster for a ``with`` block. Owner: one test thread; the supervisors run on a loop in a separate thread."""

    def __init__(self, base_dir: Path, *, brokers: int = 3, settings: Mapping[str, str] | None = None) -> None:
        self._settings = dict(settings or {})
        self._slots = [
            Slot(base_dir / f"slot-{number}", number, port) for number, port in enumerate(free_ports(brokers))
        ]
        self._base_dir = base_dir
        self._keys = KeyRing([new_secret()])
        self._ready = threading.Event()
        self._end: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.supervisors: list[BrokerSupervisor] = []
        self.zookeeper = ""
        self._embedded: EmbeddedZookeeper | None = None
        self._controller: ControllerLoop | None = None

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{slot.port}" for slot in self._slots)

    def __enter__(self) -> SupervisedCluster:
        try:
            self._embedded = EmbeddedZookeeper.start(self._base_dir / "zookeeper")
            write_secret_file(driver_secret_file(self._base_dir), self._keys)
            self.zookeeper = self._embedded.connect
            asyncio.run(self._protect())
            self._controller = ControllerLoop(self.zookeeper, settings=self._settings, keys=self._keys)
            self._controller.start()
            self._controller.wait_ready(START_TIMEOUT_S)
            self._thread.start()
            assert self._ready.wait(START_TIMEOUT_S), "the supervisors did not start in time"
            with Admin(self.bootstrap) as admin:
                admin.wait_until_in_sync(timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(START_TIMEOUT_S)
        for slot in self._slots:
            kill_noted(slot.path)
        if self._controller is not None:
            self._controller.stop()
        if self._embedded is not None:
            self._embedded.stop()

    async def _protect(self) -> None:
        """Protect the ZooKeeper nodes, as a driver does with its embedded ZooKeeper."""
        session = await ZkSession.open(self.zookeeper, keys=self._keys)
        await protect(session, self._keys)
        await session.close()

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        session = await ZkSession.open(self.zookeeper, keys=self._keys)
        try:
            store = ClusterStore(session)
            generation = spec(
                self._base_dir,
                cluster_id=await store.cluster_id(create=False),
                zookeeper=self.zookeeper,
                settings=self._settings,
                session_timeout_ms=6000,
                secrets=self._keys.secrets,
            )
            for slot in self._slots:
                slot.path.mkdir()
                supervisor = BrokerSupervisor(slot, generation, host="127.0.0.1", retire=retire_through(store))
                self.supervisors.append(supervisor)
            runs = [asyncio.create_task(supervisor.run()) for supervisor in self.supervisors]
            await eventually(
                lambda: all(one.serving is not None for one in self.supervisors), timeout_s=START_TIMEOUT_S
            )
            self._ready.set()
            await self._end.wait()
            await asyncio.gather(*(one.quiesce() for one in self.supervisors))
            await asyncio.gather(*(one.finish(timeout_s=10) for one in self.supervisors))
            await asyncio.gather(*runs, return_exceptions=True)
        finally:
            await session.close()


def free_ports(count: int) -> list[int]:
    """Return ports that no process takes while their brokers restart. This process keeps them reserved."""
    return [_PORTS.reserve() for _ in range(count)]
