"""Tests of the settings that a job makes for Spark before its JVM starts."""

from __future__ import annotations

import itertools
import shlex
import stat
from pathlib import Path

import pytest

from sparklog.cluster.spark_environment import PRIVATE_CHANNEL, close_to_others, prepare, submitted_master
from sparklog.errors import ClusterError
from sparklog.spark import worker_daemon

_ACCESS = (
    "spark.driver.host",
    "spark.driver.bindAddress",
    "spark.authenticate",
    "spark.ui.killEnabled",
    "spark.master.ui.decommission.allow.mode",
)


def settings(environment: dict[str, str]) -> dict[str, str]:
    """Return an option of PYSPARK_SUBMIT_ARGS. A later one takes precedence."""
    words = shlex.split(environment["PYSPARK_SUBMIT_ARGS"])
    given = [value.partition("=") for option, value in itertools.pairwise(words) if option == "--conf"]
    return {key: value for key, _, value in given}


def access(environment: dict[str, str]) -> list[str | None]:
    found = settings(environment)
    return [environment.get("SPARK_LOCAL_IP"), *(found.get(key) for key in _ACCESS)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("pyspark-shell", ["127.0.0.1", "127.0.0.1", "127.0.0.1", "true", "false", "DENY"]),
        ("--master local[2] pyspark-shell", ["127.0.0.1", "127.0.0.1", "127.0.0.1", "true", "false", None]),
        ("--master spark://host:7077 pyspark-shell", [None] * 6),
        ("--master yarn pyspark-shell", [None] * 6),
    ],
)
def test_a_single_machine_cluster_refuses_other_hosts(tmp_path: Path, arguments: str, expected: list[str]) -> None:
    environment = {"PYSPARK_SUBMIT_ARGS": arguments}
    prepare(environment, brokers=3, data_dir=tmp_path)
    assert access(environment) == expected


def test_a_job_without_a_master_runs_on_this_machine() -> None:
    environment: dict[str, str] = {}
    close_to_others(environment)
    assert access(environment) == ["127.0.0.1", "127.0.0.1", "127.0.0.1", "true", "false", None]
    assert submitted_master(environment) is None
    assert environment["PYSPARK_SUBMIT_ARGS"].endswith(" pyspark-shell")


def test_the_users_settings_stay() -> None:
    environment = {
        "SPARK_LOCAL_IP": "192.0.2.7",
        "PYSPARK_SUBMIT_ARGS": "--master local --conf spark.authenticate=false pyspark-shell",
    }
    close_to_others(environment)
    assert access(environment) == ["192.0.2.7", "192.0.2.7", "192.0.2.7", "false", "false", None]


@pytest.mark.parametrize("arguments", ["pyspark-shell", "--master local[2] pyspark-shell"])
def test_only_the_user_enters_the_directory_of_sparks_sockets(tmp_path: Path, arguments: str) -> None:
    for _ in range(2):  # The directory may exist.
        environment = {"PYSPARK_SUBMIT_ARGS": arguments}
        prepare(environment, brokers=1, data_dir=tmp_path)
        directory = Path(settings(environment)["spark.python.unix.domain.socket.dir"])
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700 and len(str(directory)) < 50


def test_secure_encrypts_what_spark_sends_between_hosts(tmp_path: Path) -> None:
    environment = {"PYSPARK_SUBMIT_ARGS": "--master spark://host:7077 pyspark-shell"}
    prepare(environment, brokers=3, data_dir=tmp_path, secure=True)
    found = settings(environment)
    assert found.items() >= PRIVATE_CHANNEL.items()
    assert found["spark.python.unix.domain.socket.dir"].startswith("/tmp/sparklog-")
    on_one_machine = {"PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell"}
    prepare(on_one_machine, brokers=3, data_dir=tmp_path, secure=True)
    assert "spark.network.crypto.enabled" not in settings(on_one_machine)


def test_the_worker_daemon_creates_the_directory_on_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sparklog-1234"
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SOCK_DIR", str(path))
    worker_daemon.make_socket_directory()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    with pytest.raises(ClusterError, match="mode 0700"):
        worker_daemon.make_socket_directory()
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SOCK_DIR", str(tmp_path / "other"))
    worker_daemon.make_socket_directory()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "environment",
    [
        {"PYSPARK_SUBMIT_ARGS": "--master spark://host:7077 pyspark-shell"},
        {"MASTER": "spark://host:7077", "PYSPARK_SUBMIT_ARGS": "pyspark-shell"},
    ],
)
def test_a_job_on_a_real_cluster_is_left_unchanged(environment: dict[str, str]) -> None:
    before = dict(environment)
    close_to_others(environment)
    assert environment == before
