"""One segment takes the place of several, all or nothing: the files of a swap, and how a start ends an unfinished one.

::

    <base>.arrow.cleaned, <base>.index.cleaned     the new segment, fsynced
    <base>.swap                                    then: whose place it takes, fsynced; from here on it is decided
    <base>.arrow, <base>.index                     then: renamed over the first old segment's files
    (the other old segments' files)                then, with the renames durable: deleted
    (no <base>.swap)                               last

A start that finds ``.swap`` finishes; ``.cleaned`` without it is thrown away. While there is a ``.swap`` the log is not
cut where it is: whoever cuts finishes or forgets the swap first.
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
    """Base offsets of the segments that the new one takes the place of; its own is the first."""

    bases: tuple[int, ...]
    #: where the new segment ends
    end_offset: int
    version: int = 1


def cleaned_paths(directory: Path, base: int) -> tuple[Path, Path]:
    """Data and index of the new segment."""
    data, index = (directory / (file_stem(base) + suffix + CLEANED_SUFFIX) for suffix in _SUFFIXES)
    return data, index


def decide(disk: Disk, directory: Path, bases: Sequence[int], *, end_offset: int) -> None:
    """The new segment's content is fsynced: from here on it takes the others' place. Durable on return."""
    disk.sync_directory(directory)  # its names have to be there before the decision is
    replace_file(disk, _journal(directory, bases[0]), encode_state(SwapFile(tuple(bases), end_offset)))


def is_decided(disk: Disk, directory: Path, base: int) -> bool:
    return disk.exists(_journal(directory, base))


def forget(disk: Disk, directory: Path, base: int) -> None:
    """The decision is taken back, before anything was renamed. Durable on return."""
    disk.remove(_journal(directory, base))
    disk.sync_directory(directory)
    remove_cleaned(disk, directory, base)


def rename(disk: Disk, directory: Path, base: int) -> None:
    """The new segment's files come under their names. Repeatable."""
    for path in cleaned_paths(directory, base):
        if disk.exists(path):
            disk.rename(path, path.with_name(path.name.removesuffix(CLEANED_SUFFIX)))


def finish(disk: Disk, directory: Path, bases: Sequence[int]) -> None:
    """All that is left to do after ``rename``; the old segments are gone on return, durably, and so is the decision: it
    must not come back when the segment's next cleaning has begun to write. Repeatable."""
    disk.sync_directory(directory)
    for base in reversed(bases[1:]):
        # the data's name says that the whole segment is being deleted
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
    """Finish what was decided, throw away what was not. At start, before anything else is looked at.

    Raises:
        NewerFormatError, StorageError: a ``.swap`` that cannot be read: it was fsynced before it had its name.
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
            else:  # not a state that a crash leaves: nothing is deleted, and what is there is looked at as it is
                _log.error("%s: the new segment does not exist; keeping the old ones", path)
                disk.remove(path)
                disk.sync_directory(directory)
    for name in disk.names(directory):
        if name.endswith(CLEANED_SUFFIX):
            disk.remove(directory / name)


def _is_there(disk: Disk, directory: Path, decided: SwapFile) -> bool:
    """Whether the new segment is, renamed or not yet, by the last header of its index."""
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
