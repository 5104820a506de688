"""The integration tests of kafka-python, from its source distribution."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

from tests.suites.packages import cached, step
from tests.suites.programs import run_limited
from tests.suites.results import FAILED, Result, read_junit

KAFKA_PYTHON = "3.0.12"
#: The classes for brokers that the fixtures import. The tests use only a cluster that runs already.
_SERVICES = """\
class ExternalService:
    def __init__(self, host, port):
        self.host, self.port = host, port

    def open(self): ...

    def close(self): ...


class SpawnedService:
    def __init__(self, *_, **__):
        import pytest
        pytest.skip("starts a broker of its own")
"""
#: Without those for TLS and SASL, which start brokers of their own.
_MODULES = tuple(f"test/integration/test_{name}_integration.py" for name in ("admin", "consumer", "producer"))
_TEST_LIMIT_S = 120
_LIMIT_S = 3600
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={_TEST_LIMIT_S}")


def fetch_kafka_python() -> Path:
    """Return the folder of the source distribution. Raises as ``cached``."""

    def make(folder: Path) -> None:
        _unpack("kafka-python", KAFKA_PYTHON, folder)
        # The distribution lacks two modules. Python has a package "test" as well, which the first one hides.
        (folder / "test" / "__init__.py").touch()
        (folder / "test" / "service.py").write_text(_SERVICES)

    return cached(f"kafka-python-{KAFKA_PYTHON}", make)


def run_kafka_python(
    folder: Path, bootstrap: str, output: Path, *, creates_topics: bool, only: Collection[str]
) -> dict[str, Result]:
    """Run the integration tests, or ``only`` some; return the results."""
    env = {"KAFKA_URI": f"kafka://{bootstrap.partition(',')[0]}", "KAFKA_VERSION": "4.1.1"}
    env |= {"PYTHONPATH": str(folder), "KAFKA_ROOT": str(output)}  # the fixtures check that the folder exists
    return _run_pytest(folder, output, env, [*_MODULES, *_selected(only)])


def _unpack(package: str, version: str, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    step([*pip, "--no-binary", package, f"{package}=={version}"], folder)
    (archive,) = folder.glob("*.tar.gz")
    step(["tar", "-xzf", archive.name, "--strip-components=1"], folder)
    archive.unlink()


def _selected(only: Collection[str]) -> list[str]:
    return ["-k", " or ".join(only)] if only else []


def _run_pytest(folder: Path, output: Path, env: dict[str, str], arguments: list[str]) -> dict[str, Result]:
    report = output / "junit.xml"
    command = [sys.executable, *_PYTEST, f"--junitxml={report}", *arguments]
    run_limited(command, folder, output / "pytest.txt", env=env, limit_s=_LIMIT_S)
    if not report.exists():
        return {"pytest": Result(FAILED, (output / "pytest.txt").read_text(errors="replace")[-500:])}
    return read_junit(report)
