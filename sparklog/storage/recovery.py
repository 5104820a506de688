"""Recovery of one partition's log at the start of a broker: find the intact part and truncate the rest.

All batches below the recovery point were fsynced, so recovery checks only sizes and footers, and that the segments are
contiguous. Above the recovery point it checks every header and both CRCs of each batch. The log ends at the first batch
that fails a check, because a log has no holes. After a clean shutdown all batches are below the recovery point.

The bytes after the first damaged batch may still contain records. A segment that lacks one of its files may also
contain records. Recovery does not delete these bytes and segments, but moves them to ``set-aside/``
(``segments_aside``). It cannot rebuild headers from data, because only headers have the offsets, the producers and the
checksums.

Data without a header is from an unfinished append, and recovery truncates it. It also recomputes the footers of
segments. It removes a wrong footer, and the segment is sealed again later. A right footer does not prove that the
segment was fsynced, because the process may have died before the fsync. So recovery fsyncs a sealed segment above the
recovery point. If a batch or file has the format version of a newer release, recovery fails and truncates nothing.

If ``partition.json`` does not have a segment's schema, recovery reads it from the beginning of the segment. No checksum
covers that schema, so recovery trusts it only if the segment was fsynced or the page cache was not lost.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sparklog.errors import BrokerError, StorageError
from sparklog.model import NO_EPOCH
from sparklog.record.header import HEADER_BYTES, BatchHeader
from sparklog.storage import segment_scan
from sparklog.storage.disk import Disk, is_full
from sparklog.storage.epochs import EPOCHS_FILE, EpochCache
from sparklog.storage.formats import NewerFormatError
from sparklog.storage.open_files import OpenFiles
from sparklog.storage.producers import ProducerTable
from sparklog.storage.rebuild_state import SegmentHeaders, derive_state, snapshot_offsets
from sparklog.storage.segment import (
    COPY_SUFFIX,
    DATA_SUFFIX,
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    NO_TRUNCATION,
    Segment,
    file_stem,
)
from sparklog.storage.segment_scan import Scan
from sparklog.storage.segment_swap import CLEANED_SUFFIX, SWAP_SUFFIX, recover_swaps
from sparklog.storage.segments_aside import SegmentsAside, may_hold_records

logger = logging.getLogger(__name__)

_STEM_DIGITS = len(file_stem(0))


class RecoveredLog(NamedTuple):
    """The result of the recovery of one log: its segments, the state derived from them, and what was truncated."""

    #: The names in the directory, so that the caller does not try to open files that do not exist.
    names: list[str]
    segments: list[Segment]
    epochs: EpochCache
    producers: ProducerTable
    #: The offsets of the producer snapshots on disk, in ascending order.
    snapshots: list[int]
    #: The findings of recovery, as sentences for operators: what was truncated. Empty: recovery truncated nothing.
    findings: tuple[str, ...]
    #: Schema messages by schema id: the known ones, and those that only segments have.
    schemas: dict[int, bytes]
    #: The base offset of the first segment that was truncated, and so is not fsynced. ``NO_TRUNCATION``: there is none.
    truncated_from: int


class _Found(NamedTuple):
    """The result of the recovery of one segment."""

    #: The damage. Empty: the segment is not damaged.
    failure: str = ""
    #: The headers of all batches of the segment. None: recovery did not read all of them.
    headers: list[BatchHeader] | None = None
    #: Whether recovery truncated the index.
    truncated: bool = False
    #: The leader epochs of the segment's first and last batch.
    first_epoch: int = NO_EPOCH
    last_epoch: int = NO_EPOCH


def recover_log(
    disk: Disk,
    directory: Path,
    *,
    schemas: Mapping[int, bytes],
    files: OpenFiles,
    recovery_point: int,
    log_start_offset: int,
    claimed: int,
    thorough: bool,
) -> RecoveredLog:
    """Open all segments of a log's directory, and truncate the log at the first damaged batch.

    Move damaged parts to ``set-aside/`` if they may contain records. Remove segments that end at or below the log start
    offset.

    ``claimed`` is the offset up to which the log was committed or fsynced, according to the checkpoint. With
    ``thorough``, recovery reads everything from the disk, and compares footers below the recovery point byte by byte.
    This is necessary if the page cache was lost, or may show data that the disk does not have.

    Raises:
        NewerFormatError: a batch or file comes from a newer release. No batch was truncated.
        StorageError: the disk failed.
    """
    schemas = dict(schemas)
    aside = SegmentsAside(disk, directory)
    try:
        names, bases, snapshots = _remove_leftovers(disk, directory)
        below = sum(following <= log_start_offset for following in bases[1:])
        _remove_segments(disk, directory, bases[:below], files=files)
        segments, findings, headers, truncated_from = _recover_segments(
            disk,
            directory,
            bases[below:],
            schemas=schemas,
            files=files,
            aside=aside,
            recovery_point=recovery_point,
            claimed=claimed,
            thorough=thorough,
        )
        has_epochs = EPOCHS_FILE in names
        try:
            epochs, producers, kept = derive_state(
                disk,
                directory,
                segments,
                headers=headers,
                snapshots=snapshots,
                has_epochs=has_epochs,
                recovery_point=recovery_point,
            )
        except NewerFormatError:
            raise
        except (BrokerError, StorageError) as damage:
            # A header or a marker is damaged, which the quick check (``outline``) did not read. Check every batch.
            findings.append(f"{damage}: every batch is checked")
            for segment in segments:
                segment.close()
            segments, found, _, truncated_again = _recover_segments(
                disk,
                directory,
                [segment.base_offset for segment in segments],
                schemas=schemas,
                files=files,
                aside=aside,
                recovery_point=0,
                claimed=claimed,
                thorough=thorough,
                keep_headers=False,
            )
            findings += found
            truncated_from = min(truncated_from, truncated_again)
            epochs, producers, kept = derive_state(
                disk,
                directory,
                segments,
                headers={},
                snapshots=snapshots,
                has_epochs=has_epochs,
                recovery_point=None,
            )
        _sync_sealed(disk, directory, segments, recovery_point=recovery_point)
        if aside.name:
            findings.append(f"bytes after that, which may hold records, are kept in {aside.name}")
            aside.finish("; ".join(findings))
    except BrokerError as damage:
        raise StorageError(f"{directory}: {damage}") from damage
    except OSError as failure:
        raise StorageError(f"{directory}: {failure}") from failure
    for finding in findings:
        logger.warning("%s: %s", directory, finding)
    return RecoveredLog(names, segments, epochs, producers, kept, tuple(findings), schemas, truncated_from)


def _recover_segments(
    disk: Disk,
    directory: Path,
    bases: list[int],
    *,
    schemas: dict[int, bytes],
    files: OpenFiles,
    aside: SegmentsAside,
    recovery_point: int,
    claimed: int,
    thorough: bool,
    keep_headers: bool = True,
) -> tuple[list[Segment], list[str], SegmentHeaders, int]:
    """Return the segments, findings, and headers that were read, and the base offset of the first truncated segment.

    Without ``keep_headers`` return no headers, because all headers of a log may not fit into memory.
    """
    segments: list[Segment] = []
    truncated_from = NO_TRUNCATION
    findings: list[str] = []
    headers: dict[int, Sequence[BatchHeader]] = {}
    last_epoch = NO_EPOCH
    for number, base in enumerate(bases):
        segment = Segment(disk, directory, base_offset=base, files=files)
        previous = segments[-1] if segments else None
        if previous is not None and base != previous.end_offset:
            found = _Found(f"segment {base} does not follow {previous.end_offset}")
        else:
            next_base = bases[number + 1] if number + 1 < len(bases) else None
            fsynced = next_base is not None and next_base <= recovery_point
            found = _recover_one(
                segment,
                schemas,
                aside=aside,
                fsynced_below=recovery_point,
                claimed=claimed if next_base is None else next_base,
                whole=fsynced,
                thorough=thorough,
            )
            if segment.count and found.first_epoch < last_epoch:
                # The segment was removed by a truncation, but is back after a crash. In the meantime the log has grown
                # to its base offset.
                segment.close()
                segment = Segment(disk, directory, base_offset=base, files=files)
                found = _Found(f"segment {base} of leader epoch {found.first_epoch} does not follow {last_epoch}")
        failure = found.failure
        if (
            not segment.count
            and not failure
            and (number + 1 < len(bases) or may_hold_records(segment, claimed=claimed))
        ):
            failure = f"segment {base} holds no batch, or lacks one of its files"
        if failure:
            findings.append(failure)
        if segment.count:
            segments.append(segment)
            last_epoch = found.last_epoch
            if found.headers is not None and keep_headers:
                headers[base] = found.headers
            if found.truncated:
                truncated_from = min(truncated_from, base)
        if failure or not segment.count:
            unusable = bases[number + (segment.count > 0) :]
            _take_out(disk, directory, unusable, files=files, aside=aside, claimed=claimed)
            if number + 1 < len(bases):
                findings.append(f"removed {len(bases) - number - 1} segments from offset {bases[number + 1]} on")
            break
    return segments, findings, headers, truncated_from


def _sync_sealed(disk: Disk, directory: Path, segments: list[Segment], *, recovery_point: int) -> None:
    """Fsync the sealed segments that end at or above the recovery point.

    The recovery point will move past sealed segments, and no later step fsyncs them. A segment that ends exactly at the
    recovery point may not be fsynced either: it may have been truncated to that offset, and sealed, after the last
    fsync.
    """
    unsure = [segment for segment in segments if segment.sealed and segment.end_offset >= recovery_point]
    for segment in unsure:
        segment.sync()
    if unsure:
        disk.sync_directory(directory)
        disk.sync_directory(directory.parent)


def _recover_one(
    segment: Segment,
    schemas: dict[int, bytes],
    *,
    aside: SegmentsAside,
    fsynced_below: int,
    claimed: int,
    whole: bool,
    thorough: bool,
) -> _Found:
    """Find the intact part of one segment, set the segment's state to it, and truncate the rest.

    Keep a copy of the rest if it may contain records.

    Data after the last header, or a segment without headers, usually come from an unfinished append or truncation, and
    are no damage. But if the segment ends below ``claimed``, headers are missing, and that is damage: the checkpoint or
    a later segment shows that this segment had records up to ``claimed``.

    With ``whole`` the complete segment was fsynced, and usually only its outline is checked. Otherwise recovery checks
    the batches from ``fsynced_below`` on.
    """
    disk = segment.disk
    try:
        data = disk.open(segment.data_path)
    except FileNotFoundError:
        return _Found()
    try:
        index = disk.open(segment.index_path)
    except FileNotFoundError:
        disk.close(data)
        return _Found()
    try:
        if thorough:
            disk.drop_cached(data)
            disk.drop_cached(index)
        if whole and not thorough:
            outline = segment_scan.outline(segment, data, index, schemas=schemas)
            if outline is not None:
                return _adopt(segment, outline)
        index_bytes, data_bytes = disk.size(index), disk.size(data)
        packed = disk.read(index, index_bytes // HEADER_BYTES * HEADER_BYTES, 0)
        segment_scan.refuse_newer(segment.index_path, packed)
        if not thorough or segment.base_offset < fsynced_below:
            segment_scan.learn_schema(segment, data, packed, schemas)
        scan = segment_scan.scan(
            segment, data, packed, data_bytes=data_bytes, schemas=schemas, fsynced_below=fsynced_below
        )
        if not scan.headers:
            return _Found(scan.failure)
        end, failure = scan.headers[-1].next_offset, scan.failure
        position = scan.headers[-1].position + scan.headers[-1].stored_bytes
        lacks_headers = data_bytes > position and end < claimed
        if index_bytes >= (scan.whole + 1) * HEADER_BYTES or lacks_headers:
            failure = failure or f"segment {segment.base_offset} lacks the headers of the batches from offset {end} on"
            try:
                aside.keep_tail(segment, data, index, batches=scan.whole, position=position)
            except OSError as no_room:
                if not is_full(no_room):
                    raise
                # Move the whole segment aside, which needs no room. The log then ends before this segment.
                return _Found(f"{failure}; no room to set that aside ({no_room})")
        found = _adopt(segment, scan)
        # The scan's memory map no longer exists. A file must not shrink while it is mapped.
        truncated = index_bytes != scan.whole * HEADER_BYTES
        if truncated:
            disk.truncate(index, scan.whole * HEADER_BYTES)
        if not scan.sealed and data_bytes != segment.data_size:
            disk.truncate(data, segment.data_size)
        return found._replace(failure=failure, headers=scan.headers if scan.complete else None, truncated=truncated)
    finally:
        disk.close(data)
        disk.close(index)


def _adopt(segment: Segment, scan: Scan) -> _Found:
    """Set the state of the segment to its intact batches."""
    first, last = scan.headers[0], scan.headers[-1]
    segment.adopt(count=scan.whole, first=first, last=last, sealed=scan.sealed)
    return _Found(first_epoch=first.leader_epoch, last_epoch=last.leader_epoch)


# --- files ------------------------------------------------------------------------------------------------------


def _remove_leftovers(disk: Disk, directory: Path) -> tuple[list[str], list[int], list[int]]:
    """Finish deletions and remove unfinished copies.

    Return the names in the directory, the base offsets of the segments and the offsets of the snapshots, in ascending
    order. The rest of recovery does not list the directory again, because a broker has thousands of directories.
    """
    names = disk.names(directory)
    if any(name.endswith((SWAP_SUFFIX, CLEANED_SUFFIX)) for name in names):
        recover_swaps(disk, directory)
        names = disk.names(directory)
    deleted = {name[:_STEM_DIGITS] for name in names if name.endswith(DATA_SUFFIX + DELETED_SUFFIX)}
    bases: set[int] = set()
    for name in names:
        stem, suffix = name[:_STEM_DIGITS], name[_STEM_DIGITS:]
        of_segment = suffix in (DATA_SUFFIX, INDEX_SUFFIX) and stem.isdigit()
        if name.endswith((".tmp", COPY_SUFFIX, DELETED_SUFFIX)) or (of_segment and stem in deleted):
            disk.remove(directory / name)
        elif of_segment:
            bases.add(int(stem))
    return names, sorted(bases), snapshot_offsets(names)


def _take_out(
    disk: Disk, directory: Path, bases: list[int], *, files: OpenFiles, aside: SegmentsAside, claimed: int
) -> None:
    """Move the segments aside or remove them. Begin with the newest, so that a crash in between leaves no hole."""
    for base in reversed(bases):
        segment = Segment(disk, directory, base_offset=base, files=files)
        if may_hold_records(segment, claimed=claimed):
            aside.move(segment)
        else:
            _remove_segments(disk, directory, [base], files=files)


def _remove_segments(disk: Disk, directory: Path, bases: list[int], *, files: OpenFiles) -> None:
    """Remove the segments. Begin with the newest, so that a crash in between leaves no hole."""
    for base in reversed(bases):
        for path in Segment(disk, directory, base_offset=base, files=files).mark_deleted():
            disk.remove(path)
