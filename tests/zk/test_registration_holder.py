"""Tests of the process that holds a broker's id on this host: an earlier process of the broker, or another live one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from sparklog.model import BrokerRegistration
from sparklog.zk import codecs, paths
from sparklog.zk.broker_registry import BrokerRegistry
from sparklog.zk.errors import BrokerIdTaken
from sparklog.zk.registration_holder import is_over, pid_namespace, start_time

from .support import broker, opened


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of this host that lives until its input ends."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    yield process
    process.kill()
    process.communicate()


def of(pid: int, **more: int) -> BrokerRegistration:
    known = {"pid": pid, "pid_namespace": pid_namespace(), "start_time": start_time(pid), **more}
    return msgspec.structs.replace(broker(1), **known)


def test_a_registration_is_over_when_its_process_has_ended(other: subprocess.Popen[bytes]) -> None:
    mine, theirs = of(os.getpid()), of(other.pid)
    assert is_over(mine, mine)
    assert is_over(of(os.getpid(), start_time=1), mine), "an earlier process with this pid"
    assert not is_over(theirs, mine)
    assert not is_over(of(other.pid, start_time=0), mine), "registered by a release that notes no start time"
    assert is_over(of(other.pid, start_time=1), mine), "another process has the pid by now"
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert is_over(theirs, mine), "not yet reaped"
    other.communicate()
    assert is_over(theirs, mine)


def test_a_process_that_cannot_be_examined_keeps_its_registration(other: subprocess.Popen[bytes]) -> None:
    mine = of(os.getpid())
    assert not is_over(of(other.pid, pid_namespace=pid_namespace() + 1), mine), "a process of another container"
    assert not is_over(msgspec.structs.replace(mine, host="h2"), mine)
    assert not is_over(msgspec.structs.replace(mine, boot_id="another"), mine)
    assert is_over(of(other.pid, pid_namespace=0), mine), "a release that does not store the container"


@pytest.mark.integration
def test_a_living_process_of_this_host_keeps_its_registration(connect: str, other: subprocess.Popen[bytes]) -> None:
    async def scenario() -> None:
        path = paths.broker(1)
        async with opened(connect, session_timeout_ms=40_000) as theirs, opened(connect) as store:
            await theirs.session.create(path, codecs.encode_broker(of(other.pid)), ephemeral=True)
            registry = BrokerRegistry(store.session, broker(1))
            with pytest.raises(BrokerIdTaken, match=rf"pid {other.pid}\), another process of this host, .* is a copy"):
                await registry.start(timeout_ms=5000)
            assert (await store.session.get(path)).ephemeral_owner == theirs.session.session_id
            waiting = asyncio.create_task(registry.start(timeout_ms=30_000))
            other.kill()
            assert await waiting == 1, "well before its session ends"
            await registry.close()

    asyncio.run(scenario())


@pytest.mark.integration
def test_an_unreadable_registration_is_replaced_if_its_session_is_over(connect: str) -> None:
    async def scenario() -> None:
        path = paths.broker(1)
        async with opened(connect) as store:
            await store.session.create(path, b"rubbish")
            registry = BrokerRegistry(store.session, broker(1))
            assert await registry.start(timeout_ms=30_000) == 1
            await store.session.set(path, b"rubbish")
            again = BrokerRegistry(store.session, broker(1))
            assert await again.start(timeout_ms=30_000) == 2
            await registry.close()
            await again.close()

    asyncio.run(scenario())


def test_only_a_running_process_has_a_start_time() -> None:
    assert start_time(os.getpid()) > 0
    assert start_time(2**22 + 1) == 0
