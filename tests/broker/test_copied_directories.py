"""A test of a log directory that is copied on its host while its broker runs: that broker stays, and the copy's
broker exits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from sparklog.broker.lifecycle.ending import EXIT_CANNOT_START
from sparklog.testing.process_cluster import ProcessCluster

pytestmark = pytest.mark.integration


def test_only_the_registered_broker_of_two_copied_directories_stays(tmp_path: Path) -> None:
    with ProcessCluster(1, base_dir=tmp_path / "data") as cluster:
        cluster.wait_ready()
        slot, before = cluster.slots[0], cluster.describe(0)
        copied = Path(shutil.copytree(slot.log_dir, tmp_path / "copy"))
        config = msgspec.json.decode(slot.config_file.read_bytes())
        config.update(log_dir=str(copied), control_socket=str(tmp_path / "copy.sock"), port=0, ready_fd=-1)
        config["settings"]["zookeeper.connection.timeout.ms"] = "5000"
        (tmp_path / "copy.json").write_bytes(msgspec.json.encode(config))
        assert slot.process is not None
        command = [*slot.process.args[:-1], str(tmp_path / "copy.json")]  # type: ignore[index]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == EXIT_CANNOT_START
        assert f"(incarnation {before.incarnation}, pid {cluster.pid(0)}), another process of this host" in ended.stderr
        after = cluster.describe(0)
        assert (after.incarnation, after.state) == (before.incarnation, "running")
