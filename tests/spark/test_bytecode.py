"""Tests that archives of sources get bytecode, and that Python uses it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
import zipimport
from pathlib import Path

import pytest

from sparklog.spark.bytecode import add_bytecode

_LOAD = """
import sys
compiled = []
sys.addaudithook(lambda event, arguments: compiled.append(arguments[1]) if event == "compile" else None)
import inside.module
assert inside.module.answer() == 42
print(any("inside" in str(name) for name in compiled), inside.module.__file__)
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "modules.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("inside/__init__.py", "")
        target.writestr("inside/module.py", "def answer():\n    return 42\n")
        target.writestr("inside/of_another_python.py", "print 1\n")
        target.writestr("inside/tests/test_module.py", "answer = 6 * 7\n")
        target.writestr("inside/table.json", "{}")
    return path


def load(archive: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(archive)}
    done = subprocess.run(
        [sys.executable, "-c", _LOAD], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_modules_loaded_from_an_archive_are_not_compiled_again(archive: Path) -> None:
    assert load(archive)[0] == "True"  # without this, the last assertion proves nothing
    assert add_bytecode(archive)
    assert load(archive) == ["False", str(archive / "inside" / "module.pyc")]


def test_only_modules_of_this_python_get_bytecode(archive: Path) -> None:
    with zipfile.ZipFile(archive) as found:
        before = {entry.filename: (entry.header_offset, entry.CRC) for entry in found.infolist()}
    add_bytecode(archive)
    with zipfile.ZipFile(archive) as found:
        assert found.testzip() is None
        after = {entry.filename: (entry.header_offset, entry.CRC) for entry in found.infolist()}
    # A process that has the archive open finds all entries at their old places. That includes the tests' entries, which
    # only the new directory omits.
    places = {name: after.get(name, before[name]) for name in before}
    assert places == before and before.keys() - after.keys() == {"inside/tests/test_module.py"}
    assert after.keys() - before.keys() == {"inside/__init__.pyc", "inside/module.pyc"}


def test_a_process_that_has_read_the_archives_directory_continues(archive: Path) -> None:
    reader = zipimport.zipimporter(str(archive))
    source = reader.get_source("inside/tests/test_module")
    add_bytecode(archive)
    assert reader.get_source("inside/tests/test_module") == source == "answer = 6 * 7\n"
    reader.invalidate_caches()
    with pytest.raises(zipimport.ZipImportError):
        reader.get_source("inside/tests/test_module")


def test_compressed_bytecode_is_replaced_and_tests_stay_excluded(archive: Path) -> None:
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as target:
        target.writestr("inside/module.pyc", b"of an earlier version")
    assert add_bytecode(archive)
    with zipfile.ZipFile(archive) as found:
        assert "inside/tests/test_module.py" not in found.namelist()
        assert {entry.compress_type for entry in found.infolist() if entry.filename.endswith(".pyc")} == {
            zipfile.ZIP_STORED
        }
    assert load(archive)[0] == "False"


def test_an_archive_with_bytecode_stays_unchanged(archive: Path) -> None:
    add_bytecode(archive)
    before = (archive.stat().st_ino, archive.read_bytes())
    assert not add_bytecode(archive)
    assert (archive.stat().st_ino, archive.read_bytes()) == before
    assert [path.name for path in archive.parent.iterdir()] == ["modules.zip"]


def test_an_invalid_archive_is_reported_and_left_unchanged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        add_bytecode(tmp_path / "nowhere.zip")
