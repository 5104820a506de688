"""What all tests share: every process a test starts runs the working tree, with this Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Not an editable install: pyspark finds the data source by listing modules, and lists those of PYTHONPATH.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(ROOT))]
)
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ["SPARK_CONF_DIR"] = str(ROOT / "conf")
# A developer's own Spark, and defaults meant for one shell, must not decide what a test sees.
for name in ("SPARK_HOME", "PYSPARK_SUBMIT_ARGS", "SPARKLOG_BOOTSTRAP_SERVERS"):
    os.environ.pop(name, None)
# Spark's Kafka connector, for the comparison with it: only a JVM that starts with its jars finds it.
if _kafka_jars := os.environ.get("SPARKLOG_KAFKA_JARS"):
    _names = ",".join(sorted(str(path) for path in Path(_kafka_jars, "spark").glob("*.jar")))
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {_names} pyspark-shell"

#: Directories and files whose tests run in one process when tests run in several: they share a Spark session, or ports
#: that a job takes unasked. In this order, as long ones that begin last are waited for.
ONE_PROCESS = ("demo", "spark", "packaging", "integration/test_faults.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every other file is a group of its own. Groups count with ``--dist loadgroup`` only."""
    groups = {item: _group(item.path.relative_to(ROOT / "tests")) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: ONE_PROCESS.index(groups[item]) if groups[item] in ONE_PROCESS else len(ONE_PROCESS))


def _group(path: Path) -> str:
    return path.parts[0] if path.parts[0] in ONE_PROCESS else path.as_posix()
