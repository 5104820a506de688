"""A disk in memory with the faults of real disks, which tests request or a seed chooses.

It implements ``sparklog.storage.disk.Disk``; ``tests/storage/test_disk.py`` runs the same tests on both
implementations. Faults: a full disk (a short write or a part of a copy, then ENOSPC), a read-only disk, and a failing
operation. The process or the machine can also die between any two operations or inside a write (``die_after``,
``restart``). The writes of a failed ``sync`` stay visible until the page cache is lost, and never reach the disk.

After a loss of the page cache, a file has its content at the last ``sync``, and any part of the later writes, in whole
sectors. A directory entry has its state at the last ``sync_directory``, or a later one; a rename never leaves a file
without a name. A truncation of a mapped file, which would kill real readers with SIGBUS, raises AssertionError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from sparklog.storage.disk import Buffer

_SECTOR = 512


class ProcessDied(BaseException):
    """The exception that ends the simulated process.

    It is not an Exception, so that no handler of the tested code catches it.
    """


class _Mapping(bytearray):
    """The memory of one mapping. It exists as long as a view of it exists."""

    __slots__ = ("__weakref__", "file")

    file: _File


class _File:
    """One inode. Processes see ``content``. ``durable`` is what a power failure certainly leaves."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.durable = b""
        #: The writes (position, bytes) and truncations (length, None) since the last sync.
        self.pending: list[tuple[int, bytes | None]] = []
        #: True after a failed sync: processes still see writes that will never reach the disk.
        self.lost = False
        self.mappings: list[weakref.ref[_Mapping]] = []

    def write(self, data: bytes, at: int) -> None:
        _apply(self.content, at, data)
        self.pending.append((at, data))

    def truncate(self, length: int) -> None:
        for reference in self.mappings:
            mapping = reference()
            assert mapping is None or len(mapping) <= length, "a mapped file shrinks under its reader: SIGBUS"
        _resize(self.content, length)
        self.pending.append((length, None))

    def sync(self) -> None:
        self.durable = bytes(self._on_disk_with_pending()) if self.lost else bytes(self.content)
        self.pending.clear()

    def fail_to_sync(self) -> None:
        """Drop the pending writes, so that no later sync makes them durable."""
        self.pending.clear()
        self.lost = True

    def drop_cached(self) -> None:
        if self.lost:
            self.content, self.lost = self._on_disk_with_pending(), False

    def _on_disk_with_pending(self) -> bytearray:
        content = bytearray(self.durable)
        for at, data in self.pending:
            _apply(content, at, data)
        return content

    def lose_page_cache(self, rng: random.Random) -> None:
        content = bytearray(self.durable)
        for at, data in self.pending:
            if rng.random() < 0.5:
                continue
            if data is None:
                _apply(content, at, None)
                continue
            kept = len(data) if rng.random() < 0.5 else rng.randrange(len(data) // _SECTOR + 1) * _SECTOR
            if kept:
                _apply(content, at, data[:kept])
        self.content, self.lost = content, False
        self.sync()


class SimDisk:
    """A simulated disk with all its files. Not thread-safe."""

    def __init__(self, *, seed: int = 0, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.read_only = False
        self.on_sync_failed: Callable[[OSError], None] = lambda _: None
        #: The number of changing operations so far.
        self.changes = 0
        self.dead = False
        self._rng = random.Random(seed)
        self._dies_at = -1
        self._faults: list[tuple[str, int]] = []
        self._files: dict[Path, _File] = {}
        self._durable_names: dict[Path, _File] = {}
        self._directories: set[Path] = {Path("/"), Path()}
        self._handles: dict[int, _File] = {}
        self._mapped: weakref.WeakSet[_File] = weakref.WeakSet()
        self._next_handle = 3
        self._locks: dict[Path, int] = {}

    # --- faults -------------------------------------------------------------------------------------------------

    def fail_next(self, operation: str, code: int) -> None:
        """Make the next call of the method named ``operation`` raise OSError(``code``) without any effect."""
        self._faults.append((operation, code))

    def die_after(self, changes: int) -> None:
        """Make the process die in a changing operation, after ``changes`` further changing operations.

        The operation in which the process dies may still write a part of its data.
        """
        self._dies_at = self.changes + changes

    def restart(self, *, page_cache_lost: bool) -> None:
        """Start the process again. Handles and locks are lost.

        ``page_cache_lost`` means that the machine went down, so that the page cache is lost as well.
        """
        self.dead = False
        self._dies_at = -1
        self._faults.clear()
        self._handles.clear()
        self._locks.clear()
        self.on_sync_failed = lambda _: None
        if not page_cache_lost:
            return
        names: dict[Path, _File] = {}
        for path in sorted({*self._files, *self._durable_names}):
            now, then = self._files.get(path), self._durable_names.get(path)
            found = now if now is then or self._rng.random() < 0.5 else then
            if found is not None:
                names[path] = found
        # a renamed file has its old name, its new name, or both for a moment, but always at least one
        lost = set(self._durable_names.values()) - set(names.values())
        names.update((path, file) for path, file in self._files.items() if file in lost)
        for file in dict.fromkeys(names.values()):
            file.lose_page_cache(self._rng)
        self._files = names
        self._durable_names = dict(names)

    @property
    def used_bytes(self) -> int:
        """Return the total size of the files that have a name, are open, or are mapped."""
        mapped = [file for file in self._mapped if any(one() is not None for one in file.mappings)]
        files = dict.fromkeys([*self._files.values(), *self._handles.values(), *mapped])
        return sum(len(file.content) for file in files)

    def flip_bit(self, path: Path, at: int) -> None:
        """Damage one byte of a file. The damage also survives a loss of the page cache."""
        file = self._files[path]
        file.content[at] ^= 1
        file.sync()

    def _before(self, operation: str, *, changes: bool = True) -> bool:
        """Raise the fault that is set for an operation, and count a change; return whether the process dies in it."""
        if self.dead:
            raise ProcessDied(operation)
        for number, (name, code) in enumerate(self._faults):
            if name == operation:
                del self._faults[number]
                raise OSError(code, os.strerror(code))
        if not changes:
            return False
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        self.changes += 1
        self.dead = self.changes - 1 == self._dies_at
        return self.dead

    def _before_or_die(self, operation: str) -> None:
        if self._before(operation):
            raise ProcessDied(operation)

    # --- Disk ---------------------------------------------------------------------------------------------------

    def open(self, path: Path, *, create: bool = False) -> int:
        file = self._files.get(path)
        self._before("open", changes=False)
        if file is None:
            if not create or path.parent not in self._directories:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            self._before_or_die("create")
            file = self._files[path] = _File()
        return self._handle(file)

    def close(self, handle: int) -> None:
        if not self.dead:
            del self._handles[handle]
            self._locks = {path: holder for path, holder in self._locks.items() if holder != handle}

    def write(self, handle: int, buffers: Sequence[Buffer], at: int) -> int:
        dies = self._before("write")
        data = b"".join(buffers)
        file = self._handles[handle]
        if dies:
            file.write(data[: self._rng.randrange(len(data) + 1)], at)
            raise ProcessDied("write")
        if self.capacity_bytes is not None:
            grows = max(0, at + len(data) - len(file.content))
            room = max(0, self.capacity_bytes - self.used_bytes)
            if grows > room:
                data = data[: max(0, len(data) - (grows - room))]
                if not data:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(data, at)
        return len(data)

    def read(self, handle: int, length: int, at: int) -> bytes:
        self._before("read", changes=False)
        return bytes(self._handles[handle].content[at : at + length])

    def map(self, handle: int, length: int) -> memoryview:
        self._before("map", changes=False)
        file = self._handles[handle]
        if length > len(file.content):
            raise ValueError("mmap length is greater than file size")
        mapping = _Mapping(file.content[:length])
        file.mappings = [reference for reference in file.mappings if reference() is not None]
        file.mappings.append(weakref.ref(mapping))
        mapping.file = file
        self._mapped.add(file)
        return memoryview(mapping).toreadonly()

    def size(self, handle: int) -> int:
        self._before("size", changes=False)
        return len(self._handles[handle].content)

    def truncate(self, handle: int, length: int) -> None:
        self._before_or_die("truncate")
        self._handles[handle].truncate(length)

    def reserve(self, handle: int, length: int, at: int) -> None:
        """Check that there is enough space for the write. Nothing is reserved."""
        self._before_or_die("reserve")
        assert at == len(self._handles[handle].content), at
        if self.capacity_bytes is not None and self.used_bytes + length > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self, handle: int) -> None:
        with self._failing_sync([self._handles[handle]]):
            self._before_or_die("sync")
        self._handles[handle].sync()

    @contextlib.contextmanager
    def _failing_sync(self, files: Collection[_File]) -> Iterator[None]:
        """Treat an OSError inside the block as a failed sync of these files, which lose their pending writes."""
        try:
            yield
        except OSError as failure:
            for file in files:
                file.fail_to_sync()
            self.on_sync_failed(failure)
            raise

    def drop_cached(self, handle: int) -> None:
        self._before("drop_cached", changes=False)
        self._handles[handle].drop_cached()

    def sync_directory(self, path: Path) -> None:
        with self._failing_sync(()):
            self._before_or_die("sync_directory")
        if path not in self._directories:
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path))
        for name in {*self._files, *self._durable_names}:
            if name.parent == path:
                self._set_name(self._durable_names, name, self._files.get(name))

    def can_sync_file_system(self, handle: int) -> bool:
        return True

    def sync_file_system(self, handle: int) -> None:
        with self._failing_sync(self._files.values()):
            self._before_or_die("sync_file_system")
        assert handle in self._handles, "a closed handle"
        for name, found in self._files.items():
            found.sync()
            self._set_name(self._durable_names, name, found)
        for name in self._durable_names.keys() - self._files.keys():
            self._set_name(self._durable_names, name, None)

    def copy(self, source: Path, target: Path, length: int, *, start: int = 0) -> None:
        dies = self._before("copy")
        if length > len(self._files[source].content):
            raise OSError(errno.EIO, "source is too short", str(source))
        if not start:
            self._files[target] = _File()
        elif target not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(target))
        data = bytes(self._files[source].content[start:length])
        fits = data if self.capacity_bytes is None else data[: max(0, self.capacity_bytes - self.used_bytes)]
        self._files[target].write(fits[: self._rng.randrange(len(fits) + 1)] if dies else fits, start)
        if dies:
            raise ProcessDied("copy")
        if len(fits) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def names(self, path: Path) -> list[str]:
        self._before("names", changes=False)
        if path not in self._directories:
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path))
        return sorted(found.name for found in {*self._files, *self._directories} if found.parent == path != found)

    def exists(self, path: Path) -> bool:
        self._before("exists", changes=False)
        return path in self._files or path in self._directories

    def make_directory(self, path: Path) -> None:
        self._before_or_die("make_directory")
        self._directories.update((path, *path.parents))

    def make_private(self, path: Path, *, tree: bool = False) -> bool:
        """Return False: a simulated disk has one user, so there are no rights to remove."""
        return False

    def rename(self, source: Path, target: Path) -> None:
        self._before_or_die("rename")
        if source in self._files:
            self._files[target] = self._files.pop(source)
        elif source in self._directories:
            self._rename_directory(source, target)
        else:
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", str(source))

    def remove(self, path: Path) -> None:
        self._before_or_die("remove")
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        del self._files[path]

    def remove_tree(self, path: Path) -> None:
        self._before_or_die("remove_tree")
        for names in (self._files, self._durable_names):
            for name in [name for name in names if name.is_relative_to(path)]:
                del names[name]
        self._directories = {name for name in self._directories if not name.is_relative_to(path)}

    def lock(self, path: Path) -> int | None:
        self._before_or_die("lock")
        if path in self._locks:
            return None
        handle = self._handle(self._files.setdefault(path, _File()))
        self._locks[path] = handle
        return handle

    # --- internal -------------------------------------------------------------------------------------------------

    def _handle(self, file: _File) -> int:
        handle = self._next_handle
        self._next_handle += 1
        self._handles[handle] = file
        return handle

    def _rename_directory(self, source: Path, target: Path) -> None:
        """Rename a directory durably at once, which is sufficient: the storage renames only directories to delete."""
        for names in (self._files, self._durable_names):
            for name in [name for name in names if name.is_relative_to(source)]:
                names[target / name.relative_to(source)] = names.pop(name)
        moved = {name for name in self._directories if name.is_relative_to(source)}
        self._directories -= moved
        self._directories |= {target / name.relative_to(source) for name in moved}

    @staticmethod
    def _set_name(names: dict[Path, _File], name: Path, file: _File | None) -> None:
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


def _apply(content: bytearray, at: int, data: bytes | None) -> None:
    """Write ``data`` at ``at``; without data, truncate the content there."""
    if data is None:
        _resize(content, at)
        return
    if at > len(content):
        content.extend(bytes(at - len(content)))
    content[at : at + len(data)] = data


def _resize(content: bytearray, length: int) -> None:
    if length <= len(content):
        del content[length:]
    else:
        content.extend(bytes(length - len(content)))
