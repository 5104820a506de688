"""The check of one segment's files during recovery, which counts the intact batches from the first one on.

This module only reads. ``recovery`` keeps the intact batches and truncates the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparklog.errors import BrokerError, StorageError
from sparklog.record.checksum import crc32c
from sparklog.record.footer import BLOCK_DTYPE, arrow_footer, arrow_prelude, schema_of_prelude
from sparklog.record.header import FORMAT_VERSION, HEADER_BYTES, BatchHeader, Flag, header_array, unpack_header
from sparklog.record.schema import MAX_SCHEMA_BYTES, parse_schema
from sparklog.storage.append_plan import NO_MAXIMUM
from sparklog.storage.formats import NewerFormatError
from sparklog.storage.sealing import footer_of
from sparklog.storage.segment import Segment

logger = logging.getLogger(__name__)

#: The format version is in the high bits of a header's flags. A test checks that ``record.header`` has the same number.
_VERSION_SHIFT = 12
#: The position, in a header, of the byte with the version: the upper byte of the flags, before the CRC.
_VERSION_AT = HEADER_BYTES - 5
_FIRST = int(Flag.FIRST_OF_SEGMENT)
_MAX_PRELUDE_BYTES = MAX_SCHEMA_BYTES + 64
#: Reading a file of at most this size is faster than mapping it.
_SMALL_BYTES = 64 * 1024


class Scan(NamedTuple):
    """The result of the check of one segment: its intact batches, from the first one on."""

    #: The headers that were checked, which include the headers of the first and the last intact batch.
    headers: list[BatchHeader]
    #: The number of intact batches.
    whole: int
    #: The reason why the next batch is not intact. Empty: all batches are intact.
    failure: str
    #: Whether the right footer follows the last batch.
    sealed: bool = False

    @property
    def complete(self) -> bool:
        """Return whether ``headers`` has the header of every intact batch."""
        return len(self.headers) == self.whole


def outline(segment: Segment, data: int, index: int, *, schemas: Mapping[int, bytes]) -> Scan | None:
    """Check an fsynced segment quickly: the sizes of its files, its first header and its last header.

    Return None if the sizes and headers do not match. Then the caller must check the batches with ``scan``.
    """
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
    return Scan([first, last], count, "", sealed=tail > 0)


def scan(
    segment: Segment, data: int, packed: bytes, *, data_bytes: int, schemas: Mapping[int, bytes], fsynced_below: int
) -> Scan:
    """Check the batches of a segment. If all are intact, compare the bytes after them with the expected footer.

    Of the batches that end at or below ``fsynced_below`` only the first and the last are checked, unless one of these
    two is damaged.
    """
    disk = segment.disk
    if data_bytes <= _SMALL_BYTES:
        mapped = memoryview(disk.read(data, data_bytes, 0))
    else:
        mapped = disk.map(data, data_bytes)
    skip = 0
    if segment.base_offset < fsynced_below:
        headers = header_array(packed)
        skip = int((headers["base_offset"] + headers["offset_span"] <= fsynced_below).cumprod().sum())
    found = _scan(segment.base_offset, packed, mapped, schemas=schemas, skip=skip)
    if found.failure or not found.headers:
        return found
    last = found.headers[-1]
    tail = mapped[last.position + last.stored_bytes :]
    if not tail:
        return found
    footer = footer_of(header_array(packed), mapped, schema_message=schemas[last.schema_id])
    return found._replace(sealed=bool(footer) and tail == footer)


def learn_schema(segment: Segment, data: int, packed: bytes, schemas: dict[int, bytes]) -> None:
    """Read the schema at the beginning of a segment and add it to ``schemas``, unless it is known or unreadable.

    ``packed`` has the segment's packed headers, beginning with the first one.
    """
    try:
        first = unpack_header(packed)
        if first.schema_id in schemas:
            return
        message = schema_of_prelude(segment.disk.read(data, min(first.position, _MAX_PRELUDE_BYTES), 0))
        parse_schema(message)
    except BrokerError as error:
        logger.warning("%s: found no schema at the front: %s", segment.data_path, error)
    else:
        schemas[first.schema_id] = message


def _scan(base_offset: int, packed: bytes, data: memoryview, *, schemas: Mapping[int, bytes], skip: int) -> Scan:
    """Find the intact batches of a segment.

    The first ``skip`` batches were fsynced, and only the first and the last of them are checked. If these two do not
    agree, all batches are checked.
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
            return Scan(headers, number, f"batch {number} of segment {base_offset}, offset {end}: {failure}")
        headers.append(header)
        end, position, last_epoch = header.next_offset, position + header.stored_bytes, header.leader_epoch
    return Scan(headers, count, "")


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
    """Return the position of the first batch, or 0, which no batch has, if the file does not begin with its schema."""
    if header.schema_id not in schemas:
        return 0
    prelude = arrow_prelude(schemas[header.schema_id])
    return len(prelude) if data[: len(prelude)] == prelude else 0


def refuse_newer(path: Path, packed: bytes) -> None:
    """Raise NewerFormatError if a header with a valid CRC has a newer format version.

    Such a header is not damaged.
    """
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
