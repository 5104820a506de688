"""``python -m sparklog.spark.bytecode``: bytecode for the archives that Spark's Python processes load pyspark from.

Spark's JVM puts its own ``pyspark.zip`` in front of the path of every Python process it starts. That archive has
sources alone, and Python stores no bytecode for what it loads from one, so each such process compiles all it imports:
three quarters of a second of a core, each time a streaming read is started. And those that plan and commit read the
archive's directory a dozen times, once for each package that they have loaded from there, so names that nobody asks for
are left out of it.
Nothing but time depends on this, so an archive that may not be written is left as it is.
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

#: Bytecode that is not compared with its source, which is in the same archive and changes with it. Source: PEP 552.
_UNCHECKED = 0b01
_HEADER = struct.Struct("<4sI8x")
#: Of pyspark's own tests, which no process of Spark loads: more than half of the names.
_TESTS = "tests/"


def add_bytecode(archive: Path) -> bool:
    """Give the modules in ``archive`` bytecode of this Python, and its directory no names of tests; False: it is so
    already.

    The archive is replaced as a whole, and what it held stays where it was in it: a process that has read the old
    directory goes on with it. Bytecode is stored as it is, for unpacking it takes longer than reading it.

    Raises:
        OSError: it cannot be read or replaced.
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
                with contextlib.suppress(SyntaxError):  # of another Python's
                    target.writestr(f"{name}c", _bytecode(archive / name, target.read(name)))
        Path(scratch).replace(archive)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return True


def _is_bytecode(entry: zipfile.ZipInfo) -> bool:
    return entry.filename.endswith(".pyc")


def _is_left_out(entry: zipfile.ZipInfo) -> bool:
    """Tests, and bytecode that is compressed, for which there will be some that is not."""
    return _TESTS in entry.filename or (_is_bytecode(entry) and entry.compress_type != zipfile.ZIP_STORED)


def _bytecode(place: Path, source: bytes) -> bytes:
    code = compile(source, str(place), "exec", dont_inherit=True)
    return _HEADER.pack(importlib.util.MAGIC_NUMBER, _UNCHECKED) + marshal.dumps(code)


def main() -> int:
    try:
        for archive in sorted((Path(pyspark.__file__).parent / "python" / "lib").glob("*.zip")):
            add_bytecode(archive)
    except OSError as error:
        sys.stderr.write(f"pyspark's archives stay as they are: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
