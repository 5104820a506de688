"""Tests of the cluster job's start: if one half fails, nothing of the other remains; and its log has a bound."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark import SparkContext

from sparklog.broker.lifecycle import logging_setup
from sparklog.cluster import embedded_zookeeper, start
from sparklog.cluster.barrier import Generations
from sparklog.cluster.cluster_driver import ClusterDriver
from sparklog.cluster.driver_registration import DriverRegistration
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.options import ClusterOptions, Sizing
from sparklog.cluster.process import send_signal
from sparklog.errors import ClusterError
from sparklog.zk.broker_registry import BrokerRegistry
from tests.tiers import marked_after
from tests.waiting import wait_until
from tests.zk.support import broker, opened

pytestmark = pytest.mark.integration


class NoSignals:
    """A stand-in for signal handlers that receive no signal."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def install(self) -> None: ...


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("PYSPARK_SUBMIT_ARGS", "SPARK_HOME"):  # a start sets them permanently
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield tmp_path
    EmbeddedZookeeper.start(tmp_path / "zookeeper").stop()


def test_a_spark_that_does_not_start_leaves_no_zookeeper(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark fails so soon that ZooKeeper has only begun to start."""

    def fail() -> SparkContext:
        raise ClusterError("Spark did not start")

    monkeypatch.setattr(start, "_start_spark", fail)
    monkeypatch.setattr(start, "_REFUSAL_S", 0.0)
    with pytest.raises(ClusterError, match="Spark did not start"):
        start._run(ClusterOptions(data_dir=data_dir), NoSignals(), lambda _: None)  # type: ignore[arg-type]
    seating = [thread for thread in threading.enumerate() if thread.name == "sparklog-seating"]
    for thread in seating:
        thread.join()
    note = embedded_zookeeper._read_note(data_dir / "zookeeper")
    assert note is not None and note.process is None
    assert not seating


@pytest.fixture
def found_running(data_dir: Path) -> EmbeddedZookeeper:
    """Start a ZooKeeper as a killed driver leaves it, for brokers that need it."""
    server = EmbeddedZookeeper.start(data_dir / "zookeeper")
    server.leave()
    return server


def test_a_failed_spark_start_keeps_a_running_clusters_zookeeper(
    data_dir: Path, found_running: EmbeddedZookeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> SparkContext:
        raise ClusterError("Spark did not start")

    monkeypatch.setattr(start, "_start_spark", fail)
    told: list[str] = []
    with pytest.raises(ClusterError, match="Spark did not start"):
        start._run(ClusterOptions(data_dir=data_dir), NoSignals(), told.append)  # type: ignore[arg-type]
    assert found_running.is_alive
    assert ["were left unchanged" in line for line in told] == [True]


def test_an_early_stop_leaves_running_brokers_and_reports_it(data_dir: Path, found_running: EmbeddedZookeeper) -> None:
    signals = NoSignals()
    signals.asked.set()
    told: list[str] = []
    with pytest.raises(ClusterError, match="were left unchanged"):
        start._run(ClusterOptions(data_dir=data_dir), signals, told.append)  # type: ignore[arg-type]
    assert found_running.is_alive
    assert told == [], "the driver must not report a stop"


@pytest.mark.parametrize("is_paused", marked_after(1, [True, False], pytest.mark.extended))
def test_a_stop_that_cannot_reach_the_brokers_reports_it(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, is_paused: bool
) -> None:
    """ZooKeeper stops or does not respond when the driver is asked to stop, so the driver can reach no broker."""
    signals, told, servers = NoSignals(), list[str](), list[EmbeddedZookeeper]()

    def start_brokers(self: ClusterDriver, _context: object, **_: object) -> None:
        spec = self._spec("local[1]")
        sizing = Sizing(tasks=1, spare=0)
        self._generations = Generations(None, self.registration, spec, sizing=sizing)  # type: ignore[arg-type]
        assert self._embedded is not None
        servers.append(self._embedded.server)
        if is_paused:
            send_signal(self._embedded.server.process, signal.SIGSTOP)
            # The signal takes effect after the call has returned. A server that still runs would accept the stop.
            wait_until(lambda: _states_of(servers[0].pid) == {"T"}, "ZooKeeper to be paused")
        else:
            self._embedded.stop()
        signals.asked.set()

    monkeypatch.setattr(start, "_start_spark", lambda: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(ClusterDriver, "start_brokers", start_brokers)
    try:
        with pytest.raises(ClusterError, match="could not be stopped because ZooKeeper"):
            start._run(ClusterOptions(data_dir=data_dir), signals, told.append)  # type: ignore[arg-type]
        assert told == [], "the driver must not report a stop"
        assert servers[0].is_alive == is_paused, "a paused server must stay, because brokers need it"
    finally:
        if is_paused and servers:
            send_signal(servers[0].process, signal.SIGCONT)


def _states_of(pid: int) -> set[str]:
    """Return the states of a process's threads: the third field of /proc/PID/task/TID/stat."""
    return {path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")}


def test_a_failed_start_keeps_zookeeper_for_running_brokers(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = EmbeddedZookeeper.start(data_dir / "zookeeper")

    async def register() -> None:
        async with opened(begun.connect, session_timeout_ms=120_000) as store:
            await BrokerRegistry(store.session, broker(1)).start()
            begun.stop()  # the session outlives the server

    asyncio.run(register())

    def fail() -> SparkContext:
        raise ClusterError("Spark did not start")

    monkeypatch.setattr(start, "_start_spark", fail)
    told: list[str] = []
    with pytest.raises(ClusterError, match="Spark did not start"):
        start._run(ClusterOptions(data_dir=data_dir), NoSignals(), told.append)  # type: ignore[arg-type]
    assert ["were left unchanged" in line for line in told] == [True]


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield root
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


@pytest.fixture
def signals() -> Iterator[None]:
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in found.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("is_refused", marked_after(1, [True, False], pytest.mark.extended))
@pytest.mark.usefixtures("root_logger", "signals")
def test_a_refused_driver_does_not_write_to_the_running_ones_log(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """A driver that registers writes its earlier log lines too."""
    server = EmbeddedZookeeper.start(data_dir / "zookeeper") if is_refused else None
    first = DriverRegistration.take(server.connect) if server is not None else None
    monkeypatch.setattr(start, "_REFUSAL_S", 30.0)

    def fail() -> SparkContext:
        raise ClusterError("Spark did not start")

    monkeypatch.setattr(start, "_start_spark", fail)
    told: list[str] = []
    assert start.run_cluster(ClusterOptions(data_dir=data_dir), tell=told.append) == 1
    if first is not None and server is not None:
        first.close()
        server.stop()
    assert ["another driver runs this cluster" in line for line in told if "error" in line] == [is_refused]
    written = data_dir / "driver.log"
    assert written.exists() != is_refused
    if not is_refused:
        assert "driver epoch 1 of cluster" in written.read_text()


def test_the_drivers_log_does_not_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root_logger: logging.Logger
) -> None:
    monkeypatch.setattr(logging_setup, "_FILE_BYTES", 4096)
    start._log_to(ClusterOptions(data_dir=tmp_path)).open()
    for number in range(1000):
        root_logger.info("generation %d", number)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 1 + 4, "only the last few files may remain"
    assert all(file.stat().st_size <= 4096 for file in files)
    assert "generation 999\n" in (tmp_path / "driver.log").read_text()
