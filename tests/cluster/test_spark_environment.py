"""Tests of the settings that a job makes for Spark before its JVM starts."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest

from sparklog.cluster.spark_environment import close_to_others, prepare, submitted_master

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
