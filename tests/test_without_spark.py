"""Tests that clients and the command line need no Spark, and that everything else raises one sentence with the extra's
name.

Processes of these tests can import neither Spark nor the packages that are installed only with it.
``packaging/test_light_client.py`` installs the package without them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: Python imports a module with this name first.
SITECUSTOMIZE = """
import sys

HIDDEN = {"pyspark", "py4j", "pandas", "pytz", "dateutil", "delta", "deltalake"}

class WithoutSpark:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [WithoutSpark(finder) for finder in sys.meta_path]
"""
#: Packages that contain no code for Spark.
LIGHT = (
    "broker",
    "cli",
    "client",
    "controller",
    "coordinator",
    "net",
    "protocol",
    "record",
    "replica",
    "storage",
    "zk",
)
ADVICE = "needs Spark, which is not installed: run pip install 'sparklog[spark]'"


class WithoutSpark:
    """Run Python code that cannot import Spark."""

    def __init__(self, directory: Path) -> None:
        (directory / "sitecustomize.py").write_text(SITECUSTOMIZE)
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)]), "TERM": "dumb"}
        self._directory = directory

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self._directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def run(self, code: str) -> str:
        done = self.python("-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def sparklog(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "sparklog.cli.main", *arguments)


@pytest.fixture
def without_spark(tmp_path: Path) -> WithoutSpark:
    return WithoutSpark(tmp_path)


def test_the_modules_of_clients_brokers_and_commands_import(without_spark: WithoutSpark) -> None:
    found = without_spark.run(f"""
import importlib, importlib.util, pkgutil, sys, sparklog
assert importlib.util.find_spec("pyspark") is None
assert importlib.util.find_spec("pandas") is None
for package in {LIGHT!r}:
    home = importlib.import_module(f"sparklog.{{package}}")
    for module in pkgutil.walk_packages(home.__path__, f"sparklog.{{package}}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith("sparklog.")]))
""")
    assert int(found) > 200


def test_public_names_import_and_spark_names_refuse_calls(without_spark: WithoutSpark) -> None:
    found = without_spark.run("""
import sparklog
from sparklog import *
for name in sparklog.__all__:
    found = getattr(sparklog, name)
    assert name == "__version__" or found.__doc__, name
    if isinstance(found, type) and found.__module__ == "sparklog":
        annotation = found | None
        try:
            found(None, "topic", columns=["a"])
        except sparklog.ConfigError as error:
            print(error)
print(Admin.__name__, Producer.__name__, Consumer.__name__)
""")
    names = ("LocalCluster", "configure", "locate_moment", "read", "read_history")
    assert found.splitlines() == [
        *(f"sparklog.{name} {ADVICE}" for name in names),
        "Admin Producer Consumer",
    ]


def test_another_missing_module_is_not_blamed_on_spark(without_spark: WithoutSpark) -> None:
    found = without_spark.run("""
import sparklog
sparklog._HOME["read"] = "sparklog.unheard_of"
try:
    sparklog.read
except ModuleNotFoundError as error:
    print(error)
""")
    assert found == "No module named 'sparklog.unheard_of'\n"


def test_schemas_are_text_or_arrow_and_struct_type_needs_spark(without_spark: WithoutSpark) -> None:
    found = without_spark.run("""
import pyarrow as pa
from sparklog import ConfigError
from sparklog.client.admin.topics import to_arrow_schema
text = "id bigint not null, name string, at timestamp, tags array<string>, at_home struct<street: string, number: int>"
print(to_arrow_schema(text).names, to_arrow_schema(pa.schema([("id", pa.int64())])).names)

class StructType:
    fieldNames = jsonValue = None

try:
    to_arrow_schema(StructType())
except ConfigError as error:
    print(error)
""")
    assert found == f"['id', 'name', 'at', 'tags', 'at_home'] ['id']\na StructType as a schema {ADVICE}\n"


@pytest.mark.extended
def test_every_command_shows_its_help(without_spark: WithoutSpark) -> None:
    assert "topics" in without_spark.sparklog("--help").stdout
    found = without_spark.run("""
import contextlib, io, typer.main
from sparklog.cli.main import app, run

def helps(command, words):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert run([*words, "--help"]) == 0
    assert "Usage: sparklog" in shown.getvalue(), words
    return 1 + sum(helps(below, [*words, name]) for name, below in getattr(command, "commands", {}).items())

print(helps(typer.main.get_command(app), []))
""")
    assert int(found) > 40


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_cluster_start_is_refused_in_one_sentence(
    without_spark: WithoutSpark, tmp_path: Path, detach: list[str]
) -> None:
    done = without_spark.sparklog("cluster", "start", "--data-dir", str(tmp_path / "data"), *detach)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"sparklog: cluster start {ADVICE}\n")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("restore", "orders", "--from", "/lake", "--yes"),
        ("locate", "orders", "2024-05-01T00:00:00Z", "--history", "/lake"),
    ],
)
def test_archive_commands_name_the_extra_they_need(without_spark: WithoutSpark, command: tuple[str, ...]) -> None:
    done = without_spark.sparklog("topics", *command, "--bootstrap", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sparklog: pyspark is not installed here: pip install 'sparklog[delta]'\n"


def test_a_zookeeper_server_needs_the_jars_of_spark(without_spark: WithoutSpark) -> None:
    found = without_spark.run("""
from pathlib import Path
from sparklog import ConfigError
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
try:
    EmbeddedZookeeper.start(Path("zookeeper"))
except ConfigError as error:
    print(error)
""")
    assert found == f"the embedded ZooKeeper server {ADVICE}\n"
