"""Tests that other users cannot read or change the files of a cluster, even if the umask refuses them nothing."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.cluster import runtime_directory
from sparklog.cluster.broker_process import LastWords, reap, spawn_broker
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.generation import GenerationSpec
from sparklog.cluster.options import create_data_dir
from sparklog.cluster.slots import Slot
from sparklog.cluster.spark_environment import spark_home


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def open_to_others(directory: Path) -> list[str]:
    """Return the directory and the files below on which other users have rights."""
    return [f"{mode(path):o} {path}" for path in (directory, *directory.rglob("*")) if mode(path) & 0o077]


def test_no_other_user_may_change_a_new_data_directory(tmp_path: Path) -> None:
    create_data_dir(tmp_path / "new" / "data")
    assert [mode(path) for path in (tmp_path / "new", tmp_path / "new" / "data")] == [0o755, 0o755]
    create_data_dir(tmp_path / "new" / "data")


def test_no_other_user_may_read_the_logs_of_executors(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    home = spark_home(tmp_path / "data" / "spark", str(tmp_path / "pyspark"))
    assert home.is_dir() and mode(home.parent) == 0o700
    assert mode(tmp_path / "data") == 0o755


@pytest.mark.integration
def test_no_other_user_may_read_the_files_of_the_embedded_zookeeper(tmp_path: Path) -> None:
    directory = tmp_path / "zookeeper"
    server = EmbeddedZookeeper.start(directory)
    try:
        assert list(directory.rglob("snapshot.*"))
        assert open_to_others(directory) == []
    finally:
        server.stop()


def test_no_other_user_may_read_the_configuration_of_a_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "runtime"
    base.mkdir(0o700)
    monkeypatch.setattr(runtime_directory, "_BASE", base)
    slot = Slot(tmp_path / "slot-0", 0, 1)
    slot.path.mkdir()
    spec = GenerationSpec(
        cluster_id="c",
        zookeeper="localhost:1",
        driver_epoch=1,
        generation=1,
        brokers=1,
        brokers_per_task=1,
        log_dirs=(),
        data_dir=str(tmp_path),
        port=1,
        advertised_host="localhost",
        bind_host="localhost",
        settings={},
        session_timeout_ms=1000,
    )
    program = (sys.executable, "-c", "import time; time.sleep(60)")
    started = spawn_broker(slot, spec, host="localhost", words=LastWords(slot.path), program=program)
    os.kill(started.pid, signal.SIGKILL)
    reap(started.pid)
    assert runtime_directory.process_config(slot.path).exists()
    assert open_to_others(runtime_directory.runtime_directory()) == []
