"""Tests of log directories and settings that a broker must refuse: it reports the reason and exits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

CANNOT_START, CONFIG = 69, 64


def start(tmp_path: Path, **changes: object) -> tuple[int, str]:
    """Run a broker that should exit. Return its exit code and its output."""
    config = {
        "cluster_id": "this-cluster",
        "broker_id": 1,
        "log_dir": str(tmp_path / "log"),
        "host": "127.0.0.1",
        "port": 0,
        # No server listens there: a broker reaches the connection to ZooKeeper only with a valid directory.
        "zookeeper": "127.0.0.1:1",
        "settings": {"zookeeper.connection.timeout.ms": "100"},
        **changes,
    }
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    done = subprocess.run(
        [sys.executable, "-m", "sparklog.broker", "--config", str(tmp_path / "config.json")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def change_meta(tmp_path: Path, **changes: object) -> None:
    path = tmp_path / "log" / "meta.json"
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(path.read_bytes()), **changes}))


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """Create a directory that a broker has used."""
    code, said = start(tmp_path)
    assert code == CANNOT_START and "no ZooKeeper responded" in said
    return tmp_path


def test_a_directory_of_another_cluster_is_refused(used: Path) -> None:
    code, said = start(used, cluster_id="another-cluster")
    assert code == CANNOT_START
    assert "this-cluster" in said and "another-cluster" in said
    assert "Traceback" not in said


def test_a_directory_of_another_broker_is_refused(used: Path) -> None:
    code, said = start(used, broker_id=2)
    assert code == CANNOT_START
    assert "broker 1" in said and "broker 2" in said


def test_a_directory_with_a_newer_format_is_refused(used: Path) -> None:
    change_meta(used, version=99)
    code, said = start(used)
    assert code == CANNOT_START
    assert "99" in said and "newer" in said
    assert "Traceback" not in said


def test_a_directory_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a file")
    code, said = start(tmp_path)
    assert code == CANNOT_START
    assert str(tmp_path / "log") in said


def test_unknown_and_invalid_settings_are_refused(tmp_path: Path) -> None:
    code, said = start(tmp_path, settings={"replica.fetch.wait.max": "5"})
    assert code == CONFIG and "replica.fetch.wait.max.ms" in said
    code, said = start(tmp_path, settings={"fetch.session.slots": "0"})
    assert code == CONFIG and "1 to" in said
    code, said = start(tmp_path, brokr_id=3)
    assert code == CONFIG and "brokr_id" in said
