"""Opening a log directory's partition: find out what of it is whole, and cut the rest.

Below the recovery point everything was fsynced and only its outline is looked at: sizes, contiguity, footers. Beyond
it every header is checked against the data by both CRCs, and the log ends at the first batch that fails: a log has no
holes. After a clean stop everything is below the recovery point.

What comes after that batch may hold records all the same, and so may a segment that lacks one of its files. None of it
is deleted: it moves to ``set-aside/`` (``segments_aside``). Headers are not made again from the data: only they have
the offsets, the producers and the checksums.

Data without header (an append that did not finish) are cut. Footers of earlier segments are recomputed: one that
differs is cut, and the segment is sealed again later. One that is right says nothing of an fsync, before which the
process may have died: a sealed segment beyond the recovery point is fsynced here, as a seal does. A batch of a newer
format version is not garbage: it is refused by name and nothing is cut.

A schema that came after ``partition.json`` was written is read from the front of a segment that has it. No checksum
covers that: it is believed where it was fsynced, or where the page cache was not lost.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparklog.errors import BrokerError, StorageError
from sparklog.model import NO_EPOCH
from sparklog.record.checksum import crc32c
from sparklog.record.footer import (
    BLOCK_DTYPE,
    arrow_footer,
    arrow_prelude,
    schema_of_prelude,
)
from sparklog.record.header import (
    FORMAT_VERSION,
    HEADER_BYTES,
    BatchHeader,
    Flag,
    header_array,
    unpack_header,
)
from sparklog.record.schema import MAX_SCHEMA_BYTES, parse_schema
from sparklog.storage.append_plan import NO_MAXIMUM
from sparklog.storage.disk import Disk, is_full
from sparklog.storage.epochs import EPOCHS_FILE, EpochCache
from sparklog.storage.formats import NewerFormatError
from sparklog.storage.open_files import OpenFiles
from sparklog.storage.producers import ProducerTable
from sparklog.storage.rebuild_state import SegmentHeaders, derive_state, snapshot_offsets
from sparklog.storage.sealing import footer_of
from sparklog.storage.segment import (
    COPY_SUFFIX,
    DATA_SUFFIX,
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    NO_CUT,
    Segment,
    file_stem,
)
from sparklog.storage.segment_swap import CLEANED_SUFFIX, SWAP_SUFFIX, recover_swaps
from sparklog.storage.segments_aside import SegmentsAside, may_hold_records

logger = logging.getLogger(__name__)

_STEM_DIGITS = len(file_stem(0))
#: High bits of a header's flags; kept in step with ``record.header`` by a test.
_VERSION_SHIFT = 12
#: The byte of a header that they are in: the upper one of the flags, before the CRC.
_VERSION_AT = HEADER_BYTES - 5
_FIRST = int(Flag.FIRST_OF_SEGMENT)
_MAX_PRELUDE_BYTES = MAX_SCHEMA_BYTES + 64
#: Up to here a file is read sooner than it is mapped.
_SMALL_BYTES = 64 * 1024


class RecoveredLog(NamedTuple):
    #: what the directory held, so that nothing need be tried to be opened that is not there
    names: list[str]
    segments: list[Segment]
    epochs: EpochCache
    producers: ProducerTable
    #: offsets of the producers' snapshots on disk, rising
    snapshots: list[int]
    #: what was cut, for people; empty when nothing was
    findings: tuple[str, ...]
    #: messages by schema id: those that were known, and those that only segments have
    schemas: dict[int, bytes]
    #: base offset of the first segment that was cut, which is not fsynced; ``NO_CUT``: none was
    cut_from: int


class _Scan(NamedTuple):
    """Whole batches found at the start of a segment."""

    #: those that were looked at, the first and the last whole one among them
    headers: list[BatchHeader]
    #: how many are whole
    whole: int
    #: why there are no more; empty when all are whole
    failure: str
    #: behind the last one is the right footer
    sealed: bool = False

    @property
    def complete(self) -> bool:
        """Whether ``headers`` are those of all whole batches."""
        return len(self.headers) == self.whole


class _Found(NamedTuple):
    """What there was of one segment."""

    #: what damage; empty: none
    failure: str = ""
    #: of all its batches, where every one was looked at: then the files need not be read again
    headers: list[BatchHeader] | None = None
    #: there was more in the index
    cut: bool = False
    #: leader epochs of its first and its last batch
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
    """Open all segments of ``directory``, setting aside what is not whole and removing what is wholly below the log
    start. ``claimed``: the checkpoint says that the log was committed or fsynced up to there.

    ``thorough``: the page cache was lost, or shows what the disk may not have: everything is read from the disk, and
    footers below the recovery point are compared byte by byte as well.

    Raises:
        NewerFormatError: a batch or file of a newer release; nothing was changed.
        StorageError: the disk failed.
    """
    schemas = dict(schemas)
    aside = SegmentsAside(disk, directory)
    try:
        names, bases, snapshots = _remove_leftovers(disk, directory)
        below = sum(following <= log_start_offset for following in bases[1:])
        _remove_segments(disk, directory, bases[:below], files=files)
        segments, findings, headers, cut_from = _recover_segments(
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
            # In a header, or a marker, that an outline passes over. It is found with all the others.
            findings.append(f"{damage}: every batch is checked")
            for segment in segments:
                segment.close()
            segments, found, _, cut_again = _recover_segments(
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
            cut_from = min(cut_from, cut_again)
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
            findings.append(f"what may hold records after that is kept in {aside.name}")
            aside.finish("; ".join(findings))
    except BrokerError as damage:
        raise StorageError(f"{directory}: {damage}") from damage
    except OSError as failure:
        raise StorageError(f"{directory}: {failure}") from failure
    for finding in findings:
        logger.warning("%s: %s", directory, finding)
    return RecoveredLog(names, segments, epochs, producers, kept, tuple(findings), schemas, cut_from)


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
    """The segments, what was cut of them for people, headers that were read, and the base offset of the first segment
    that was cut. ``keep_headers``: false where they would be those of all of a log, more than memory holds."""
    segments: list[Segment] = []
    cut_from = NO_CUT
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
                # one that was cut with those before it, and is back: the log has grown to its base offset since
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
            if found.cut:
                cut_from = min(cut_from, base)
        if failure or not segment.count:
            unusable = bases[number + (segment.count > 0) :]
            _take_out(disk, directory, unusable, files=files, aside=aside, claimed=claimed)
            if number + 1 < len(bases):
                findings.append(f"{len(bases) - number - 1} segments from {bases[number + 1]} on taken out")
            break
    return segments, findings, headers, cut_from


def _sync_sealed(disk: Disk, directory: Path, segments: list[Segment], *, recovery_point: int) -> None:
    """The recovery point will pass whatever is sealed without asking again, and nobody seals it again. A segment that
    ends right there may have been cut back to it, and sealed, behind the last fsync."""
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
    """Adopt what is whole of one segment; cut the rest, of which a copy is kept where it may hold records.

    Bytes behind the last header and a segment without any are no damage: an append, or a cut, did not finish. Unless
    the segment is ``claimed`` to reach further, by the checkpoint or by a segment after it: then headers are missing.
    ``whole``: all of it was fsynced once. ``fsynced_below`` is then irrelevant; else batches from there on are checked.
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
            found = _adopt_outline(segment, data, index, schemas=schemas)
            if found is not None:
                return found
        index_bytes, data_bytes = disk.size(index), disk.size(data)
        packed = disk.read(index, index_bytes // HEADER_BYTES * HEADER_BYTES, 0)
        _refuse_newer(segment.index_path, packed)
        if not thorough or segment.base_offset < fsynced_below:
            _learn_schema(segment, data, packed, schemas)
        scan = _scan_files(segment, data, packed, data_bytes=data_bytes, schemas=schemas, fsynced_below=fsynced_below)
        if not scan.headers:
            return _Found(scan.failure)
        end, failure = scan.headers[-1].next_offset, scan.failure
        position = scan.headers[-1].position + scan.headers[-1].stored_bytes
        lacks_headers = data_bytes > position and end < claimed
        if index_bytes >= (scan.whole + 1) * HEADER_BYTES or lacks_headers:
            failure = failure or f"segment {segment.base_offset} lacks the headers of what is behind offset {end}"
            try:
                aside.keep_tail(segment, data, index, batches=scan.whole, position=position)
            except OSError as no_room:
                if not is_full(no_room):
                    raise
                # It needs no room to keep the segment as it is, and the log then ends before it.
                return _Found(f"{failure}; no room to keep that apart ({no_room})")
        segment.adopt(count=scan.whole, first=scan.headers[0], last=scan.headers[-1])
        segment.sealed = scan.sealed
        # the map of the scan is gone by now: a file must not shrink under one
        cut = index_bytes != scan.whole * HEADER_BYTES
        if cut:
            disk.truncate(index, scan.whole * HEADER_BYTES)
        if not scan.sealed and data_bytes != segment.data_size:
            disk.truncate(data, segment.data_size)
        first, last = scan.headers[0], scan.headers[-1]
        kept = scan.headers if scan.complete else None
        return _Found(failure, kept, cut, first.leader_epoch, last.leader_epoch)
    finally:
        disk.close(data)
        disk.close(index)


def _scan_files(
    segment: Segment, data: int, packed: bytes, *, data_bytes: int, schemas: Mapping[int, bytes], fsynced_below: int
) -> _Scan:
    """Scan the batches; if all are whole, compare what is behind them with the footer they should have."""
    disk = segment.disk
    if data_bytes <= _SMALL_BYTES:
        mapped = memoryview(disk.read(data, data_bytes, 0))
    else:
        mapped = disk.map(data, data_bytes)
    skip = 0
    if segment.base_offset < fsynced_below:
        headers = header_array(packed)
        skip = int((headers["base_offset"] + headers["offset_span"] <= fsynced_below).cumprod().sum())
    scan = _scan(segment.base_offset, packed, mapped, schemas=schemas, skip=skip)
    if scan.failure or not scan.headers:
        return scan
    last = scan.headers[-1]
    tail = mapped[last.position + last.stored_bytes :]
    if not tail:
        return scan
    footer = footer_of(header_array(packed), mapped, schema_message=schemas[last.schema_id])
    return scan._replace(sealed=bool(footer) and tail == footer)


def _adopt_outline(segment: Segment, data: int, index: int, *, schemas: Mapping[int, bytes]) -> _Found | None:
    """Adopt a segment that was fsynced as a whole, if its sizes and its first and last header fit each other."""
    disk = segment.disk
    count, odd = divmod(disk.size(index), HEADER_BYTES)
    if odd or not count:
        return None
    try:
        first = unpack_header(disk.read(index, HEADER_BYTES, 0))
        last = unpack_header(disk.read(index, HEADER_BYTES, (count - 1) * HEADER_BYTES))
    except BrokerError:
        return None
    tail = disk.size(data) - last.position - last.stored_bytes
    if first.base_offset != segment.base_offset or first.schema_id not in schemas:
        return None
    if tail not in (0, len(arrow_footer(schemas[first.schema_id], np.zeros(count, dtype=BLOCK_DTYPE)))):
        return None
    segment.adopt(count=count, first=first, last=last)
    segment.sealed = tail > 0
    return _Found(first_epoch=first.leader_epoch, last_epoch=last.leader_epoch)


def _learn_schema(segment: Segment, data: int, packed: bytes, schemas: dict[int, bytes]) -> None:
    """Add the schema of a segment to ``schemas``, unless it is there or the file does not begin with one. ``packed``:
    headers from the first on."""
    try:
        first = unpack_header(packed)
        if first.schema_id in schemas:
            return
        message = schema_of_prelude(segment.disk.read(data, min(first.position, _MAX_PRELUDE_BYTES), 0))
        parse_schema(message)
    except BrokerError as error:
        logger.warning("%s: no schema found at its front: %s", segment.data_path, error)
    else:
        schemas[first.schema_id] = message


def _scan(base_offset: int, packed: bytes, data: memoryview, *, schemas: Mapping[int, bytes], skip: int) -> _Scan:
    """Find the whole batches of a segment.

    Of the first ``skip`` only the first and the last are looked at, unless they do not fit.
    """
    count = len(packed) // HEADER_BYTES
    end, position, running_max, last_epoch = base_offset, -1, NO_MAXIMUM, -1
    headers: list[BatchHeader] = []
    for number in [0, *range(max(1, skip - 1), count)] if count else []:
        failure = ""
        try:
            header = unpack_header(packed, number * HEADER_BYTES)
        except BrokerError as error:
            failure = str(error)
        else:
            if number == 0:
                if header.schema_id not in schemas and skip:
                    raise StorageError(
                        f"schema id {header.schema_id} of segment {base_offset} is neither in partition.json nor "
                        "at the segment's front"
                    )
                position = _prelude_end(header, data, schemas)
            elif number == skip - 1:
                end, position, running_max = header.base_offset, header.position, header.running_max
            running_max = max(running_max, header.max_timestamp)
            failure = _problem(
                header,
                data,
                first=number == 0,
                end=end,
                position=position,
                running_max=running_max,
                last_epoch=last_epoch,
            )
            if not failure and number >= skip:
                crc = crc32c(data[position : position + header.stored_bytes])
                if crc != header.body_crc:
                    failure = f"CRC32C of the data {crc:#010x} found, {header.body_crc:#010x} expected"
        if failure and number < skip:
            return _scan(base_offset, packed, data, schemas=schemas, skip=0)
        if failure:
            return _Scan(headers, number, f"batch {number} of segment {base_offset}, offset {end}: {failure}")
        headers.append(header)
        end, position, last_epoch = header.next_offset, position + header.stored_bytes, header.leader_epoch
    return _Scan(headers, count, "")


def _problem(
    header: BatchHeader,
    data: memoryview,
    *,
    first: bool,
    end: int,
    position: int,
    running_max: int,
    last_epoch: int,
) -> str:
    for what, found, expected in (
        ("base offset", header.base_offset, end),
        ("position", header.position, position),
        ("first-of-segment flag", bool(header.flags & _FIRST), first),
        ("running maximum timestamp", header.running_max, running_max),
    ):
        if found != expected:
            return f"{what} {found} found, {expected} expected"
    if header.leader_epoch < last_epoch:
        return f"leader epoch {header.leader_epoch} found after {last_epoch}"
    if position + header.stored_bytes > len(data):
        return f"data end at {len(data)}, {position + header.stored_bytes} expected"
    return ""


def _prelude_end(header: BatchHeader, data: memoryview, schemas: Mapping[int, bytes]) -> int:
    """Position of the first batch; 0, where none can be, when the file does not begin as it should."""
    if header.schema_id not in schemas:
        return 0
    prelude = arrow_prelude(schemas[header.schema_id])
    return len(prelude) if data[: len(prelude)] == prelude else 0


def _refuse_newer(path: Path, packed: bytes) -> None:
    """A whole header (its CRC fits) of a newer version must not be taken for damage."""
    if not packed or max(packed[_VERSION_AT::HEADER_BYTES]) >> _VERSION_SHIFT - 8 <= FORMAT_VERSION:
        return
    versions = header_array(packed)["flags"] >> _VERSION_SHIFT
    for number in (versions > FORMAT_VERSION).nonzero()[0]:
        raw = packed[int(number) * HEADER_BYTES : (int(number) + 1) * HEADER_BYTES]
        if crc32c(raw[:-4]) == int.from_bytes(raw[-4:], "little"):
            raise NewerFormatError(
                f"{path}: batch header format version {versions[number]} found, at most {FORMAT_VERSION} expected: "
                "written by a newer release"
            )


# --- files ------------------------------------------------------------------------------------------------------


def _remove_leftovers(disk: Disk, directory: Path) -> tuple[list[str], list[int], list[int]]:
    """Finish deletions, drop unfinished copies; return what the directory held, the base offsets of the segments there
    are, and the offsets of the snapshots, rising. It is listed here and nowhere else: there are thousands of them."""
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
    """Newest first, so that a crash in between leaves no hole."""
    for base in reversed(bases):
        segment = Segment(disk, directory, base_offset=base, files=files)
        if may_hold_records(segment, claimed=claimed):
            aside.move(segment)
        else:
            _remove_segments(disk, directory, [base], files=files)


def _remove_segments(disk: Disk, directory: Path, bases: list[int], *, files: OpenFiles) -> None:
    """Newest first, so that a crash in between leaves no hole."""
    for base in reversed(bases):
        for path in Segment(disk, directory, base_offset=base, files=files).mark_deleted():
            disk.remove(path)
