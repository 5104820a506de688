"""The directory of a user on a host, for sockets and small files. Only this user can enter it.

The directory is in /tmp and not in TMPDIR, because cluster managers set TMPDIR to a directory that they delete with the
container.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from sparklog.errors import ClusterError

_BASE = Path("/tmp")
#: The prefix of the directories' names.
PREFIX = "sparklog-"


def user_directory(base: Path = _BASE) -> Path:
    """Return the directory of this user on this host. Create it if it does not exist.

    Raises:
        ClusterError: the path is not a directory that only this user can enter, so its files may be another user's.
    """
    return private_directory(base / f"{PREFIX}{os.geteuid()}")


def private_directory(path: Path) -> Path:
    """Return ``path`` as a directory of this user. Create it if it does not exist.

    Raises:
        ClusterError: the path is not a directory that only this user can enter, so its files may be another user's.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ClusterError(
            f"{path} must be a directory of user {os.geteuid()} with mode 0700;"
            f" found owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"
        )
    return path
