"""The interface between storage and the operating system, with every raw file operation of ``sparklog.storage``.

``RealDisk`` is the machine's file system. ``sparklog.testing.sim_disk.SimDisk`` is a disk in memory. A test can make it
write only part of a buffer, fill up, fail, or lose its page cache. One contract test runs on both.

All calls are synchronous and raise ``OSError``. Writes may be short, like write(2): use ``write_all``. Handles are
integers. Any thread may use them, one call at a time for each byte range.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview

#: The maximum number of buffers of one writev. Source: Linux IOV_MAX.
_MAX_BUFFERS = 1024

#: The bytes of one request to read ahead. The kernel limits each request to the disk's read-ahead setting, which is
#: this size by default. Source: Linux force_page_cache_ra, VM_READAHEAD_PAGES.
_READ_AHEAD_BYTES = 128 * 1024

#: Modes of new files and directories. Only the broker's user may read records. A user who may open a lock file could
#: also hold the lock.
PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700
#: Modes of new files and directories in a directory that a group may read (``group_access``). The kernel adds the
#: set-group-id bit of the parent to a directory.
_GROUP_FILE = 0o640
_GROUP_DIRECTORY = 0o750

#: Source: fallocate(2), FALLOC_FL_KEEP_SIZE.
_KEEP_SIZE = 1

#: File systems whose syncfs reports failed writes: ext2 to ext4, XFS, btrfs, F2FS, tmpfs. On overlayfs, for example,
#: syncfs does not report a failure of the lower file system. Source: statfs(2), syncfs(2).
_TELLING_FILE_SYSTEMS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})
#: More than the size of struct statfs on any platform.
_STATFS_BYTES = 512


class Disk(Protocol):
    """The interface to one file system. Implementations cache nothing.

    Paths are absolute, or relative to the process's working directory.
    """

    #: Called when a ``sync`` method fails, in the same thread, before the method raises. The kernel reports a failed
    #: write only once. Then it counts the pages as written, although they may exist only in its page cache.
    on_sync_failed: Callable[[OSError], None]

    def open(self, path: Path, *, create: bool = False) -> int:
        """Open a file for reading and writing, and return its handle.

        With ``create`` a missing file is created, and only its owner may open it. An existing file keeps its content.
        """

    def close(self, handle: int) -> None: ...

    def write(self, handle: int, buffers: Sequence[Buffer], at: int) -> int:
        """Write the buffers one after the other from file position ``at`` on.

        Return how many bytes were written, which may be fewer than all.
        """

    def read(self, handle: int, length: int, at: int) -> bytes:
        """Read ``length`` bytes from file position ``at`` on, or fewer at the end of the file."""

    def map(self, handle: int, length: int) -> memoryview:
        """Map the first ``length`` bytes of the file into memory, and return a read-only view of them.

        The view stays valid as long as it is referenced, even if the file is closed.
        """

    def size(self, handle: int) -> int: ...

    def truncate(self, handle: int, length: int) -> None:
        """Set the file's size to ``length`` bytes. This also frees disk space that was reserved after the new end."""

    def reserve(self, handle: int, length: int, at: int) -> None:
        """Reserve disk space for ``length`` bytes from file position ``at``, which must be the file's end.

        The file's size does not change.

        Raises OSError if the file system cannot reserve space or has too little space. In that case a part of the space
        may be reserved.
        """

    def sync(self, handle: int) -> None: ...

    def drop_cached(self, handle: int) -> None:
        """Drop the file's pages from the page cache, so that the next ``read`` or ``map`` reads from the disk.

        Bytes that are written but not synced may stay in the cache.
        """

    def sync_directory(self, path: Path) -> None: ...

    def can_sync_file_system(self, handle: int) -> bool:
        """Return whether ``sync_file_system`` can sync the file system of ``handle`` and reports failed writes."""

    def sync_file_system(self, handle: int) -> None:
        """Make all earlier writes of all processes to the file system of ``handle`` durable.

        This includes the content and the names of files. Raises OSError if the sync fails, or if a write has failed
        since the handle was opened, even if another caller already received that failure.
        """

    def copy(self, source: Path, target: Path, length: int, *, start: int = 0) -> None:
        """Copy the first ``length`` bytes of ``source`` to the new file ``target``.

        ``start`` above 0 means that ``target`` exists and already has the first ``start`` bytes.
        """

    def names(self, path: Path) -> list[str]:
        """Return the sorted names in a directory. Raises FileNotFoundError if it does not exist."""

    def exists(self, path: Path) -> bool: ...

    def make_directory(self, path: Path) -> None:
        """Create the directory and its parents, if they are absent. Only the owner has rights on a new directory."""

    def make_private(self, path: Path, *, tree: bool = False) -> bool:
        """Remove all rights of other users on a file or directory.

        Return whether other users had rights on ``path``. With ``tree`` the rights on everything below the directory
        are removed too, except on files and directories of another user. Raises PermissionError if ``path`` itself
        belongs to another user.
        """

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or directory atomically. A file at ``target`` is replaced."""

    def remove(self, path: Path) -> None: ...

    def remove_tree(self, path: Path) -> None: ...

    def lock(self, path: Path) -> int | None:
        """Lock a file exclusively, and create the file if it is absent.

        Return a handle; closing it frees the lock. Return None if another process holds the lock.
        """


def read_ahead(view: Buffer, position: int, length: int) -> None:
    """Ask the kernel to read ``length`` bytes from ``position`` into the page cache, without waiting for them.

    The kernel may read less, and a full disk queue may block the call. Errors are ignored: the bytes are read later
    anyway, when they are used.

    ``view`` is the result of ``Disk.map``, or a part of it. For any other buffer the function does nothing, because the
    bytes are already in memory.
    """
    mapping = view.obj if isinstance(view, memoryview) else None
    if isinstance(mapping, mmap.mmap) and length:
        end = position + length
        with contextlib.suppress(OSError):
            for at in range(position - position % mmap.PAGESIZE, end, _READ_AHEAD_BYTES):
                mapping.madvise(mmap.MADV_WILLNEED, at, min(_READ_AHEAD_BYTES, end - at))


class RealDisk:
    """The implementation of ``Disk`` that uses the machine's file system.

    With ``for_group`` the group of a directory may read the files in it, except lock files.
    """

    def __init__(self, *, for_group: bool = False) -> None:
        self.on_sync_failed: Callable[[OSError], None] = lambda _: None
        self._file_mode = _GROUP_FILE if for_group else PRIVATE_FILE
        self._directory_mode = _GROUP_DIRECTORY if for_group else PRIVATE_DIRECTORY

    def open(self, path: Path, *, create: bool = False) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), self._file_mode)

    def close(self, handle: int) -> None:
        os.close(handle)

    def write(self, handle: int, buffers: Sequence[Buffer], at: int) -> int:
        return os.pwritev(handle, buffers, at)

    def read(self, handle: int, length: int, at: int) -> bytes:
        found = os.pread(handle, length, at)
        if len(found) == length or not found:
            return found
        parts = [found]
        missing = length - len(found)
        while missing and (found := os.pread(handle, missing, at + length - missing)):
            parts.append(found)
            missing -= len(found)
        return b"".join(parts)

    def map(self, handle: int, length: int) -> memoryview:
        return memoryview(mmap.mmap(handle, length, access=mmap.ACCESS_READ)) if length else memoryview(b"")

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def truncate(self, handle: int, length: int) -> None:
        os.ftruncate(handle, length)

    def reserve(self, handle: int, length: int, at: int) -> None:
        call = _fallocate()
        if call is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if call(handle, _KEEP_SIZE, at, length):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def sync(self, handle: int) -> None:
        try:
            os.fsync(handle)
        except OSError as failure:
            self.on_sync_failed(failure)
            raise

    def drop_cached(self, handle: int) -> None:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync_directory(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(handle)
        finally:
            os.close(handle)

    def can_sync_file_system(self, handle: int) -> bool:
        return _syncfs() is not None and _kind_of_file_system(handle) in _TELLING_FILE_SYSTEMS

    def sync_file_system(self, handle: int) -> None:
        sync = _syncfs()
        assert sync is not None, "call can_sync_file_system first"
        if sync(handle):
            number = ctypes.get_errno()
            failure = OSError(number, os.strerror(number))
            self.on_sync_failed(failure)
            raise failure

    def copy(self, source: Path, target: Path, length: int, *, start: int = 0) -> None:
        writing = os.O_WRONLY | os.O_CLOEXEC | (0 if start else os.O_CREAT | os.O_TRUNC)
        with source.open("rb") as reader, os.fdopen(os.open(target, writing, self._file_mode), "wb", 0) as writer:
            done = writer.seek(start)
            while done < length:
                moved = os.sendfile(writer.fileno(), reader.fileno(), done, length - done)
                if not moved:
                    raise OSError(errno.EIO, f"{done} bytes found, {length} expected", str(source))
                done += moved

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))  # noqa: PTH208 - names are wanted, not a Path for each of them

    def exists(self, path: Path) -> bool:
        return path.exists()

    def make_directory(self, path: Path) -> None:
        path.mkdir(self._directory_mode, parents=True, exist_ok=True)

    def make_private(self, path: Path, *, tree: bool = False) -> bool:
        taken = _take_rights(path)
        if tree:
            for folder, directories, files in os.walk(path):
                for name in (*directories, *files):
                    with contextlib.suppress(PermissionError, FileNotFoundError):
                        _take_rights(Path(folder, name), follow=False)
        return taken

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def lock(self, path: Path) -> int | None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failure:
            os.close(handle)
            if failure.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        return handle


def private_opener(path: str, flags: int) -> int:
    """Open a file, and remove other users' rights on it. This is an ``opener`` for Python's ``open``."""
    handle = os.open(path, flags, PRIVATE_FILE)
    with contextlib.suppress(PermissionError):  # the file belongs to another user, who allows this one to write
        os.fchmod(handle, PRIVATE_FILE)
    return handle


def _take_rights(path: Path, *, follow: bool = True) -> bool:
    """Remove other users' rights on one file or directory. Return whether they had some.

    Without ``follow`` symbolic links are skipped.
    """
    mode = path.stat(follow_symlinks=follow).st_mode
    if stat.S_ISLNK(mode) or not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return False
    path.chmod(PRIVATE_DIRECTORY if stat.S_ISDIR(mode) else PRIVATE_FILE)
    return True


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """Return the system call fallocate, or None outside Linux.

    Unlike ``posix_fallocate``, it can keep the file's size. It also writes nothing if the file system cannot reserve
    space.
    """
    if sys.platform != "linux":
        return None
    found: Any = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call: Callable[[int, int, int, int], int] | None = found
    return call


@cache
def _syncfs() -> Callable[[int], int] | None:
    """Return the system call syncfs if it reports failed writes. Source: syncfs(2), since Linux 5.8."""
    system = os.uname()
    version = re.match(r"(\d+)\.(\d+)", system.release)
    if system.sysname != "Linux" or version is None or tuple(map(int, version.groups())) < (5, 8):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    return found


def _kind_of_file_system(handle: int) -> int:
    """Return the number of the file system's type, or -1 if it is unknown.

    Source: statfs(2), the first field, f_type.
    """
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None, use_errno=True).fstatfs(handle, buffer):
        return -1
    return int.from_bytes(buffer.raw[:4], sys.byteorder)


def is_full(failure: OSError) -> bool:
    """Return whether the failure means only that there is no room: on the disk, in the user's quota or in the file.

    Then the log stays usable, and a later append may succeed.
    """
    return failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_all(disk: Disk, handle: int, buffers: Sequence[Buffer], at: int) -> int:
    """Write all buffers from file position ``at`` on, and return the number of bytes written.

    After a short write, the rest is written with another call. If the disk becomes full, this raises OSError, but a
    part may have been written. The caller then truncates the file to its old size.
    """
    expected = sum(map(len, buffers))
    written = disk.write(handle, buffers[:_MAX_BUFFERS], at)
    if written == expected:
        return written
    left = [memoryview(buffer) for buffer in buffers if len(buffer)]
    progress = written
    while True:
        while left and progress >= len(left[0]):
            progress -= len(left.pop(0))
        if not left:
            return expected
        if progress:
            left[0] = left[0][progress:]
        progress = disk.write(handle, left[:_MAX_BUFFERS], at + written)
        if progress <= 0:
            raise OSError(errno.EIO, f"a write of {expected} bytes stopped after {written}")
        written += progress


def write_one(disk: Disk, handle: int, buffer: Buffer, at: int) -> None:
    """Write a whole single buffer at file position ``at``. Raises the same errors as ``write_all``."""
    if disk.write(handle, (buffer,), at) != len(buffer):
        write_all(disk, handle, (buffer,), at)  # this writes the bytes of the short write again


def read_file(disk: Disk, path: Path) -> bytes:
    """Return the whole file. Raises FileNotFoundError if it does not exist."""
    handle = disk.open(path)
    try:
        return disk.read(handle, disk.size(handle), 0)
    finally:
        disk.close(handle)


def sync_file(disk: Disk, path: Path) -> None:
    """Open an existing file, fsync it, and close it."""
    handle = disk.open(path)
    try:
        disk.sync(handle)
    finally:
        disk.close(handle)


def replace_file(disk: Disk, path: Path, content: bytes, *, sync: bool = True) -> None:
    """Replace the file ``path``, so that a crash leaves either the old content or the new one, never a mixture.

    With ``sync`` the file is durable on return. Without ``sync`` it survives a crash of the process, but perhaps not of
    the machine.
    """
    fresh = path.with_name(path.name + ".tmp")
    handle = disk.open(fresh, create=True)
    try:
        # When an emptied file is closed, ext4 writes it to disk, even if it was empty before. So do not truncate then.
        if disk.size(handle):
            disk.truncate(handle, 0)
        write_all(disk, handle, [content], 0)
        if sync:
            disk.sync(handle)
    finally:
        disk.close(handle)
    disk.rename(fresh, path)
    if sync:
        disk.sync_directory(path.parent)
