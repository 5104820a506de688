"""Tests that pyspark finds the source after a normal install. An editable install cannot show that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parent.parent.parent

#: pyspark runs this in its own process when a session first meets an unknown format.
_LOOK_UP = """
import io, os, sys
from pyspark.serializers import CloudPickleSerializer, UTF8Deserializer, read_int
from pyspark.sql.worker import lookup_data_sources
out = io.BytesIO()
lookup_data_sources._main(io.BytesIO(), out)
out.seek(0)
found = {}
for _ in range(read_int(out)):
    name = UTF8Deserializer().loads(out)
    found[name] = CloudPickleSerializer()._read_with_length(out)
source = found["sparklog"]
assert source.name() == "sparklog", source
print(sys.modules[source.__module__].__file__)
"""


def test_an_installed_package_is_found_without_registration(tmp_path: Path) -> None:
    sources, installed = tmp_path / "sources", tmp_path / "installed"
    sources.mkdir()
    # The build uses a copy, so it leaves no files in the tree. A --target install is a normal one, not an editable one.
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "pyspark_sparklog.py"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "sparklog", sources / "sparklog", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    if int(version("setuptools").split(".")[0]) >= 77:
        pip.append("--no-build-isolation")  # without this, pip fetches a newer setuptools
    subprocess.run([*pip, "--target", str(installed), str(sources)], check=True, timeout=120)
    done = subprocess.run(
        [sys.executable, "-c", _LOOK_UP],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(installed / "sparklog" / "spark" / "source.py")
