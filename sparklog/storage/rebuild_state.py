"""The rebuilding of a log's leader epochs and producers during recovery.

Recovery reads the leader epochs and producers from state files as far as these files are trusted. For the rest of the
log, it reads them from the batch headers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from sparklog.errors import BrokerError, StorageError
from sparklog.record.header import BatchHeader, Flag, unpack_header
from sparklog.record.marker import Marker, decode_marker
from sparklog.storage.disk import Disk, read_file
from sparklog.storage.epochs import EPOCHS_FILE, EpochCache, EpochFile
from sparklog.storage.formats import NewerFormatError, decode_state
from sparklog.storage.producers import SNAPSHOT_SUFFIX, ProducerSnapshot, ProducerTable, from_snapshot, replay
from sparklog.storage.segment import Segment, file_stem

logger = logging.getLogger(__name__)

_STEM_DIGITS = len(file_stem(0))
_CONTROL = int(Flag.CONTROL)

#: The headers of each segment, by the segment's base offset.
SegmentHeaders = Mapping[int, Sequence[BatchHeader]]


def derive_state(
    disk: Disk,
    directory: Path,
    segments: list[Segment],
    *,
    headers: SegmentHeaders,
    snapshots: list[int],
    has_epochs: bool,
    recovery_point: int | None,
) -> tuple[EpochCache, ProducerTable, list[int]]:
    """Return the leader epochs and the producers of a log, and the offsets of the snapshots that remain on disk.

    State files that do not match the log are removed durably, for example if the log was longer when they were written.
    Otherwise a later start would trust them after the log has grown to the same length again. ``has_epochs`` means that
    the file ``leader-epochs`` exists. ``recovery_point`` is the offset below which that file may be trusted. None
    means that the file must not be trusted.

    Raises:
        BrokerError, StorageError: the data on disk is damaged.
    """
    trusted = None
    if has_epochs and recovery_point is not None:
        trusted = _trusted_epochs(disk, directory, segments, recovery_point=recovery_point)
    epochs = epochs_of(directory, segments, headers) if trusted is None else trusted
    stale = [directory / EPOCHS_FILE] if has_epochs and trusted is None else []
    end = segments[-1].end_offset if segments else 0
    kept = [offset for offset in snapshots if offset <= end]
    producers, used = load_producers(disk, directory, segments, snapshots=kept, headers=headers)
    # An unreadable snapshot, or one above the log's end, must not be used by a later start.
    stale += [snapshot_path(directory, offset) for offset in snapshots if offset > end or offset > used]
    stale = [path for path in stale if disk.exists(path)]
    for path in stale:
        disk.remove(path)
    if stale:
        disk.sync_directory(directory)
    return epochs, producers, [offset for offset in kept if offset <= used]


def _trusted_epochs(disk: Disk, directory: Path, segments: list[Segment], *, recovery_point: int) -> EpochCache | None:
    """Return the leader epochs: below the recovery point from ``leader-epochs``, above it from the headers.

    The file must have the epoch of the first batch of each segment. Return None if the file is unusable, or belongs to
    another log or to a longer one.
    """
    if not segments:
        return None
    path = directory / EPOCHS_FILE
    try:
        content = decode_state(read_file(disk, path), EpochFile, path=path)
        if content.through > segments[-1].end_offset:
            raise ValueError(
                f"it covers offsets up to {content.through}, but the log ends at {segments[-1].end_offset}"
            )
        epochs = EpochCache(content.entries)
        through = min(content.through, recovery_point)
        epochs.truncate(through)
        epochs.advance_start(segments[0].base_offset)
        for segment in segments:
            expected = segment.header(0).leader_epoch
            if segment.base_offset < through and epochs.epoch_at(segment.base_offset) != expected:
                raise ValueError(f"epoch {expected} at offset {segment.base_offset} is not in it")
        _add_epochs(epochs, segments, through=through, known={})
        return epochs
    except FileNotFoundError:
        pass
    except NewerFormatError:
        raise
    except (StorageError, ValueError) as failure:
        logger.warning("%s: not usable (%s), the batches are read instead", path, failure)
    return None


def epochs_of(directory: Path, segments: list[Segment], known: SegmentHeaders) -> EpochCache:
    """Return the leader epochs according to the batch headers. The headers in ``known`` are not read again."""
    epochs = EpochCache()
    try:
        _add_epochs(epochs, segments, through=0, known=known)
    except ValueError as failure:
        raise StorageError(f"{directory}: {failure}") from failure
    return epochs


def _add_epochs(epochs: EpochCache, segments: list[Segment], *, through: int, known: SegmentHeaders) -> None:
    """Record the epochs of all batches from offset ``through`` on."""
    for segment in segments:
        if segment.end_offset <= through:
            continue
        if segment.base_offset in known:
            for header in known[segment.base_offset]:
                if header.base_offset >= through:
                    epochs.assign(header.leader_epoch, header.base_offset)
            continue
        headers = segment.headers()
        headers = headers[headers["base_offset"] >= through]
        column = headers["leader_epoch"]
        changes = (column[1:] != column[:-1]).nonzero()[0] + 1
        for at in [0, *changes.tolist()] if len(headers) else []:
            epochs.assign(int(column[at]), int(headers["base_offset"][at]))


def load_producers(
    disk: Disk,
    directory: Path,
    segments: list[Segment],
    *,
    snapshots: Sequence[int],
    headers: SegmentHeaders = MappingProxyType({}),
) -> tuple[ProducerTable, int]:
    """Return the producers, and the offset of the snapshot that was used, or -1 if none was used.

    The producers are read from the newest readable snapshot at or below the log's end, and from the headers of later
    batches. The headers in ``headers`` are not read again. Snapshots between the returned offset and the log's end are
    unreadable.
    """
    if not segments:
        return ProducerTable(), max(snapshots, default=-1)
    end = segments[-1].end_offset
    table, start, used = ProducerTable(), segments[0].base_offset, -1
    for offset in sorted(snapshots, reverse=True):
        if offset > end:
            continue
        path = snapshot_path(directory, offset)
        try:
            table = from_snapshot(decode_state(read_file(disk, path), ProducerSnapshot, path=path))
            start = used = offset
            if start < segments[0].base_offset:
                table.transactions.drop_open()  # Their markers may be among deleted batches.
            break
        except NewerFormatError:
            raise
        except StorageError as failure:
            logger.warning("%s; an older one is used", failure)
    for segment in segments:
        if segment.end_offset > start:
            known = headers.get(segment.base_offset)
            found = _read_batches(segment, start) if known is None else _known_batches(segment, known, start)
            replay(table, found)
    table.transactions.drop_below(segments[0].base_offset)
    return table, used


def _read_batches(segment: Segment, start: int) -> Iterator[tuple[BatchHeader, Marker | None]]:
    """Yield the batches of idempotent producers from offset ``start`` on, and the markers with their content."""
    headers = segment.headers()
    control = headers["flags"] & _CONTROL != 0
    wanted = (headers["base_offset"] >= start) & ((headers["producer_id"] >= 0) | control)
    for at in wanted.nonzero()[0].tolist():
        header = unpack_header(headers[at : at + 1].tobytes())
        yield header, _marker(segment, at, header) if control[at] else None


def _known_batches(
    segment: Segment, headers: Sequence[BatchHeader], start: int
) -> Iterator[tuple[BatchHeader, Marker | None]]:
    """Do what ``_read_batches`` does, for a segment whose ``headers`` are all known."""
    for at, header in enumerate(headers):
        control = header.flags & _CONTROL
        if header.base_offset >= start and (control or header.producer_id >= 0):
            yield header, _marker(segment, at, header) if control else None


def _marker(segment: Segment, batch: int, header: BatchHeader) -> Marker:
    try:
        return decode_marker(header, segment.read(batch, batch + 1)[1])
    except BrokerError as error:
        raise StorageError(f"{segment.data_path}: {error}") from error


def snapshot_offsets(names: Iterable[str]) -> list[int]:
    """Return the offsets of the producer snapshots among the file names of a log's directory, in ascending order."""
    return sorted(
        int(name[:_STEM_DIGITS])
        for name in names
        if name.endswith(SNAPSHOT_SUFFIX) and len(name) == _STEM_DIGITS + len(SNAPSHOT_SUFFIX)
    )


def snapshot_path(directory: Path, offset: int) -> Path:
    return directory / (file_stem(offset) + SNAPSHOT_SUFFIX)
