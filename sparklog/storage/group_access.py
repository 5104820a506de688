"""Read access of one group of users to a log directory (``log.dir.group``), for programs that back up or ship files.

The directories have mode 2750 and the files 0640. The kernel gives new files and directories the group of their
directory, because of its set-group-id bit. The lock files stay closed, because a user who may open such a file could
hold the lock. The files ``broker.log``, ``broker.out`` and ``audit.log`` also stay closed, because they contain
names of clients and topics of all users.
"""

from __future__ import annotations

import contextlib
import grp
import os
import stat
from pathlib import Path

from sparklog.errors import ConfigError, StorageError
from sparklog.storage.directory_meta import BROKER_LOCK, SUPERVISOR_LOCK

_DIRECTORY = stat.S_ISGID | 0o750
_FILE = 0o640
#: The beginnings of the names of files that the group cannot read.
_CLOSED = (BROKER_LOCK, SUPERVISOR_LOCK, "broker.log", "broker.out", "audit.log")


def group_id(name: str) -> int:
    """Return the id of a group on this host.

    Raises:
        ConfigError: there is no such group.
    """
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"log.dir.group={name}: this host has no such group") from None


def share_with_group(path: Path, group: int) -> None:
    """Let the members of ``group`` read the log directory, but not change it. Other users get no rights.

    Do nothing if an earlier call has completed. The caller holds the lock of the broker.

    Raises:
        StorageError: the broker's user is not a member of the group, or does not own the directory.
    """
    found = path.stat()
    if found.st_gid == group and stat.S_IMODE(found.st_mode) == _DIRECTORY:
        return
    try:
        for folder, directories, files in os.walk(path):
            for name in directories:
                _share(Path(folder, name), group, _DIRECTORY)
            for name in files:
                if not name.startswith(_CLOSED):
                    _share(Path(folder, name), group, _FILE)
        _share(path, group, _DIRECTORY)  # The last one, so that the next start repeats an interrupted call.
    except PermissionError as error:
        raise StorageError(
            f"log.dir.group: {error.filename}: {error.strerror}; user {os.geteuid()} must own the log directory {path}"
            f" and be a member of group {group}"
        ) from None


def _share(path: Path, group: int, mode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink():
            return
        os.chown(path, -1, group)
        path.chmod(mode)
