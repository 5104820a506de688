"""Tests of the disk writes of a stopping broker while it hands over its leaderships."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.controlled_shutdown import ShutdownFlush
from sparklog.broker.replication.partitions import Partitions
from sparklog.errors import BrokerError
from sparklog.storage import clean_shutdown
from sparklog.storage.checkpoints import read_checkpoint
from sparklog.storage.log_directory import LogDirectory
from sparklog.testing.sim_disk import SimDisk
from tests.broker.support import broker_context
from tests.storage.batches import LOG_DIR, TP, create_log, fill, open_directory


class _SlowDisk(SimDisk):
    """A disk whose flush waits until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0
        self.go_on = threading.Event()

    def sync_file_system(self, handle: int) -> None:
        self.rounds += 1
        assert self.go_on.wait(60)
        super().sync_file_system(handle)


@pytest.fixture(autouse=True)
def one_log_is_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_shutdown, "_MANY_LOGS", 1)


def _ahead(directory: LogDirectory, led: int) -> tuple[ShutdownFlush, BrokerContext, SimpleNamespace]:
    context, partitions = broker_context(), SimpleNamespace(led=led, directory=directory)
    return ShutdownFlush(context, cast(Partitions, partitions)), context, partitions


async def _until(true: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the event did not happen within a minute")


def test_logs_are_flushed_at_once_and_after_the_leaderships_move() -> None:
    disk = SimDisk()
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 2)

    async def stop() -> None:
        ahead, context, partitions = _ahead(directory, led=2)
        await _until(lambda: log.durability.is_clean)
        fill(log, 1)
        partitions.led = 1
        context.roles_changed()
        await asyncio.sleep(0.01)
        assert not log.durability.is_clean, "one leadership is left"
        partitions.led = 0
        context.roles_changed()
        await _until(lambda: log.durability.is_clean)
        await ahead.end()

    asyncio.run(stop())
    assert log.recovery_point == log.log_end_offset == 9
    assert read_checkpoint(disk, LOG_DIR)[TP].recovery_point == 9
    disk.restart(page_cache_lost=True)
    directory = open_directory(disk=disk, boot_id="another")
    found = directory.get(TP)
    assert found is not None and found.log_end_offset == 9, "the logs must be durable without the stop's own round"
    assert not directory.trust.clean


def test_the_running_flush_round_is_awaited_and_is_the_last() -> None:
    """Errors of that round are not reported to the stop's own."""
    disk = _SlowDisk()
    directory = open_directory(disk=disk)
    fill(create_log(directory), 2)

    async def stop() -> None:
        ahead, *_ = _ahead(directory, led=0)
        await _until(lambda: disk.rounds == 1)
        ended = asyncio.ensure_future(ahead.end())
        await asyncio.sleep(0.01)
        assert not ended.done()
        disk.go_on.set()
        await asyncio.wait_for(ended, 60)

    asyncio.run(stop())
    assert disk.rounds == 1


@pytest.mark.parametrize("led", [1, 0])
def test_a_disk_that_lost_data_prevents_a_clean_stop_without_delay(led: int) -> None:
    """The disk reports its error once: without leaderships to wait for, a second round would succeed."""
    disk = SimDisk()
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 2)
    disk.fail_next("sync_file_system", errno.EIO)

    async def stop() -> None:
        ahead, *_ = _ahead(directory, led=led)
        await _until(lambda: directory.offline is not None)
        await asyncio.sleep(0.05)
        await ahead.end()

    asyncio.run(stop())
    assert not log.durability.is_clean and log.recovery_point == 0
    directory.checkpoint()  # as it is written every few seconds until the end
    assert read_checkpoint(disk, LOG_DIR)[TP].recovery_point == 0
    with pytest.raises(BrokerError, match="offline"):
        directory.write_clean_marker()


def test_a_checkpoint_without_space_is_left_to_the_stop() -> None:
    disk = SimDisk()
    directory = open_directory(disk=disk)
    log = create_log(directory)
    fill(log, 2)
    disk.capacity_bytes = disk.used_bytes

    async def stop() -> None:
        ahead, *_ = _ahead(directory, led=1)
        await _until(lambda: log.durability.is_clean)
        await ahead.end()

    asyncio.run(stop())
    assert directory.offline is None
    disk.capacity_bytes = None
    directory.write_clean_marker()
    disk.restart(page_cache_lost=True)
    assert open_directory(disk=disk, boot_id="another").trust.clean
