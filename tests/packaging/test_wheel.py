"""Tests of the files that ``pip install`` puts into an environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import ROOT


def build_wheel(directory: Path, **environment: str) -> zipfile.Path:
    """Build the wheel of the working tree. A compiled build leaves an empty ``build/`` in the tree, and nothing
    else."""
    (directory / "setup.cfg").write_text(f"[build]\nbuild_base={directory}/b\n[egg_info]\negg_base={directory}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", directory, ROOT],
        env={**os.environ, "SPARKLOG_COMPILE": "", **environment, "DIST_EXTRA_CONFIG": str(directory / "setup.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = directory.glob("*.whl")
    return zipfile.Path(wheel)


@pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < 77, reason="needs the setuptools that tests/run installs"
)
def test_the_wheel_has_every_module_and_the_source_name(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    names = set(wheel.root.namelist())
    package = ROOT / "sparklog"
    modules = {str(path.relative_to(ROOT)) for path in package.rglob("*.py")}
    assert modules | {"sparklog/py.typed", "pyspark_sparklog.py"} == {
        name for name in names if ".dist-info/" not in name and not name.endswith("/")
    }
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "sparklog = sparklog.cli.main:main" in wheel.joinpath(entry_points).read_text()


def test_every_extra_that_needs_spark_includes_it(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    (metadata,) = (name for name in wheel.root.namelist() if name.endswith(".dist-info/METADATA"))
    said = Parser().parsestr(wheel.joinpath(metadata).read_text(), headersonly=True)
    needed = said.get_all("Requires-Dist", [])
    base = [line for line in needed if "extra ==" not in line]
    assert any(line.startswith("pyarrow") for line in base)
    assert not [line for line in base if line.startswith(("pyspark", "py4j", "pandas", "delta"))]
    assert 'pyspark==4.2.0; extra == "spark"' in needed
    for extra in ("bench", "delta", "demo", "test"):
        assert any(re.fullmatch(rf'sparklog\[(\w+,)*spark(,\w+)*\]; extra == "{extra}"', line) for line in needed)
