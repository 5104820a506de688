"""Tests of the cluster's secret: created once, readable by one user, given to brokers privately, and learned by
running ones."""

from __future__ import annotations

import asyncio
import pickle
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from sparklog.broker.lifecycle.secret_file import new_secret, read_secret_file
from sparklog.client.admin.admin import Admin
from sparklog.cluster import runtime_directory
from sparklog.cluster.barrier_task import retire_through
from sparklog.cluster.cluster_secret import driver_keys, driver_secret_file, forget_on_host, found_on_host, keep_on_host
from sparklog.cluster.controller_loop import ControllerLoop
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.generation import GenerationSpec
from sparklog.cluster.slots import Slot
from sparklog.cluster.supervisor import BrokerSupervisor
from sparklog.errors import ConfigError
from sparklog.protocol.proof import KeyRing, Secret
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.session import ZkSession
from tests.cluster.supervised_cluster import free_ports
from tests.cluster.support import eventually, kill_noted, spec
from tests.waiting import wait_until

PATIENCE_S = 60.0


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_driver_creates_the_secret_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = {keys.secrets for keys in threads.map(lambda _: driver_keys(tmp_path), range(40))}
    assert len(made) == 1
    assert mode(driver_secret_file(tmp_path)) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.secret"]


def test_a_driver_refuses_a_secret_that_others_can_read(tmp_path: Path) -> None:
    driver_keys(tmp_path)
    driver_secret_file(tmp_path).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        driver_keys(tmp_path)


def test_a_host_keeps_the_secret_of_each_cluster(tmp_path: Path) -> None:
    one, other = f"one {tmp_path}", f"../../other {tmp_path}"
    keys = {one: KeyRing([new_secret()]), other: KeyRing([new_secret(), new_secret()])}
    try:
        assert not found_on_host(one)
        for cluster_id, known in keys.items():
            path = keep_on_host(cluster_id, known)
            assert path.parent == runtime_directory.runtime_directory() and mode(path) == 0o600
        assert {cluster_id: found_on_host(cluster_id).secrets for cluster_id in keys} == {
            cluster_id: known.secrets for cluster_id, known in keys.items()
        }
        for _ in range(2):
            forget_on_host(one)
            assert not found_on_host(one) and found_on_host(other)
    finally:
        for cluster_id in keys:
            runtime_directory.secret_file(cluster_id).unlink(missing_ok=True)


def test_a_specification_carries_the_secret_but_does_not_show_it(tmp_path: Path) -> None:
    secret = new_secret()
    made = spec(tmp_path, secrets=(secret,))
    assert secret.hex() not in repr(made)
    assert pickle.loads(pickle.dumps(made)).secrets == (secret,)


# --- real brokers ----------------------------------------------------------------------------------------------------


class Supervised:
    """Two brokers without Spark, under one generation after the other. Owner: a test's loop."""

    def __init__(self, base_dir: Path, zookeeper: str, store: ClusterStore, cluster_id: str) -> None:
        self._store = store
        self._spec = spec(base_dir, cluster_id=cluster_id, zookeeper=zookeeper, session_timeout_ms=6000)
        self.slots = [Slot(base_dir / f"slot-{number}", number, port) for number, port in enumerate(free_ports(2))]
        for slot in self.slots:
            slot.path.mkdir()
        self.supervisors: list[BrokerSupervisor] = []
        self._runs: list[asyncio.Task[None]] = []

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{slot.port}" for slot in self.slots)

    async def begin(self, generation: int, secret: Secret) -> None:
        named: GenerationSpec = msgspec.structs.replace(self._spec, generation=generation, secrets=(secret,))
        retire = retire_through(self._store)
        self.supervisors = [BrokerSupervisor(slot, named, host="127.0.0.1", retire=retire) for slot in self.slots]
        self._runs = [asyncio.create_task(supervisor.run()) for supervisor in self.supervisors]
        await eventually(lambda: all(one.serving is not None for one in self.supervisors), timeout_s=PATIENCE_S)

    async def leave(self) -> None:
        for supervisor, run in zip(self.supervisors, self._runs, strict=True):
            await supervisor.leave(run)


@pytest.fixture
def zookeeper(tmp_path: Path) -> Iterator[EmbeddedZookeeper]:
    server = EmbeddedZookeeper.start(tmp_path / "zookeeper")
    yield server
    server.stop()


def controlled(zookeeper: str, secret: Secret) -> ControllerLoop:
    controller = ControllerLoop(zookeeper, keys=KeyRing([secret]))
    controller.start()
    return controller


async def in_sync(bootstrap: str, topic: str) -> None:
    """Check that brokers accept the controller and the followers, with every peer authenticated."""

    def create() -> None:
        with Admin(bootstrap, timeout_s=PATIENCE_S) as admin:
            # A broker serves before the controller has told it of the other one.
            wait_until(lambda: len(admin.describe_cluster().brokers) == 2, "both brokers", timeout_s=PATIENCE_S)
            admin.create_topic(topic, partitions=4, replication_factor=2)
            admin.wait_until_in_sync(timeout_s=PATIENCE_S)

    await asyncio.to_thread(create)


def shown(log_dir: Path, pid: int) -> bytes:
    """Return what backups of the log directory and other users' tools see of a broker."""
    files = []
    for path in log_dir.rglob("*"):
        with suppress(FileNotFoundError):  # such as a checkpoint that replaces an older one at this moment
            files += [path.read_bytes()] if path.is_file() else []
    process = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    return b"\0".join([*files, *process])


def test_brokers_get_the_secret_privately_and_learn_a_new_one(tmp_path: Path, zookeeper: EmbeddedZookeeper) -> None:
    """The second driver has lost the first driver's file. One broker is restarted and knows only the new secret,
    beside a broker that knows both."""
    first, second = new_secret(), new_secret()

    async def play() -> None:
        controller = controlled(zookeeper.connect, first)
        session = await ZkSession.open(zookeeper.connect)
        store = ClusterStore(session)
        controller.wait_ready(PATIENCE_S)
        cluster_id = await store.cluster_id(create=False)
        cluster = Supervised(tmp_path, zookeeper.connect, store, cluster_id)
        try:
            await cluster.begin(1, first)
            assert all(broker.proves for broker in await store.live_brokers())
            await in_sync(cluster.bootstrap, "before")
            copy = runtime_directory.secret_file(cluster_id)
            assert mode(copy) == 0o600 and read_secret_file(copy).secrets == (first,)
            for one in cluster.supervisors:
                assert one.serving is not None
                seen = shown(one.slot.path, one.serving.pid)
                assert first.hex().encode() not in seen and bytes.fromhex(first.hex()) not in seen

            await cluster.leave()
            await asyncio.to_thread(controller.stop)
            controller = controlled(zookeeper.connect, second)
            await cluster.begin(2, second)
            assert all(one.serving is not None and one.serving.adopted for one in cluster.supervisors)
            await in_sync(cluster.bootstrap, "learned")

            before = cluster.supervisors[0].serving
            kill_noted(cluster.slots[0].path)
            await eventually(
                lambda: (now := cluster.supervisors[0].serving) is not None and now != before, timeout_s=PATIENCE_S
            )
            assert read_secret_file(copy).secrets == (second,)
            await in_sync(cluster.bootstrap, "started-again")
        finally:
            await cluster.leave()
            for slot in cluster.slots:
                kill_noted(slot.path)
            runtime_directory.secret_file(cluster_id).unlink(missing_ok=True)
            await asyncio.to_thread(controller.stop)
            await session.close()

    asyncio.run(play())
