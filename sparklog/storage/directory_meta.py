"""The ownership of a log directory: ``meta.json``, the locks, and how a supervisor claims a directory.

A log directory is one broker slot: cluster id, broker id and port belong to the directory, not to a process. The broker
process that writes to the directory holds ``broker.lock``. The barrier task that supervises this broker holds
``supervisor.lock``. The locks are separate because a broker may run longer than its supervisor. The next supervisor
then adopts the running broker: it watches that process and starts no new one.

Only the broker's user has rights on the directory: modes 0700 and 0600. A user who may open a lock file, even for
reading only, may also hold the lock. An earlier release used 0755 and 0644. When such a directory is claimed or opened,
the other users' rights are removed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparklog.errors import StorageError
from sparklog.storage.disk import Disk, RealDisk, read_file, replace_file
from sparklog.storage.formats import decode_state, encode_state

META_FILE = "meta.json"
BROKER_LOCK = "broker.lock"
SUPERVISOR_LOCK = "supervisor.lock"

#: File systems that may lose locks silently.
_REFUSED_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse")

logger = logging.getLogger(__name__)


class DirectoryMeta(msgspec.Struct, frozen=True):
    """The content of ``meta.json``: the cluster and the broker that a log directory belongs to.

    ``port`` is the broker's port, or 0 until the broker has chosen one. ``kafka_ports`` has the last port of each
    listener for Kafka clients, by listener name.
    """

    cluster_id: str
    broker_id: int
    port: int = 0
    version: int = 1
    kafka_ports: dict[str, int] = {}


class Claim:
    """The exclusive right of a supervisor process to run a broker on one log directory.

    The right ends with ``release`` or with the process.
    """

    def __init__(self, path: Path, *, disk: Disk, handle: int, meta: DirectoryMeta | None) -> None:
        self.path = path
        #: None for a new directory, until ``write_meta`` is called with the directory's broker id.
        self.meta = meta
        self._disk = disk
        self._handle = handle

    def __repr__(self) -> str:
        return f"Claim({str(self.path)!r}, {self.meta})"

    @property
    def broker_running(self) -> bool:
        """Return whether a broker process has this directory open.

        Then the supervisor watches it and starts no new broker.
        """
        return is_locked(self._disk, self.path / BROKER_LOCK)

    def write_meta(self, meta: DirectoryMeta) -> None:
        """Write ``meta.json``, for example with a new broker id or port. The file is durable on return."""
        try:
            write_meta(self._disk, self.path, meta)
        except OSError as failure:
            raise _unusable(self.path, failure) from failure
        self.meta = meta

    def release(self) -> None:
        if self._handle >= 0:
            self._disk.close(self._handle)
            self._handle = -1


def claim_directory(
    log_dirs: Sequence[Path], *, cluster_id: str, disk: Disk | None = None, for_group: bool = False
) -> Claim | None:
    """Claim one of ``log_dirs`` that no supervisor has claimed. Prefer a directory that already has a broker id.

    Create the directories that do not exist. Return None if other supervisors have claimed all directories. With
    ``for_group`` the broker, and not its supervisor, sets the rights of other users (``log.dir.group``).

    Raises:
        StorageError: a directory belongs to another cluster, has a newer format, is on NFS or FUSE, or is not writable.
    """
    disk = disk or RealDisk()
    new: Claim | None = None
    for path in log_dirs:
        claim = _try_claim(disk, path, cluster_id=cluster_id, for_group=for_group)
        if claim is None:
            continue
        if claim.meta is not None:
            if new is not None:
                new.release()
            return claim
        if new is None:
            new = claim
        else:
            claim.release()
    return new


def _try_claim(disk: Disk, path: Path, *, cluster_id: str, for_group: bool) -> Claim | None:
    refuse_remote(path)
    try:
        disk.make_directory(path)
        if not for_group:
            _make_private(disk, path)
        handle = disk.lock(path / SUPERVISOR_LOCK)
    except OSError as failure:
        raise _unusable(path, failure) from failure
    if handle is None:
        return None
    try:
        return Claim(path, disk=disk, handle=handle, meta=read_meta(disk, path, cluster_id=cluster_id))
    except StorageError:
        disk.close(handle)
        raise


def read_meta(disk: Disk, path: Path, *, cluster_id: str) -> DirectoryMeta | None:
    """Return the content of the directory's ``meta.json``, or None if the directory is new.

    Raises:
        StorageError: the file names another cluster, is damaged, or has a newer format.
    """
    file = path / META_FILE
    try:
        meta = decode_state(read_file(disk, file), DirectoryMeta, path=file)
    except FileNotFoundError:
        return None
    except OSError as failure:
        raise _unusable(path, failure) from failure
    if meta.cluster_id != cluster_id:
        raise StorageError(
            f"log directory {path} belongs to cluster {meta.cluster_id!r}, this is cluster {cluster_id!r}: "
            "choose another directory, or the ZooKeeper of that cluster"
        )
    return meta


def write_meta(disk: Disk, path: Path, meta: DirectoryMeta) -> None:
    replace_file(disk, path / META_FILE, encode_state(meta))


def lock_for_broker(disk: Disk, path: Path, *, for_group: bool = False) -> int:
    """Lock the directory for this broker process, remove other users' rights on it, and return the lock's handle.

    Closing the handle frees the lock. With ``for_group`` the caller sets the rights (``group_access``).

    Raises:
        StorageError: another process has the lock, or the directory is on NFS, CIFS or FUSE, or is not writable.
    """
    refuse_remote(path)
    try:
        disk.make_directory(path)
        if not for_group:
            _make_private(disk, path)
        handle = disk.lock(path / BROKER_LOCK)
        if handle is not None and not for_group:
            _make_content_private(disk, path)
    except OSError as failure:
        raise _unusable(path, failure) from failure
    if handle is None:
        raise StorageError(f"log directory {path} is in use by another broker process")
    return handle


def _make_private(disk: Disk, path: Path) -> None:
    """Remove other users' rights on the directory."""
    try:
        if disk.make_private(path):
            logger.warning("%s: other users had rights on this log directory: its mode is 0700 from now on", path)
    except PermissionError:
        logger.warning(
            "%s: this log directory belongs to another user, and its mode gives rights to other users than the "
            "broker's: give it to the broker's user, with mode 0700",
            path,
        )


