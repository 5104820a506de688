"""Common settings of all tests: every process that a test starts runs the working tree, with this Python."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from sparklog.record import header
from tests import spark_classes

#: Not resolved: if another package links to these tests, that package runs.
ROOT = Path(__file__).absolute().parent.parent

# This is not an editable install: pyspark finds the data source by listing the modules of PYTHONPATH.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(ROOT))]
)
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ.update(spark_classes.environment())
if os.environ.get("SPARKLOG_TESTED") == "compiled":
    assert str(header.__file__).startswith(str(ROOT)) and not header.__file__.endswith(".py"), header.__file__
else:
    # If the shell disables bytecode, each of hundreds of processes would compile all modules that it imports.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell without a terminal lets its background processes ignore Ctrl-C, and so would all processes of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A developer's own Spark and the defaults of a shell must not affect a test.
for name in ("SPARK_HOME", "PYSPARK_SUBMIT_ARGS", "SPARKLOG_BOOTSTRAP", "SPARKLOG_BOOTSTRAP_SERVERS"):
    os.environ.pop(name, None)
# Spark's Kafka connector, for the comparison with it: only a JVM that starts with its jars finds it.
if _kafka_jars := os.environ.get("SPARKLOG_KAFKA_JARS"):
    _names = ",".join(sorted(str(path) for path in Path(_kafka_jars, "spark").glob("*.jar")))
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {_names} pyspark-shell"

# Hypothesis has no time limit for an example: the machine is busy with other tests.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

#: The groups of tests that run in one process, because they share a Spark session or the default ports of a job. Any
#: other file is a separate group. The order is that of their starts: long groups come first, because the run waits for
#: the last one. Each additional process with a session and Delta costs 35 s of processor time before its first test, so
#: one process has all tests of Delta.
GROUPS = {
    "simulation/test_seeds.py": "seeds",
    "simulation/test_mutants.py": "mutants",
    "delta/test_killed_archive.py": "killed archive",
    "delta": "delta",
    "spark": "spark",
    "packaging/test_compiled.py": "compiled",
    "bench/test_run.py": "bench",
    "integration/test_standalone_spark.py": "standalone",
    "demo": "demo",
    "integration/test_cluster_job_faults.py": "job faults",
    "integration/test_faults.py": "faults",
    "packaging": "packaging",
    "cli/test_page.py": "cli page",
    "integration/test_local_cluster.py": "local",
}


#: Marks by which ``tests/run`` selects tests. The text of a file contains each of its tests' marks.
_STAGES = ("integration", "alone", "extended", "long")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without the selected mark, before their import.

    Each process of a stage would otherwise import all files, for seconds, and find no test in four of five.
    """
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    return True if not may_have(config.option.markexpr, collection_path.read_text()) else None


def may_have(expression: str, text: str) -> bool:
    """Return whether a file with this text may have tests for ``-m expression``. False is certain."""
    if " or " in expression or "(" in expression:
        return True
    terms = expression.split(" and ")
    return all(f"mark.{term}" in text for term in terms if term in _STAGES)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marks = [name for name in _STAGES if item.get_closest_marker(name) is not None]
        assert may_have(" and ".join(marks), _text(item.path)), f"{item.nodeid}: its marks must stand in its own file"
    order = list(dict.fromkeys(GROUPS.values()))
    groups = {item: _group(item.nodeid) for item in items}
    items.sort(key=lambda item: order.index(groups[item]) if groups[item] in order else len(order))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Groups(config, log)


class _Groups(LoadScopeScheduling):  # type: ignore[misc]
    """A scheduler that gives whole groups to processes. xdist's own marks for that do not work with this pytest.

    After a group, a process gets the first remaining group of the same directory: it already has the common fixtures of
    that directory's tests (a Spark session with loaded and compiled classes, a cluster), which every process would
    otherwise create.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        had = self.assigned_work.get(node)
        if had:
            self._to_the_front(_directory(had[next(reversed(had))]))
        super()._assign_work_unit(node)

    def _to_the_front(self, directory: str) -> None:
        for name, tests in self.workqueue.items():
            if _directory(tests) == directory:
                self.workqueue.move_to_end(name, last=False)
                return


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()


def _directory(tests: Iterable[str]) -> str:
    """Return the directory of a group's first test."""
    return next(iter(tests)).rpartition("::")[0].rpartition("/")[0]


def _group(nodeid: str) -> str:
    path = nodeid.partition("::")[0].removeprefix("tests/")
    return GROUPS.get(path) or GROUPS.get(path.partition("/")[0]) or path
