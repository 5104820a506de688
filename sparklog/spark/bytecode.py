"""``python -m sparklog.spark.bytecode``: adds bytecode to the archives from which Spark's Python processes load
pyspark.

Spark's JVM puts its own ``pyspark.zip`` first on the path of every Python process that it starts. The archive has only
sources, and Python stores no bytecode for modules from an archive. So each process compiles all modules that it
imports, which takes 0.75 s of CPU time at every start of a streaming read. Processes that plan and commit also read the
archive's list of files (the central directory of the zip file) a dozen times, once for each package that they load from
the archive. So files that no process uses are removed from this list. All this only saves time, so an archive that
cannot be written is left unchanged.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import shutil
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

import pyspark

#: The flag of bytecode that Python does not compare with its source code. Source: PEP 552.
_UNCHECKED = 0b01
_HEADER = struct.Struct("<4sI8x")
#: The directory of pyspark's own tests, which are more than half of the names. No process of Spark loads them.
_TESTS = "tests/"


def add_bytecode(archive: Path) -> bool:
    """Add this Python's bytecode for the modules in the zip file ``archive``, and hide pyspark's own tests.

    The tests are removed only from the archive's list of files. Return False if the archive needed no change.

    The archive file is replaced as a whole. Its old content keeps its position in the file, so a process that has read
    the old list can continue. Bytecode is not compressed, because decompressing it takes longer than reading it.

    Raises:
        OSError: the archive cannot be read or replaced.
    """
    with zipfile.ZipFile(archive) as found:
        entries = found.infolist()
        if not any(_is_left_out(entry) for entry in entries) and any(_is_bytecode(entry) for entry in entries):
            return False
    descriptor, scratch = tempfile.mkstemp(dir=archive.parent, prefix=archive.name)
    os.close(descriptor)
    try:
        shutil.copyfile(archive, scratch)
        shutil.copymode(archive, scratch)
        with zipfile.ZipFile(scratch, "a") as target:
            for entry in [entry for entry in entries if _is_left_out(entry)]:
                target.filelist.remove(target.NameToInfo.pop(entry.filename))
            names = set(target.namelist())
            for name in [name for name in target.namelist() if name.endswith(".py") and f"{name}c" not in names]:
                with contextlib.suppress(SyntaxError):  # The module has syntax of another Python version.
                    target.writestr(f"{name}c", _bytecode(archive / name, target.read(name)))
        Path(scratch).replace(archive)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return True


def _is_bytecode(entry: zipfile.ZipInfo) -> bool:
    return entry.filename.endswith(".pyc")


def _is_left_out(entry: zipfile.ZipInfo) -> bool:
    """Return whether ``entry`` is left out, because it is a test or compressed bytecode."""
    return _TESTS in entry.filename or (_is_bytecode(entry) and entry.compress_type != zipfile.ZIP_STORED)


def _bytecode(place: Path, source: bytes) -> bytes:
    code = compile(source, str(place), "exec", dont_inherit=True)
    return _HEADER.pack(importlib.util.MAGIC_NUMBER, _UNCHECKED) + marshal.dumps(code)


def main() -> int:
    try:
        for archive in sorted((Path(pyspark.__file__).parent / "python" / "lib").glob("*.zip")):
            add_bytecode(archive)
    except OSError as error:
        sys.stderr.write(f"pyspark's archives were left unchanged: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
