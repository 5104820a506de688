"""Replacement of several segments by one, all or nothing: the files of a swap, and how a start ends an unfinished swap.

::

    <base>.arrow.cleaned, <base>.index.cleaned     the new segment, fsynced
    <base>.swap                                    then: the segments to replace, fsynced; the swap is now decided
    <base>.arrow, <base>.index                     then: renamed over the first old segment's files
    (the other old segments' files)                then, with the renames durable: deleted
    (no <base>.swap)                               last

A start that finds ``.swap`` finishes the swap. It deletes ``.cleaned`` files without a ``.swap``. While a ``.swap``
exists, the log is not truncated in its segments: the code that truncates first finishes or undoes the swap.
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
    """Base offsets of the segments to replace. The new segment has the first of them."""

    bases: tuple[int, ...]
    #: The end of the new segment.
    end_offset: int
    version: int = 1


def cleaned_paths(directory: Path, base: int) -> tuple[Path, Path]:
    """Return the paths of the new segment's data and index."""
    data, index = (directory / (file_stem(base) + suffix + CLEANED_SUFFIX) for suffix in _SUFFIXES)
    return data, index


def decide(disk: Disk, directory: Path, bases: Sequence[int], *, end_offset: int) -> None:
    """Decide the swap, durably. The new segment's content is already fsynced."""
    disk.sync_directory(directory)  # the names must be durable before the decision is
    replace_file(disk, _journal(directory, bases[0]), encode_state(SwapFile(tuple(bases), end_offset)))


def is_decided(disk: Disk, directory: Path, base: int) -> bool:
    return disk.exists(_journal(directory, base))


def forget(disk: Disk, directory: Path, base: int) -> None:
    """Undo the decision, before any rename. Durable on return."""
    disk.remove(_journal(directory, base))
    disk.sync_directory(directory)
    remove_cleaned(disk, directory, base)


def rename(disk: Disk, directory: Path, base: int) -> None:
    """Rename the new segment's files into their place. Repeatable."""
    for path in cleaned_paths(directory, base):
        if disk.exists(path):
            disk.rename(path, path.with_name(path.name.removesuffix(CLEANED_SUFFIX)))


def finish(disk: Disk, directory: Path, bases: Sequence[int]) -> None:
    """Complete the swap after ``rename``.

    Repeatable. On return the old segments and the decision are deleted, durably. The decision must not reappear after
    the segment's next cleaning has begun to write.
    """
    disk.sync_directory(directory)
    for base in reversed(bases[1:]):
        # the renamed data file marks the whole segment as being deleted
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
    """Finish decided swaps and delete the files of others, at start, before any other check.

    Raises:
        NewerFormatError, StorageError: a ``.swap`` is unreadable, although it was fsynced before it got its name.
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
            else:  # No crash leaves this state. Delete no segment, and check the existing ones as they are.
                _log.error("%s: the new segment does not exist; keeping the old ones", path)
                disk.remove(path)
                disk.sync_directory(directory)
    for name in disk.names(directory):
        if name.endswith(CLEANED_SUFFIX):
            disk.remove(directory / name)


def _is_there(disk: Disk, directory: Path, decided: SwapFile) -> bool:
    """Return whether the new segment exists, renamed or not, according to the last header of its index."""
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
