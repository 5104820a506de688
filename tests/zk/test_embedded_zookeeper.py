"""Tests of the embedded server: adopted while it runs, restarted on its port with its data, never confused with
another one."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparklog.cluster import embedded_zookeeper
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper, answers, find_java
from sparklog.cluster.process import ProcessIdentity, is_alive
from sparklog.errors import ClusterError
from sparklog.storage.disk import RealDisk
from sparklog.testing.sim_disk import SimDisk

from .support import opened


def test_an_embedded_zookeeper_survives_a_kill_with_port_and_data(tmp_path: Path) -> None:
    first = EmbeddedZookeeper.start(tmp_path)
    adopted = EmbeddedZookeeper.start(tmp_path)
    try:
        assert not first.adopted
        assert adopted.adopted
        assert adopted.pid == first.pid
        assert os.getsid(first.pid) == first.pid, "its own process session: Ctrl-C at the driver does not reach it"

        async def cluster_id() -> str:
            async with opened(first.connect) as store:
                return await store.cluster_id()

        before = asyncio.run(cluster_id())
        os.kill(first.pid, signal.SIGKILL)
        first.stop()
        again = EmbeddedZookeeper.start(tmp_path)
        try:
            assert again.connect == first.connect
            assert asyncio.run(cluster_id()) == before
        finally:
            again.stop()
        assert not is_alive(again.process)
        assert not answers(*_address(again))
    finally:
        first.stop()


def test_a_stored_port_in_use_is_named_in_the_error(tmp_path: Path) -> None:
    first = EmbeddedZookeeper.start(tmp_path)
    first.stop()
    expected = f"port {_address(first)[1]} on 127.0.0.1"
    with socket.create_server(_address(first)), pytest.raises(ClusterError, match=expected):
        EmbeddedZookeeper.start(tmp_path)


def test_a_directory_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text('{"version": 2, "host": "127.0.0.1", "port": 1}')
    with pytest.raises(ClusterError, match="format version 2"):
        EmbeddedZookeeper.start(tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_a_power_failure_keeps_the_port_that_brokers_know(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk(seed=seed)
    disk.make_directory(Path("/zookeeper"))
    monkeypatch.setattr(embedded_zookeeper, "_DISK", disk)
    for process in (ProcessIdentity(1, 2, "boot"), None):
        embedded_zookeeper._write_note(Path("/zookeeper"), embedded_zookeeper._Note(1, "127.0.0.1", 2181, process))
    disk.restart(page_cache_lost=True)
    note = embedded_zookeeper._read_note(Path("/zookeeper"))
    assert note is not None and (note.port, note.process) == (2181, None)


class FullDisk(RealDisk):
    """A disk on which no file can be created."""

    def open(self, path: Path, *, create: bool = False) -> int:
        if create:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().open(path, create=create)


def test_no_other_user_can_enter_the_servers_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's lock file, which another user could lock, is in the directory, and so is the cluster's data in
    ZooKeeper."""

    def launch(*_: object, **__: object) -> None:
        raise ClusterError("not started")

    monkeypatch.setattr(EmbeddedZookeeper, "_launch", launch)
    tmp_path.chmod(0o755)  # as an earlier release created it
    for directory in (tmp_path, tmp_path / "new"):
        with pytest.raises(ClusterError, match="not started"):
            EmbeddedZookeeper.start(directory)
        assert directory.stat().st_mode & 0o077 == 0


def test_a_server_that_cannot_be_recorded_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would hold the port, and no process would know that it belongs to this directory."""
    children: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            children.append(self)

    EmbeddedZookeeper.start(tmp_path).stop()
    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(embedded_zookeeper, "_DISK", FullDisk())
    try:
        with pytest.raises(OSError, match="No space left"):
            EmbeddedZookeeper.start(tmp_path)
        [child] = children
        assert child.poll() is not None
        monkeypatch.setattr(embedded_zookeeper, "_DISK", RealDisk())
        EmbeddedZookeeper.start(tmp_path).stop()
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_missing_java_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match="install Java 17"):
        find_java()


def _address(server: EmbeddedZookeeper) -> tuple[str, int]:
    host, _, port = server.connect.rpartition(":")
    return host, int(port)
