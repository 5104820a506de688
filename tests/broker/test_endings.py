"""A test of the end of a broker process with several orders to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from sparklog.broker.lifecycle.ending import StopMode
from sparklog.broker.lifecycle.process import BrokerProcess
from sparklog.broker.lifecycle.process_config import ProcessConfig
from sparklog.broker.lifecycle.supervisor_lease import LeaseName

RESTART, FINISH = BrokerProcess._restart, BrokerProcess.finish


def signal(process: BrokerProcess) -> None:
    process._ending.on_signal()


@pytest.mark.parametrize(
    ("told", "ending", "again"),
    [
        ((signal,), StopMode.CONTROLLED, False),
        ((signal, signal), StopMode.AT_ONCE, False),
        ((RESTART,), StopMode.CONTROLLED, True),
        ((RESTART, RESTART), StopMode.CONTROLLED, True),
        ((RESTART, signal), StopMode.CONTROLLED, False),
        ((RESTART, signal, signal), StopMode.AT_ONCE, False),
        ((RESTART, FINISH), StopMode.FINISH, False),
    ],
)
def test_one_of_several_orders_decides_the_end(
    tmp_path: Path, told: tuple[Callable[[BrokerProcess], None], ...], ending: StopMode, again: bool
) -> None:
    async def run() -> None:
        process = BrokerProcess(
            ProcessConfig(cluster_id="c", broker_id=1, log_dir=str(tmp_path), host="h", port=0, zookeeper="")
        )
        process._lease.admit(LeaseName(1, 1))  # a supervisor that would restart it
        for order in told:
            order(process)
        assert (process._ending.mode, process._ending.restarts) == (ending, again)

    asyncio.run(run())
