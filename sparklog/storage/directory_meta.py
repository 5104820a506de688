"""Whose log directory this is: ``meta.json``, the locks on it, and how a supervisor claims one.

A log directory is one broker slot: cluster id, broker id and port belong to it, not to a process. Two locks keep it to
one owner each: ``broker.lock`` is held by the broker process that writes in it, ``supervisor.lock`` by the barrier task
that watches over that broker. They are apart because a broker outlives its supervisor and is adopted by the next one.

The directory is for the user that its broker runs as: modes 0700 and 0600. Any user who may open a lock file may hold
the lock, even one who may only read it. A directory of an earlier release, which had 0755 and 0644, loses the other
rights when it is claimed or opened.
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

#: File systems whose locks may lapse without a word.
_REFUSED_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse")

logger = logging.getLogger(__name__)


class DirectoryMeta(msgspec.Struct, frozen=True):
    """``port`` is the one its broker listens on, 0 until it has chosen one."""

    cluster_id: str
    broker_id: int
    port: int = 0
    version: int = 1


class Claim:
    """A log directory this process supervises, until ``release`` or the end of the process."""

    def __init__(self, path: Path, *, disk: Disk, handle: int, meta: DirectoryMeta | None) -> None:
        self.path = path
        #: None for a new directory: it gets a broker id, then ``write_meta``
        self.meta = meta
        self._disk = disk
        self._handle = handle

    def __repr__(self) -> str:
        return f"Claim({str(self.path)!r}, {self.meta})"

    @property
    def broker_running(self) -> bool:
        """Whether a broker process has this directory open: to be adopted, not started."""
        return is_locked(self._disk, self.path / BROKER_LOCK)

    def write_meta(self, meta: DirectoryMeta) -> None:
        """Give a new directory its broker, or a broker its port. Durable on return."""
        try:
            write_meta(self._disk, self.path, meta)
        except OSError as failure:
            raise _unusable(self.path, failure) from failure
        self.meta = meta

    def release(self) -> None:
        if self._handle >= 0:
            self._disk.close(self._handle)
            self._handle = -1


def claim_directory(log_dirs: Sequence[Path], *, cluster_id: str, disk: Disk | None = None) -> Claim | None:
    """Claim a directory of ``log_dirs`` that no supervisor has; one with a broker id first, then a new one.

    Made if absent. None when all are claimed.

    Raises:
        StorageError: a directory belongs to another cluster, is of a newer format, on NFS or FUSE, or not writable.
    """
    disk = disk or RealDisk()
    new: Claim | None = None
    for path in log_dirs:
        claim = _try_claim(disk, path, cluster_id=cluster_id)
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


def _try_claim(disk: Disk, path: Path, *, cluster_id: str) -> Claim | None:
    refuse_remote(path)
    try:
        disk.make_directory(path)
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
    """The directory's meta.json, None when it is new.

    Raises:
        StorageError: it names another cluster, is damaged or of a newer format.
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


def lock_for_broker(disk: Disk, path: Path) -> int:
    """Take the broker's lock; closing the handle frees it. Then take what rights other users have in the directory.

    Raises:
        StorageError: another process has it, or the directory cannot be written.
    """
    refuse_remote(path)
    try:
        disk.make_directory(path)
        _make_private(disk, path)
        handle = disk.lock(path / BROKER_LOCK)
        if handle is not None:
            _make_content_private(disk, path)
    except OSError as failure:
        raise _unusable(path, failure) from failure
    if handle is None:
        raise StorageError(f"log directory {path} is in use by another broker process")
    return handle


def _make_private(disk: Disk, path: Path) -> None:
    """Close the directory to other users."""
    try:
        if disk.make_private(path):
            logger.warning("%s: other users had rights on this log directory: its mode is 0700 from now on", path)
    except PermissionError:
        logger.warning(
            "%s: this log directory belongs to another user, and its mode lets more users in than the broker's: "
            "give it to the broker's user, with mode 0700",
            path,
        )


def _make_content_private(disk: Disk, path: Path) -> None:
    """Take from other users what rights they have on files of an earlier release. There may be 100,000 files: they are
    looked at only where the lock file shows that such a release made it."""
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
    """Raises StorageError when ``path`` lies on NFS, CIFS or FUSE, going by the process's mount table."""
    file_system = file_system_of(path, mounts if mounts is not None else _read_mounts())
    if file_system in _REFUSED_FILE_SYSTEMS or file_system.startswith("fuse."):
        raise StorageError(
            f"log directory {path} is on {file_system}, whose locks may lapse: a local file system is expected"
        )


def file_system_of(path: Path, mounts: str) -> str:
    """Type of the file system ``path`` is on; "" when the table does not say. Source: proc_pid_mountinfo(5)."""
    target = path.resolve()
    best, found = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if "-" not in fields or len(fields) < 7:
            continue
        mount_point = Path(fields[4].replace("\\040", " "))
        depth = len(mount_point.parts)
        # of two mounts on one point the later one counts
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
