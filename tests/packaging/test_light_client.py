"""Tests of ``pip install sparklog`` in a new environment: a client and a command line, without Spark.

The packages come from the registry. The brokers run from the environment of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.testing.process_cluster import ProcessCluster
from tests.packaging.test_wheel import build_wheel

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(600)]

#: Packages that only ``sparklog[spark]`` and ``sparklog[delta]`` install.
SPARK = {"pyspark", "py4j", "pandas", "pytz", "python-dateutil", "delta-spark", "deltalake"}

ROUND_TRIP = """
import datetime as dt, sys
import pyarrow as pa
import sparklog

bootstrap, version = sys.argv[1:]
assert sparklog.__version__ == version and sparklog.__file__.startswith(sys.prefix), sparklog.__file__
at = dt.datetime(2024, 5, 1, tzinfo=dt.timezone.utc)
with sparklog.Admin(bootstrap) as admin:
    admin.create_topic("typed", partitions=2, schema="name string, at timestamp, price decimal(9,2)", key="name")
    admin.create_topic("plain", schema=None)
table = pa.table({"name": ["anna", "bert", None], "at": [at, None, at]})
with sparklog.Producer(bootstrap) as producer:
    producer.write("typed", table).result(30)
    producer.send("typed", {"name": "carl", "at": at}).result(30)
    print(producer.send("plain", "hello", key="anna").result(30).offset)
with sparklog.Consumer(bootstrap, "typed", start="earliest") as consumer:
    rows = consumer.to_table(timeout_s=30).to_pylist()
    print(sorted(((row["name"], row["at"] == at) for row in rows), key=str))
with sparklog.Consumer(bootstrap, "plain", group="readers", start="earliest") as consumer:
    batches = consumer.poll(30.0)
    consumer.commit()
    print([value for batch in batches for value in batch.column("value").to_pylist()])
try:
    sparklog.read(None, "typed")
except sparklog.ConfigError as error:
    print(error)
"""


class LightEnvironment:
    """Create a virtual environment with the base install of the working tree's wheel."""

    def __init__(self, directory: Path) -> None:
        wheel = build_wheel(directory)
        self._bin = directory / "environment" / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self._bin.parent], check=True)
        self.python = self._bin / "python"
        self._pip("install", "--quiet", str(wheel.root.filename))

    def _pip(self, *arguments: str) -> str:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check"]
        done = subprocess.run([*pip, *arguments], env=_environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def packages(self) -> dict[str, str]:
        """Return the versions of the installed packages, by name."""
        return {found["name"]: found["version"] for found in json.loads(self._pip("list", "--format", "json"))}

    def run(self, program: str, *arguments: object, stdin: str = "", bootstrap: str = "") -> tuple[int, str, str]:
        """Run a program of this environment. Return its exit code, output and error output."""
        done = subprocess.run(
            [self._bin / program, *map(str, arguments)],
            cwd=self._bin,
            env={**_environment(), "SPARKLOG_BOOTSTRAP": bootstrap, "TERM": "dumb"},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


def _environment() -> dict[str, str]:
    """Return a user's environment: without a path to the working tree, on a host without time zone files, as small
    images are."""
    private = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in private} | {"PYTHONTZPATH": ""}


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> LightEnvironment:
    return LightEnvironment(tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(1, settings={"default.replication.factor": "1"}) as running:
        yield running


def test_the_base_install_brings_no_spark(light: LightEnvironment) -> None:
    installed = light.packages()
    assert {"sparklog", "pyarrow", "msgspec", "kazoo", "typer"} <= set(installed)
    assert not SPARK & set(installed)
    code, out, err = light.run("python", "-c", "import pyspark")
    assert (code, out) == (1, "") and err.endswith("ModuleNotFoundError: No module named 'pyspark'\n")


def test_a_program_without_spark_writes_and_reads_topics(light: LightEnvironment, cluster: ProcessCluster) -> None:
    version = light.packages()["sparklog"]
    code, out, err = light.run("python", "-c", ROUND_TRIP, cluster.bootstrap, version)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "0",
        "[('anna', True), ('bert', False), ('carl', True), (None, True)]",
        "[b'hello']",
        "sparklog.read needs Spark, which is not installed: run pip install 'sparklog[spark]'",
    ]


def test_the_command_without_spark_writes_and_reads_topics(light: LightEnvironment, cluster: ProcessCluster) -> None:
    at = cluster.bootstrap
    schema = ("--schema", "id int, word string")
    assert light.run("sparklog", "topics", "create", "words", "-p", 1, *schema, bootstrap=at)[0] == 0
    code, out, _ = light.run("sparklog", "topics", "list", bootstrap=at)
    assert code == 0 and "words" in out.splitlines()
    lines = ['{"id":1,"word":"one"}', '{"id":2,"word":null}']
    code, _, err = light.run("sparklog", "produce", "words", "--format", "json", stdin="\n".join(lines), bootstrap=at)
    assert code == 0 and err.startswith("2 records written to words in ")
    code, out, _ = light.run("sparklog", "consume", "words", "--from", "earliest", "--format", "json", bootstrap=at)
    assert (code, out.splitlines()) == (0, lines)


def test_a_command_that_needs_spark_names_the_extra(light: LightEnvironment, tmp_path: Path) -> None:
    assert light.run("sparklog", "cluster", "start", "--data-dir", tmp_path / "data") == (
        2,
        "",
        "sparklog: cluster start needs Spark, which is not installed: run pip install 'sparklog[spark]'\n",
    )
