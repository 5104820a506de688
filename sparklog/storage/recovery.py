"""Recovery of one partition's log at the start of a broker: find the intact part and truncate the rest.

Below the recovery point everything was fsynced, so recovery checks only sizes, contiguity and footers. Above it
recovery checks every header and both CRCs of each batch. The log ends at the first batch that fails a check, because a
log has no holes. After a clean stop everything is below the recovery point.

The bytes after that batch may still hold records, and so may a segment that lacks one of its files. Recovery deletes
neither: it moves them to ``set-aside/`` (``segments_aside``). It cannot rebuild headers from data, because only headers
have the offsets, the producers and the checksums.

Recovery truncates data without a header, which come from an unfinished append. It recomputes the footers of earlier
segments. It removes a wrong footer, and the segment is sealed again later. A right footer does not prove an fsync,
because the process may have died before that fsync. So recovery fsyncs a sealed segment above the recovery point, as
sealing does. Recovery refuses a batch of a newer format version by name and truncates nothing.

If a schema is newer than ``partition.json``, recovery reads it from the front of a segment that has it. No checksum
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
    #: The names in the directory. Callers need not try to open files that do not exist.
    names: list[str]
    segments: list[Segment]
    epochs: EpochCache
    producers: ProducerTable
    #: Offsets of the producer snapshots on disk, rising.
    snapshots: list[int]
    #: What recovery truncated, as sentences for operators. Empty: nothing.
    findings: tuple[str, ...]
    #: Schema messages by schema id: the known ones, and those that only segments have.
    schemas: dict[int, bytes]
    #: Base offset of the first segment that was truncated, and so is not fsynced. ``NO_TRUNCATION``: none.
    truncated_from: int


class _Found(NamedTuple):
    """The result of the recovery of one segment."""

    #: The damage. Empty: none.
    failure: str = ""
    #: The headers of all its batches, if all were checked; the files need not be read again.
    headers: list[BatchHeader] | None = None
    #: Recovery truncated the index.
    truncated: bool = False
    #: Leader epochs of its first and its last batch.
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
    """Open all segments of ``directory``.

    Set damaged parts aside, and remove segments that end at or below the log start.

    ``claimed`` is the offset up to which the log was committed or fsynced, according to the checkpoint.
    ``thorough``: the page cache was lost, or may show data that the disk does not have.
    Recovery then reads everything from the disk. It also
    compares footers below the recovery point byte by byte.

    Raises:
        NewerFormatError: a batch or file comes from a newer release. Nothing was changed.
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
            # A header or a marker that the check of the outline skips is damaged. Checking every batch finds it.
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
    """Return the segments, the findings, the read headers, and the base offset of the first truncated segment.

    Without ``keep_headers`` it returns no headers. Use that if all of a log's headers would be read: they may not fit
    into memory.
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
                # The segment was truncated with its predecessors and is back after a crash. The log has since grown to
                # its base offset.
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
    """fsync the sealed segments that end at or above the recovery point.

    The recovery point passes sealed segments without another check, and no later step seals them again. A segment that
    ends exactly at the recovery point may have been truncated to that offset and sealed after the last fsync.
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
    """Adopt the intact part of one segment.

    Truncate the rest, and keep a copy of it if it may hold records.

    Bytes after the last header, and a segment without headers, are no damage: an append or a truncation did not finish.
    They are damage if the segment is ``claimed`` to reach further, by the checkpoint or by a later segment: then
    headers are missing. ``whole``: the complete segment was fsynced once, and ``fsynced_below`` does not matter.
    Otherwise recovery checks the batches from ``fsynced_below`` on.
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
                # Keeping the whole segment needs no room. The log then ends before it.
                return _Found(f"{failure}; no room to set that aside ({no_room})")
        found = _adopt(segment, scan)
        # The scan's map no longer exists: a file must not shrink under a map.
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

    Return the names in the directory, the rising base offsets of its segments, and the rising offsets of its snapshots.
    Nothing else lists the directory, because a broker has thousands of them.
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
    """Move the segments aside or remove them, newest first, so that a crash in between leaves no hole."""
    for base in reversed(bases):
        segment = Segment(disk, directory, base_offset=base, files=files)
        if may_hold_records(segment, claimed=claimed):
            aside.move(segment)
        else:
            _remove_segments(disk, directory, [base], files=files)


def _remove_segments(disk: Disk, directory: Path, bases: list[int], *, files: OpenFiles) -> None:
    """Remove the segments, newest first, so that a crash in between leaves no hole."""
    for base in reversed(bases):
        for path in Segment(disk, directory, base_offset=base, files=files).mark_deleted():
            disk.remove(path)
