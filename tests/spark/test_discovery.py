"""pyspark finds the source by itself after a normal install, in its planning processes and in its tasks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parent.parent.parent

_PROGRAM = """
import sparklog
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
         .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC").getOrCreate())
print("package", sparklog.__file__)
try:
    spark.read.format("sparklog").option("subscribe", "x").option("no.such.option", "1").load()
except Exception as error:
    print("answer", "unknown option 'no.such.option'" in str(error), str(error)[:2000])
spark.stop()
"""


def test_an_installed_package_is_found_without_registration(tmp_path: Path) -> None:
    sources, installed = tmp_path / "sources", tmp_path / "installed"
    sources.mkdir()
    # A copy, so that the build leaves nothing in the tree; a --target install is a normal one, not an editable one.
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "pyspark_sparklog.py"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "sparklog", sources / "sparklog", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(installed), str(sources)], check=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"package {installed}" in done.stdout
    assert "answer True" in done.stdout, done.stdout
