"""The swap: an atomic replacement of several segments by one, which a start finishes after a crash.

A swap has these steps::

    <base>.arrow.cleaned, <base>.index.cleaned   1. the new segment is written and fsynced
    <base>.swap                                  2. the list of old segments is written and fsynced: the swap is decided
    <base>.arrow, <base>.index                   3. the new files are renamed, over those of the first old segment
    (files of the other old segments)            4. these files are deleted, after the renames are durable
    (no <base>.swap)                             5. the list is deleted

A start that finds a ``.swap`` file finishes the swap. A start deletes ``.cleaned`` files without a ``.swap`` file. Code
that truncates the log first finishes or undoes a swap.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparklog.errors import BrokerError
from sparklog.record.header import HEADER_BYTES, unpack_header
from sparklog.storage.disk import Disk, replace_file
from sparklog.storage.formats import decode_state, encode_state
from sparklog.storage.segment import DATA_SUFFIX, DELETED_SUFFIX, INDEX_SUFFIX, file_stem

_log = logging.getLogger(__name__)

CLEANED_SUFFIX = ".cleaned"
SWAP_SUFFIX = ".swap"
_SUFFIXES = (DATA_SUFFIX, INDEX_SUFFIX)


class SwapFile(msgspec.Struct, frozen=True):
    """The content of a ``.swap`` file: the base offsets of the segments to replace, and the end of the new segment.

    The new segment has the first of these base offsets.
    """

    bases: tuple[int, ...]
    end_offset: int
    version: int = 1


def cleaned_paths(directory: Path, base: int) -> tuple[Path, Path]:
    """Return the paths of the new segment's data file and index before they get their final names."""
    data, index = (directory / (file_stem(base) + suffix + CLEANED_SUFFIX) for suffix in _SUFFIXES)
    return data, index


def decide(disk: Disk, directory: Path, bases: Sequence[int], *, end_offset: int) -> None:
    """Write the ``.swap`` file durably. The file records the decision that the new segment replaces the old segments.

    After a crash, the next start completes the replacement. The content of the new segment must already be fsynced.
    """
    disk.sync_directory(directory)  # The names of the new segment's files must be durable before the ``.swap`` file is.
    replace_file(disk, _journal(directory, bases[0]), encode_state(SwapFile(tuple(bases), end_offset)))


def is_decided(disk: Disk, directory: Path, base: int) -> bool:
    return disk.exists(_journal(directory, base))


def forget(disk: Disk, directory: Path, base: int) -> None:
    """Undo a swap that was decided, but whose files are not renamed yet. The undo is durable on return."""
    disk.remove(_journal(directory, base))
    disk.sync_directory(directory)
    remove_cleaned(disk, directory, base)


def rename(disk: Disk, directory: Path, base: int) -> None:
    """Rename the new segment's files to their final names. The call may be repeated."""
    for path in cleaned_paths(directory, base):
        if disk.exists(path):
            disk.rename(path, path.with_name(path.name.removesuffix(CLEANED_SUFFIX)))


def finish(disk: Disk, directory: Path, bases: Sequence[int]) -> None:
    """Complete the swap after ``rename``. The call may be repeated.

    On return the old segments and the ``.swap`` file are deleted durably. If the ``.swap`` file reappeared after a
    crash, recovery could apply it to the files of the segment's next compaction.
    """
    disk.sync_directory(directory)
    for base in reversed(bases[1:]):
        # The first rename, of the data file, marks the whole segment as deleted.
        for suffix in _SUFFIXES:
            path = directory / (file_stem(base) + suffix)
            if disk.exists(path):
                disk.rename(path, path.with_name(path.name + DELETED_SUFFIX))
        for suffix in reversed(_SUFFIXES):
            path = directory / (file_stem(base) + suffix + DELETED_SUFFIX)
            if disk.exists(path):
                disk.remove(path)
    disk.sync_directory(directory)
    disk.remove(_journal(directory, bases[0]))
    disk.sync_directory(directory)


def remove_cleaned(disk: Disk, directory: Path, base: int) -> None:
    for path in cleaned_paths(directory, base):
        if disk.exists(path):
            disk.remove(path)


def recover_swaps(disk: Disk, directory: Path) -> None:
    """Finish the swaps of segments that were decided before a crash, and delete the files of undecided ones.

    Call this at the start of recovery, before any other check.

    Raises:
        NewerFormatError, StorageError: a ``.swap`` file is unreadable, although it was fsynced before it got its name.
    """
    names = disk.names(directory)
    for name in names:
        if name.endswith(SWAP_SUFFIX):
            path = directory / name
            handle = disk.open(path)
            try:
                content = disk.read(handle, disk.size(handle), 0)
            finally:
                disk.close(handle)
            decided = decode_state(content, SwapFile, path=path)
            if _is_there(disk, directory, decided):
                rename(disk, directory, decided.bases[0])
                finish(disk, directory, decided.bases)
            else:  # A crash cannot cause this state. Keep all old segments; recovery checks them.
                _log.error("%s: the new segment does not exist; keeping the old ones", path)
                disk.remove(path)
                disk.sync_directory(directory)
    for name in disk.names(directory):
        if name.endswith(CLEANED_SUFFIX):
            disk.remove(directory / name)


def _is_there(disk: Disk, directory: Path, decided: SwapFile) -> bool:
    """Return whether the new segment exists, under its old or new name, according to the last header of its index."""
    path = cleaned_paths(directory, decided.bases[0])[1]
    if not disk.exists(path):
        path = directory / (file_stem(decided.bases[0]) + INDEX_SUFFIX)
    if not disk.exists(path):
        return False
    handle = disk.open(path)
    try:
        size = disk.size(handle)
        last = disk.read(handle, HEADER_BYTES, max(0, size - HEADER_BYTES))
        return unpack_header(last).next_offset == decided.end_offset
    except BrokerError:
        return False
    finally:
        disk.close(handle)


def _journal(directory: Path, base: int) -> Path:
    return directory / (file_stem(base) + SWAP_SUFFIX)
