"""The seam between storage and the operating system: every raw file operation of ``sparklog.storage`` is here.

``RealDisk`` is the machine's file system. ``sparklog.testing.sim_disk.SimDisk`` is a disk in memory that tears writes,
fills up, fails and loses its page cache on demand; one contract test runs on both.

All calls are synchronous and raise ``OSError``. Writes may be short, as write(2) may: use ``write_all``. Handles are
integers and may be used from any thread, one call at a time for each byte range.
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

#: Buffers a single writev takes. Source: Linux IOV_MAX.
_MAX_BUFFERS = 1024

#: How much the kernel is asked to read ahead at a time: of more at a time it reads no more than the disk's own
#: read-ahead, which is so much unless somebody has set it. Source: Linux force_page_cache_ra, VM_READAHEAD_PAGES.
_READ_AHEAD_BYTES = 128 * 1024

#: Modes of what is made here: records are for the user that the broker runs as, and a lock file that another user may
#: open is a lock that another user may hold.
PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700

#: Source: fallocate(2), FALLOC_FL_KEEP_SIZE.
_KEEP_SIZE = 1

#: ext2 to ext4, XFS, btrfs, F2FS, tmpfs. Not overlayfs, for one: of a write that fails below it syncfs does not tell.
#: Source: statfs(2), syncfs(2).
_TELLING_FILE_SYSTEMS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})
#: More than a struct statfs has anywhere.
_STATFS_BYTES = 512


class Disk(Protocol):
    """One file system. Paths are absolute or relative to the process; nothing here caches."""

    #: Called, in the thread at work, when one of the ``sync`` methods is about to raise what the disk told. The kernel
    #: tells it once: the pages count as written from then on, though they may be nowhere but in its cache.
    on_sync_failed: Callable[[OSError], None]

    def open(self, path: Path, *, create: bool = False) -> int:
        """Open for reading and writing; with ``create`` an absent file is made, for its owner alone, and a present one
        is not emptied."""

    def close(self, handle: int) -> None: ...

    def write(self, handle: int, buffers: Sequence[Buffer], at: int) -> int:
        """Write the buffers back to back from file position ``at``; return the bytes written, maybe fewer."""

    def read(self, handle: int, length: int, at: int) -> bytes:
        """Read up to ``length`` bytes; fewer only at the end of the file."""

    def map(self, handle: int, length: int) -> memoryview:
        """A read-only view of the first ``length`` bytes, valid as long as it is referenced."""

    def size(self, handle: int) -> int: ...

    def truncate(self, handle: int, length: int) -> None:
        """Also frees what is reserved behind that."""

    def reserve(self, handle: int, length: int, at: int) -> None:
        """Have room on the disk for ``length`` bytes from file position ``at`` on, where the file ends; its size stays
        as it is. Raises OSError where the file system cannot do that, or has less room: of which it may have taken a
        part."""

    def sync(self, handle: int) -> None: ...

    def drop_cached(self, handle: int) -> None:
        """Have the next read of the file, and the next map, come from the disk: what was written and not synced yet may
        still come from the cache."""

    def sync_directory(self, path: Path) -> None: ...

    def can_sync_file_system(self, handle: int) -> bool:
        """Whether ``sync_file_system`` is to be had there, and tells of its failures."""

    def sync_file_system(self, handle: int) -> None:
        """Make durable all that was written to the file system of ``handle``, content and names, by whomever. Fails
        also when a write has failed at any time since the handle was made, whoever else was told of that."""

    def copy(self, source: Path, target: Path, length: int, *, start: int = 0) -> None:
        """Make ``target`` a new file with the first ``length`` bytes of ``source``; above 0, ``start`` is how many of
        them are in it already."""

    def names(self, path: Path) -> list[str]:
        """Names in a directory, sorted; FileNotFoundError when it does not exist."""

    def exists(self, path: Path) -> bool: ...

    def make_directory(self, path: Path) -> None:
        """Make the directory, for its owner alone, and its parents; a present one is fine."""

    def make_private(self, path: Path, *, tree: bool = False) -> bool:
        """Take all rights on a file or directory from other users than its owner; return whether any had some. With
        ``tree`` the same is done to everything below the directory, except to what belongs to another user. Raises
        PermissionError when ``path`` itself belongs to another user."""

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; replaces a file at ``target``."""

    def remove(self, path: Path) -> None: ...

    def remove_tree(self, path: Path) -> None: ...

    def lock(self, path: Path) -> int | None:
        """Take an exclusive lock on a file, made if need be; None when another holds it. Closing the handle frees."""


