"""Tests that an interrupted bench leaves no process, however often it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.waiting import wait_until

#: Four programs stand in for Kafka's: each accepts connections, and after SIGTERM waits for permission to exit.
_JAVA = """\
#!{python} -S
import os, pathlib, signal, socket, sys, time
if "kafka.Kafka" not in sys.argv:
    raise SystemExit(0)  # to format a directory
here, node = pathlib.Path(sys.argv[-1]).parent, pathlib.Path(sys.argv[-1]).stem
def end(*_):
    (here / (node + ".told")).touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    raise SystemExit(143)
signal.signal(signal.SIGTERM, end)
settings = dict(line.split("=", 1) for line in pathlib.Path(sys.argv[-1]).read_text().splitlines())
host, port = settings["listeners"].split("://")[1].split(":")
(here / (node + ".pid")).write_text(str(os.getpid()))
listening = socket.create_server((host, int(port)))
while True:
    listening.accept()[0].close()
"""
#: The command. Its first row finds such a cluster and then takes forever.
_COMMAND = """\
import pathlib, sys, time
from bench import kafka, run, sides
class Cluster(kafka.KafkaCluster):
    def __init__(self, directory):
        super().__init__(pathlib.Path("jars"), pathlib.Path(sys.argv[1]))
    def start(self):
        super().start()
        print("started", flush=True)
        time.sleep(600)
sides.Sparklog = Cluster
run.main(["--quick", "--kafka", "no", "--rows", "send"])
"""


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[Path]:
    """Yield the directory of the cluster. Its remaining processes are killed at the end."""
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(_JAVA.format(python=sys.executable))
    java.chmod(0o755)
    cluster = tmp_path / "cluster"
    yield cluster
    for pid in _pids(cluster):
        if _lives(pid):
            os.kill(pid, signal.SIGKILL)


def _pids(cluster: Path) -> list[int]:
    return [int(found.read_text()) for found in cluster.glob("*.pid")]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_bench_interrupted_twice_leaves_no_process(kafka: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _COMMAND, str(kafka)],
        cwd=ROOT,
        env={**os.environ, "JAVA_HOME": str(kafka.parent / "java"), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline() == "started\n"
        pids = _pids(kafka)
        assert len(pids) == 4
        assert all(map(_lives, pids))
        bench.send_signal(number)
        wait_until(lambda: len(list(kafka.glob("*.told"))) == 3, what="the brokers to receive SIGTERM")
        bench.send_signal(number)  # as the program ``timeout`` does, and impatient users
        (kafka / "go").touch()
        assert bench.wait(60) == 128 + number
    assert not any(map(_lives, pids))
