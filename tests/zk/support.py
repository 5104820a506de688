"""Functions for the ZooKeeper tests: sessions that close, waits with a deadline, reliable expiry of a session."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from sparklog.errors import ClusterError
from sparklog.model import BrokerRegistration, LeaderAndIsr, TopicPartition, TopicRecord, TopicSchema
from sparklog.protocol.proof import KeyRing
from sparklog.zk import codecs, paths
from sparklog.zk.broker_registry import BrokerRegistry
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkError
from sparklog.zk.session import ZkSession
from sparklog.zk.state_store import WriteOutcome

TP = TopicPartition("orders", 0)
TOPIC = TopicRecord(
    "orders", "id-1", ((1, 2, 3), (2, 3, 1)), (TopicSchema(0, b"schema"),), config={"segment.bytes": "4096"}
)
STATE = LeaderAndIsr(1, 0, (1, 2, 3), 1)


@asynccontextmanager
async def opened(
    connect: str, *, session_timeout_ms: int = 2000, keys: KeyRing | None = None
) -> AsyncIterator[ClusterStore]:
    session = await ZkSession.open(connect, session_timeout_ms=session_timeout_ms, keys=keys)
    try:
        store = ClusterStore(session)
        await store.prepare()
        yield store
    finally:
        await session.close()


async def until(condition: Callable[[], bool], what: str, *, timeout_s: float = 60.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)


async def pause(pid: int) -> None:
    """Pause a process. The system stops its threads after ``kill`` returns; a running thread may still reply."""
    os.kill(pid, signal.SIGSTOP)

    def stopped() -> bool:
        threads = Path(f"/proc/{pid}/task").glob("*/stat")
        return {path.read_text().rpartition(")")[2].split()[0] for path in threads} == {"T"}

    await until(stopped, f"process {pid} to stop")


async def expire(session: ZkSession) -> None:
    """Expire the session at the server: another connection takes it over and closes it."""
    generation, client_id = session.generation, session.client_id
    end = asyncio.get_running_loop().time() + 60
    while session.generation == generation:
        assert asyncio.get_running_loop().time() < end, "the session did not expire"
        # The two connections take the session from each other until the thief's request to close it arrives while the
        # thief has it.
        with suppress(ClusterError):
            thief = await ZkSession.open(
                session.connect_string,
                session_timeout_ms=session.session_timeout_ms,
                connect_timeout_ms=3000,
                client_id=client_id,
            )
            await thief.close()
        # The response shows which session answered: the same one, or a new one.
        with suppress(ZkError):
            await session.patiently(lambda: session.exists("/"))


def broker(broker_id: int, *, port: int = 9092, host: str = "h1", trusted: bool = True) -> BrokerRegistration:
    return BrokerRegistration(broker_id, host, port, boot_id=f"boot-{host}", cluster_id="c1", trusted=trusted)


async def retire(store: ClusterStore, registry: BrokerRegistry, *, pid: int | None = None) -> bool:
    """Report the end of a broker's process. Its session may continue, but nothing is registered in it. With ``pid``,
    report another process, and keep the broker."""
    if pid is None:
        await registry.close()
    found = registry.registration
    return await store.retire_broker(found.broker_id, pid=pid or found.pid, boot_id=found.boot_id)


async def write_isr(
    store: ClusterStore,
    tp: TopicPartition,
    state: LeaderAndIsr,
    *,
    expected_version: int,
    added: Sequence[tuple[int, int]] = (),
    **more: Any,
) -> WriteOutcome:
    """Call ``send_isr`` and return its outcome."""
    sent = store.states.send_isr(tp, state, expected_version=expected_version, added=added, **more)
    return await store.states.isr_outcome(sent, tp, expected_version=expected_version, added=added)


async def put_state(store: ClusterStore, state: LeaderAndIsr = STATE, tp: TopicPartition = TP) -> None:
    """Create a partition as the controller would."""
    for path in (paths.topic(tp.topic), paths.partitions(tp.topic), paths.partition(tp)):
        await store.session.ensure(path)
    await store.session.create(paths.state(tp), codecs.encode_state(state, 1))