def read_ahead(view: Buffer, position: int, length: int) -> None:
    """Ask the kernel to read ``length`` bytes of a file from ``position`` on into the page cache, without waiting for
    the bytes. It may read less, and a full queue of the disk may be waited for. Advice fails nobody: what is not read
    ahead is read when it is used.

    ``view``: what ``Disk.map`` gave, or a part of it; anything else is in memory already.
    """
    mapping = view.obj if isinstance(view, memoryview) else None
    if isinstance(mapping, mmap.mmap) and length:
        end = position + length
        with contextlib.suppress(OSError):
            for at in range(position - position % mmap.PAGESIZE, end, _READ_AHEAD_BYTES):
                mapping.madvise(mmap.MADV_WILLNEED, at, min(_READ_AHEAD_BYTES, end - at))


class RealDisk:
    """The machine's file system."""

    def __init__(self) -> None:
        self.on_sync_failed: Callable[[OSError], None] = lambda _: None

    def open(self, path: Path, *, create: bool = False) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), PRIVATE_FILE)

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
        assert sync is not None, "can_sync_file_system says so"
        if sync(handle):
            number = ctypes.get_errno()
            failure = OSError(number, os.strerror(number))
            self.on_sync_failed(failure)
            raise failure

    def copy(self, source: Path, target: Path, length: int, *, start: int = 0) -> None:
        writing = os.O_WRONLY | os.O_CLOEXEC | (0 if start else os.O_CREAT | os.O_TRUNC)
        with source.open("rb") as reader, os.fdopen(os.open(target, writing, PRIVATE_FILE), "wb", 0) as writer:
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
        path.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)

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
    """Open a file that its owner alone may read: an ``opener`` for ``open``. An existing file loses other users'
    rights."""
    handle = os.open(path, flags, PRIVATE_FILE)
    with contextlib.suppress(PermissionError):  # it belongs to another user, who lets this one write
        os.fchmod(handle, PRIVATE_FILE)
    return handle


def _take_rights(path: Path, *, follow: bool = True) -> bool:
    """See ``Disk.make_private``, of one file or directory. Without ``follow`` a symbolic link is left as it is."""
    mode = path.stat(follow_symlinks=follow).st_mode
    if stat.S_ISLNK(mode) or not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return False
    path.chmod(PRIVATE_DIRECTORY if stat.S_ISDIR(mode) else PRIVATE_FILE)
    return True


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """The system call: unlike ``posix_fallocate`` it can leave a file's size alone, and writes nothing where the file
    system cannot reserve. Linux' alone."""
    if sys.platform != "linux":
        return None
    found: Any = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call: Callable[[int, int, int, int], int] | None = found
    return call


@cache
def _syncfs() -> Callable[[int], int] | None:
    """The system call, where it says whether a write has failed. Source: syncfs(2), since Linux 5.8."""
    system = os.uname()
    version = re.match(r"(\d+)\.(\d+)", system.release)
    if system.sysname != "Linux" or version is None or tuple(map(int, version.groups())) < (5, 8):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    return found


def _kind_of_file_system(handle: int) -> int:
    """Its number. Source: statfs(2), the field f_type, the first; -1 when it is not to be had."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None, use_errno=True).fstatfs(handle, buffer):
        return -1
    return int.from_bytes(buffer.raw[:4], sys.byteorder)


def is_full(failure: OSError) -> bool:
    """Whether the disk, or what this process may have of it, merely lacks room: the log stays usable, and a later
    append may succeed."""
    return failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_all(disk: Disk, handle: int, buffers: Sequence[Buffer], at: int) -> int:
    """Write all the buffers from ``at`` on, whatever short writes there are; return the bytes written.

    A full disk first writes short and then fails: the caller cuts the file back to what it was.
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
    """As ``write_all``, of one buffer."""
    if disk.write(handle, (buffer,), at) != len(buffer):
        write_all(disk, handle, (buffer,), at)  # what is written already is written again


def read_file(disk: Disk, path: Path) -> bytes:
    """The whole file; FileNotFoundError when it does not exist."""
    handle = disk.open(path)
    try:
        return disk.read(handle, disk.size(handle), 0)
    finally:
        disk.close(handle)


def sync_file(disk: Disk, path: Path) -> None:
    """fsync a file that is there, whoever has it open."""
    handle = disk.open(path)
    try:
        disk.sync(handle)
    finally:
        disk.close(handle)


def replace_file(disk: Disk, path: Path, content: bytes, *, sync: bool = True) -> None:
    """Put ``content`` at ``path`` so that a crash leaves the old file or the new one, never a mixture.

    With ``sync`` it is durable on return. Without, it survives a crash of the process, not of the machine.
    """
    fresh = path.with_name(path.name + ".tmp")
    handle = disk.open(fresh, create=True)
    try:
        if disk.size(handle):  # ext4 writes out a file that was emptied as soon as it is closed, a new one as well
            disk.truncate(handle, 0)
        write_all(disk, handle, [content], 0)
        if sync:
            disk.sync(handle)
    finally:
        disk.close(handle)
    disk.rename(fresh, path)
    if sync:
        disk.sync_directory(path.parent)
