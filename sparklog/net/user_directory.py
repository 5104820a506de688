"""The directory of this user on this host for sockets and small files, which only this user can enter.

It is in /tmp, not TMPDIR, which cluster managers set to a directory that is deleted with the container.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from sparklog.errors import ClusterError

_BASE = Path("/tmp")


def user_directory(base: Path = _BASE) -> Path:
    """Return the directory of this user; create it if it does not exist.

    Raises:
        ClusterError: the path is not a directory that only this user can enter. Otherwise files of another user there
            would be trusted.
    """
    path = base / f"sparklog-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ClusterError(
            f"{path} must be a directory of user {os.geteuid()} with mode 0700;"
            f" found owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"
        )
    return path
