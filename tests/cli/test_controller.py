"""Tests of ``sparklog controller`` as a process: it waits, takes over, and releases its lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.cli.main import run
from sparklog.client.admin.admin import Admin
from sparklog.cluster.controller_loop import ControllerLoop
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.testing.process_cluster import ProcessCluster

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedZookeeper.start(tmp_path_factory.mktemp("zookeeper"))
    try:
        yield f"{server.connect}/logs"
    finally:
        server.stop()


class Standby:
    """One running command, and the lines that it has printed."""

    def __init__(self, zookeeper: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sparklog.cli.main", "controller", "--standby", "-z", zookeeper, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.lines.extend(lines)  # the list grows while extend() reads its argument

    def says(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not any(words in line for line in self.lines):
            assert time.monotonic() < deadline, (words, self.lines, self.process.poll())
            time.sleep(0.02)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        return code


def test_a_standby_waits_takes_over_and_releases_its_lock(zookeeper: str, tmp_path: Path) -> None:
    first = ControllerLoop(zookeeper)
    first.start()
    assert first.wait_ready().state == "active"
    conf = tmp_path / "broker.conf"
    conf.write_text("min.insync.replicas = 2\n")
    standby = Standby(zookeeper, "--broker-conf", str(conf), "--set", "zookeeper.session.timeout.ms=2000")
    third = ControllerLoop(zookeeper)
    try:
        standby.says("standing by: another controller is active in cluster ")
        first.stop()
        standby.says(", epoch 2")
        third.start()
        assert third.wait_ready().state == "standby"
        assert standby.end() == 0
        standby.says("stopping")
        deadline = time.monotonic() + PATIENCE_S
        while third.status.state != "active":
            assert time.monotonic() < deadline, third.status
            time.sleep(0.02)
        assert third.status.controller_epoch == 3
    finally:
        standby.process.kill()
        first.stop()
        third.stop()


def test_a_startup_error_is_one_line(zookeeper: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at_work = ControllerLoop(zookeeper)
    at_work.start()
    at_work.wait_ready()
    host = zookeeper.partition("/")[0]
    short = "zookeeper.connection.timeout.ms=300"
    try:
        cases = [
            ((), 2, "no ZooKeeper given"),
            (("-z", zookeeper), 1, "another controller is active"),
            (("-z", f"{host}/elsewhere", "--standby"), 1, "no sparklog cluster"),
            (("-z", "127.0.0.1:1", "--standby", "--set", short), 1, "127.0.0.1:1"),
            (("-z", zookeeper, "--standby", "--set", "min.insync.replicas=0"), 2, "min.insync.replicas"),
            (("-z", zookeeper, "--standby", "--broker-conf", str(tmp_path / "no.conf")), 2, "No such file"),
        ]
        for arguments, code, words in cases:
            assert run(["controller", *arguments]) == code, arguments
            err = capsys.readouterr().err
            assert words in err
            assert err.count("\n") == 1
    finally:
        at_work.stop()


def test_a_standby_leads_a_cluster_with_its_copied_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ProcessCluster(1) as cluster:
        place = ("-z", cluster.zookeeper)
        assert run(["controller", "--standby", *place]) == 2
        assert "--secret-file" in capsys.readouterr().err
        copy = tmp_path / "copy"
        copy.write_bytes(cluster.secret_file.read_bytes())
        copy.chmod(0o644)
        assert run(["controller", "--standby", *place, "--secret-file", str(copy)]) == 2
        assert "chmod 600" in capsys.readouterr().err
        copy.chmod(0o600)
        standby = Standby(cluster.zookeeper, "--secret-file", str(copy))
        try:
            standby.says("standing by")
            cluster.stop_controller()
            standby.says(", epoch 2")
            with Admin(cluster.bootstrap) as admin:
                admin.create_topic("told-by-the-standby", partitions=1, replication_factor=1)
                admin.wait_until_in_sync(timeout_s=PATIENCE_S)
        finally:
            standby.end(signal.SIGKILL)
