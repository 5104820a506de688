"""A broker whose disk fails on demand: ``python -m sparklog.testing.failing_disk SWITCH --config FILE``.

While the file SWITCH exists, every fsync fails, as on a disk with bad sectors. If the file contains ``read-only``, no
file can be changed either, as after an error in a file system's journal.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparklog.broker.__main__ import main
from sparklog.storage.disk import RealDisk

READ_ONLY = "read-only"


def fail_while(switch: Path) -> None:
    """Make the disk of this process fail while the file ``switch`` exists."""

    def failing(call: Callable[..., Any], code: int, *, when: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **options: Any) -> Any:
            if switch.exists() and when in switch.read_text(encoding="ascii"):
                raise OSError(code, os.strerror(code))
            return call(*args, **options)

        return wrapped

    os.fsync = failing(os.fsync, errno.EIO, when="")
    for name in ("open", "write", "rename"):
        setattr(RealDisk, name, failing(getattr(RealDisk, name), errno.EROFS, when=READ_ONLY))


if __name__ == "__main__":
    fail_while(Path(sys.argv.pop(1)))
    code = main()
    sys.stderr.flush()
    os._exit(code)
