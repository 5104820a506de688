"""Tests of the cluster job under spark-submit: the master, and jars that are not in pyspark's directory."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from sparklog.cluster import embedded_zookeeper
from sparklog.errors import ClusterError

PROGRAM = """
import os, sys
from pathlib import Path
from sparklog.cluster.spark_environment import prepare
print("master:", prepare(os.environ, brokers=3, data_dir=Path(sys.argv[1])))
"""


@pytest.mark.integration
def test_the_master_is_the_one_given_to_spark_submit(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(PROGRAM)
    submit = Path(sys.executable).with_name("spark-submit")
    command = [str(submit), "--master", "local[2]", str(tmp_path / "job.py"), str(tmp_path / "data")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "master: local[2]" in ended.stdout, ended.stderr[-2000:]
    assert not (tmp_path / "data").exists(), "a running JVM must not get another Spark home"


@pytest.fixture
def zipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Yield an empty working directory, with pyspark imported from a zip file."""
    archive = tmp_path / "pyspark.zip"
    archive.write_bytes(b"")
    spec = ModuleSpec("pyspark", None, origin=str(archive / "pyspark" / "__init__.py"))
    monkeypatch.setattr(embedded_zookeeper, "find_spec", lambda name: spec)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", ["home/jars", "__spark_libs__"])
def test_zookeepers_jar_is_found_among_sparks_jars(place: str, zipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jars = zipped / place
    jars.mkdir(parents=True)
    for name in ("zookeeper-3.9.4.jar", "zookeeper-jute-3.9.4.jar", "unneeded-1.0.jar"):
        (jars / name).touch()
    monkeypatch.setenv("SPARK_HOME", str(zipped / "home"))
    found = embedded_zookeeper._class_path().split(":")
    assert found == [str(jars / "zookeeper-3.9.4.jar"), str(jars / "zookeeper-jute-3.9.4.jar")]


def test_the_error_names_each_place_without_a_jar(zipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/nowhere")
    with pytest.raises(ClusterError, match=rf"pyspark\.zip/pyspark/jars, /nowhere/jars, {zipped}/__spark_libs__; pass"):
        embedded_zookeeper._class_path()
