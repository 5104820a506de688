"""Tests of a driver's registration while another driver's node exists: when the new driver waits, and when it does
not."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.cluster.driver_registration import DriverRegistration
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.process import boot_id, identify
from sparklog.errors import ClusterError
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.session import ZkSession

pytestmark = pytest.mark.integration

SESSION_MS = 2000


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedZookeeper.start(tmp_path_factory.mktemp("zookeeper"))
    yield server.connect
    server.stop()


async def claimed(connect: str, *, start_time: int, boot: str, pid_namespace: int = 0) -> ZkSession:
    """Return the session of a driver that had this process's pid on a host of this name."""
    session = await ZkSession.open(connect, session_timeout_ms=SESSION_MS)
    store = ClusterStore(session)
    await store.prepare()
    await store.claim_driver(
        socket.gethostname(), os.getpid(), start_time=start_time, boot_id=boot, pid_namespace=pid_namespace
    )
    return session


def take(connect: str) -> DriverRegistration:
    return DriverRegistration.take(connect, session_timeout_ms=SESSION_MS)


def own_start() -> int:
    own = identify(os.getpid())
    assert own is not None
    return own.start_time


def test_a_killed_driver_with_a_reused_pid_is_replaced_at_once(connect: str) -> None:
    """In containers each driver has the same pid."""

    async def story() -> None:
        dead = await claimed(connect, start_time=own_start() - 1, boot=boot_id())
        try:
            registration = await asyncio.to_thread(take, connect)
            assert registration.epoch > 0
            assert dead.generation == 1 and not registration.lost.is_set(), (
                "the new driver must not wait for the old session's end"
            )
            await asyncio.to_thread(registration.close)
        finally:
            await dead.close()

    asyncio.run(story())


def own_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


@pytest.mark.parametrize("where", ["before the last boot", "in another container of this machine"])
def test_a_driver_whose_process_cannot_be_examined_delays_its_successor(connect: str, where: str) -> None:
    """The driver may also be on another host of that name: no process here can examine it, but its session ends with
    it."""

    async def story() -> None:
        if where == "before the last boot":
            other = await claimed(connect, start_time=own_start(), boot="an earlier one")
        else:
            other = await claimed(
                connect, start_time=own_start() - 1, boot=boot_id(), pid_namespace=own_namespace() + 1
            )
        taking = asyncio.create_task(asyncio.to_thread(take, connect))
        await asyncio.wait({taking}, timeout=SESSION_MS / 2000)
        assert not taking.done(), "while its session lives it stays registered"
        await other.close()
        registration = await taking
        await asyncio.to_thread(registration.close)

    asyncio.run(story())


def test_a_living_driver_is_named_at_once(connect: str) -> None:
    async def story() -> None:
        living = await claimed(connect, start_time=own_start(), boot=boot_id())
        try:
            with pytest.raises(ClusterError, match=f"another driver runs this cluster: .* pid {os.getpid()}"):
                await asyncio.wait_for(asyncio.to_thread(take, connect), 60)
        finally:
            await living.close()

    asyncio.run(story())


def test_a_drivers_node_names_its_process_after_a_retake(connect: str) -> None:
    registration = take(connect)

    async def node() -> codecs.DriverNode:
        return codecs.decode(paths.DRIVER, (await registration._zk.get(paths.DRIVER)).data, codecs.DriverNode)

    async def node_taken_again() -> codecs.DriverNode:
        await registration._zk.delete(paths.DRIVER)
        await registration._reclaim()
        return await node()

    try:
        found = registration._call(node())
        assert (found.pid, found.start_time, found.boot_id) == (os.getpid(), own_start(), boot_id())
        assert found.pid_namespace == own_namespace()
        assert registration._call(node_taken_again()) == found
    finally:
        registration.close()
