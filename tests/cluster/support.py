"""Functions for the cluster tests: generation specs and the supervisor of a fake broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from sparklog.cluster.generation import GenerationSpec
from sparklog.cluster.process import ProcessIdentity, identify
from sparklog.cluster.runtime_directory import noted_process
from sparklog.cluster.slots import Slot
from sparklog.cluster.supervisor import BrokerSupervisor

FAKE_BROKER = str(Path(__file__).with_name("fake_broker.py"))


def spec(data_dir: Path, *, generation: int = 1, **changes: object) -> GenerationSpec:
    fields: dict[str, object] = {
        "cluster_id": "test-cluster",
        "zookeeper": "127.0.0.1:1",
        "driver_epoch": 1,
        "generation": generation,
        "brokers": 3,
        "brokers_per_task": 1,
        "log_dirs": (),
        "data_dir": str(data_dir),
        "port": 19092,
        "advertised_host": "127.0.0.1",
        "bind_host": "127.0.0.1",
        "settings": {},
        "session_timeout_ms": 500,
    }
    return GenerationSpec(**{**fields, **changes})  # type: ignore[arg-type]


class Supervised:
    """A supervisor with its task, and the processes that it retired."""

    def __init__(
        self, data_dir: Path, *, behaviour: str = "serve", generation: int = 1, adopt_only: bool = False
    ) -> None:
        data_dir.mkdir(exist_ok=True)
        #: broker id, pid
        self.retired: list[tuple[int, int]] = []
        #: While it is not set, ZooKeeper is unreachable: the supervisor cannot report that a process ended.
        self.zookeeper = asyncio.Event()
        self.zookeeper.set()
        self.supervisor = BrokerSupervisor(
            Slot(data_dir, 4, 19092),
            spec(data_dir, generation=generation, adopt_only=adopt_only),
            host="127.0.0.1",
            retire=self._retire,
            program=(sys.executable, FAKE_BROKER, behaviour),
        )
        self.task = asyncio.create_task(self.supervisor.run())

    async def _retire(self, broker_id: int, process: ProcessIdentity) -> bool:
        await self.zookeeper.wait()
        self.retired.append((broker_id, process.pid))
        return True

    async def settled(self) -> BrokerSupervisor:
        await asyncio.wait_for(self.supervisor.settled.wait(), 20)
        return self.supervisor

    async def leave(self) -> None:
        await self.supervisor.leave(self.task)


@contextlib.asynccontextmanager
async def supervised(data_dir: Path, *, behaviour: str = "serve", generation: int = 1) -> AsyncIterator[Supervised]:
    """Run a supervisor. Its broker is killed at the end."""
    one = Supervised(data_dir, behaviour=behaviour, generation=generation)
    try:
        yield one
    finally:
        await one.leave()
        kill_noted(data_dir)


def kill_noted(log_dir: Path) -> None:
    process = noted_process(log_dir)
    if process is not None and identify(process.pid) == process:
        os.kill(process.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, 0)


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.02)