def _make_content_private(disk: Disk, path: Path) -> None:
    """Remove other users' rights on the files of an earlier release.

    There may be 100,000 files, so this checks them only if the mode of the lock file shows that such a release made it.
    """
    with contextlib.suppress(PermissionError):
        if disk.make_private(path / BROKER_LOCK):
            disk.make_private(path, tree=True)


def is_locked(disk: Disk, path: Path) -> bool:
    if not disk.exists(path):
        return False
    handle = disk.lock(path)
    if handle is not None:
        disk.close(handle)
    return handle is None


def refuse_remote(path: Path, *, mounts: str | None = None) -> None:
    """Raise StorageError if ``path`` is on NFS, CIFS or FUSE, according to the process's mount table."""
    file_system = file_system_of(path, mounts if mounts is not None else _read_mounts())
    if file_system in _REFUSED_FILE_SYSTEMS or file_system.startswith("fuse."):
        raise StorageError(
            f"log directory {path} is on {file_system}, whose locks may expire: expected a local file system"
        )


def file_system_of(path: Path, mounts: str) -> str:
    """Return the type of the file system of ``path``, for example ``ext4``, or "" if the type is unknown.

    ``mounts`` has the format of ``/proc/self/mountinfo``. Source: proc_pid_mountinfo(5).
    """
    target = path.resolve()
    best, found = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if "-" not in fields or len(fields) < 7:
            continue
        mount_point = Path(fields[4].replace("\\040", " "))
        depth = len(mount_point.parts)
        # If two file systems are mounted at one path, the later one is visible.
        if depth >= best and target.is_relative_to(mount_point):
            best, found = depth, fields[fields.index("-") + 1]
    return found


def _read_mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError as failure:
        logger.warning("the mount table cannot be read (%s): NFS and FUSE are not recognised", failure)
        return ""


def _unusable(path: Path, failure: OSError) -> StorageError:
    return StorageError(f"log directory {path} cannot be used: {failure.strerror or failure}")
