"""Tests of a compiled install (``SPARKLOG_COMPILE``): the same Python code, in which a compiler may introduce
differences.

The test compiles without optimization, which takes half the time. The compiled package then has to pass other tests of
the project, those of storage and replication above all, instead of the working tree.
"""

from __future__ import annotations

import ast
import compileall
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.packaging.test_wheel import build_wheel

pytestmark = pytest.mark.timeout(900)

#: Tests of the code that protects every record. They take half a minute in total.
_PASSED_BY_BOTH = (
    "tests/protocol",
    "tests/kafka/records/test_kafka_round_trip.py",
    "tests/kafka/records/test_refused_records.py",
    "tests/record/test_small_batch_validator.py",
    "tests/record/test_small_batch_encoder.py",
    "tests/record/test_validate_batch.py",
    "tests/replica",
    "tests/storage/test_recovery.py",
    "tests/storage/test_trust.py",
    "tests/storage/test_producers.py",
    "tests/storage/test_crash_points.py",
    "tests/net",
    "tests/broker/test_replication.py",
    "tests/client/test_producer.py",
)
#: Functions whose argument is the class to decode.
_DECODING = {"Decoder", "decode", "convert", "decode_state"}


def _compiled_modules() -> list[Path]:
    said: dict[str, object] = {"__name__": "setup", "__file__": str(ROOT / "setup.py")}
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), said)  # this is not a module of the package
    modules = said["modules"]
    assert callable(modules)
    return [ROOT / path for path in modules()]


def _decoded(tree: ast.Module) -> Iterator[str]:
    """Return the names of the classes that msgspec decodes."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in _DECODING:
            told = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "type")]
            yield from (name.id for part in told for name in ast.walk(part) if isinstance(name, ast.Name))


def test_compiled_modules_avoid_declarations_that_compilers_break() -> None:
    # A name that begins with an underscore belongs to its module: equal names elsewhere are other classes.
    decoded = {
        name if not name.startswith("_") else f"{path}:{name}"
        for path in (ROOT / "sparklog").rglob("*.py")
        for name in _decoded(ast.parse(path.read_text()))
    }
    assert {"ProducerSnapshot", "EpochFile", "Marker"} <= decoded, "the search must find the decoded classes"
    for path in _compiled_modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert not {node.name, f"{path}:{node.name}"} & decoded, (
                    f"{path}: {node.name} is decoded by its annotations"
                )
                views = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
                assert not any("memoryview" in view for view in views), f"{path}: {node.name} has a view as its field"


def _no_compiler() -> bool:
    return shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists()


@pytest.mark.integration
@pytest.mark.extended
@pytest.mark.skipif(_no_compiler(), reason="needs a C compiler and Python's headers")
def test_a_compiled_install_passes_the_same_tests(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, SPARKLOG_COMPILE="O0")
    site = tmp_path / "site"
    zipfile.ZipFile(str(wheel.root.filename)).extractall(site)
    compiled = {str(path.relative_to(site)).partition(".")[0] for path in site.glob("sparklog/**/*.so")}
    assert compiled == {str(path.relative_to(ROOT).with_suffix("")) for path in _compiled_modules()}
    assert compileall.compile_dir(site / "sparklog", quiet=1), "without the bytecode each process compiles the module"
    (site / "tests").symlink_to(ROOT / "tests")
    (site / "setup.cfg").symlink_to(ROOT / "setup.cfg")
    code, said = _run(site, "-m", "not alone", *_PASSED_BY_BOTH)
    if code != 0:  # perhaps because the time was over
        code, more = _run(site, "-m", "not alone", "--again", *_PASSED_BY_BOTH)
        said += more
    assert code == 0, said[-7000:]


def _run(site: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of pytest with a compiled package. Its brokers end with it."""
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.out_of_time", "-o", f"cache_dir={site}/.cache", *arguments],
        cwd=site,
        env={
            **{name: value for name, value in os.environ.items() if name not in {"PYTHONSAFEPATH", "PYTEST_ADDOPTS"}},
            "PYTHONPATH": str(site),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SPARKLOG_TESTED": "compiled",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as pytest_run:
        try:
            said, _ = pytest_run.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            pytest_run.send_signal(signal.SIGINT)  # it ends the processes that it has started
            said, _ = pytest_run.communicate(timeout=60)
        return pytest_run.returncode, said
