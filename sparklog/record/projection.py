"""Projection: a batch with only some of its columns, made without decoding values, for consumers that need few columns.

In the body of a RecordBatch message the buffers of a column are adjacent, and each buffer is compressed separately or
not at all. So a projection takes the bytes of the chosen columns unchanged, and puts new metadata before them
(``batch_metadata``). The bytes of adjacent columns are one piece. Large projections are not copied: their pieces are
views of the stored batch.

A projected batch has its own header, with ``Flag.PROJECTED``, its length and its CRC. A projected batch is never
stored: followers do not receive it, and producers must not send it. This module is pure.

The CRC of a projected batch must cover only bytes that were verified against the producer's CRC. The bytes of a short
batch are first verified and then read again for the new CRC. For a long batch, the verification also records running
CRCs: the CRC of all bytes up to the beginning and the end of each column. From the running CRCs, arithmetic gives the
CRC of any choice of columns. If the caller keeps the running CRCs, the next projection need not read the columns at
all. If the bytes on disk have changed in the meantime, the consumer detects the wrong CRC.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.batch_metadata import record_batch_metadata
from sparklog.record.checksum import Following, crc32c, crc32c_extended
from sparklog.record.codec import compare_body_crc, read_record_batch, verify_body_crc
from sparklog.record.flatbuffer import malformed
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.layout import layout_of
from sparklog.record.message import (
    ALIGNMENT,
    NOT_COMPRESSED,
    BatchMessage,
    read_batch_message,
    read_metadata_length,
)

#: A message of at most this size is joined into one piece, because sending several pieces takes longer.
_ONE_PIECE_BYTES = 64 * 1024
#: A run of at least this size is not read again for the new CRC, because arithmetic is faster.
_LONG_BYTES = 256 * 1024
#: The minimum size of a batch whose running CRCs are kept. Verifying a shorter batch again is as fast.
_KEPT_BYTES = 256 * 1024
#: The minimum average size of the columns of a batch whose running CRCs are kept. With shorter columns the CRCs would
#: save no time.
_COLUMN_BYTES = 16 * 1024
#: The number of bytes whose verification takes as long as the arithmetic for one run.
RUN_BYTES = 128 * 1024

#: The CRCs of a stored batch from its beginning up to these positions: the end of the message's metadata, the beginning
#: and the end of each column, and the end of the message. The CRC of the whole batch is in the header.
RunningCrcs: TypeAlias = "array[int]"


class ColumnSpan(NamedTuple):
    """A span of adjacent columns of a schema, with the nodes and buffers that they have in a message.

    Each field is a half-open range of numbers.
    """

    columns: tuple[int, int]
    nodes: tuple[int, int]
    buffers: tuple[int, int]


class Projection(NamedTuple):
    """A plan for projecting batches of one schema: the chosen columns, in the schema's order."""

    spans: tuple[ColumnSpan, ...]
    #: The numbers of the chosen columns in the schema.
    columns: tuple[int, ...]
    #: The number of nodes and of buffers of a message with all columns.
    nodes: int
    buffers: int
    #: The number of the first buffer of each column of the schema, and at the end the number of buffers.
    first_buffers: tuple[int, ...]


class _Piece(NamedTuple):
    """A piece of a projected message: new bytes, or the bytes that begin at ``start`` in the stored batch."""

    content: bytes | memoryview
    start: int = -1

    @property
    def end(self) -> int:
        return self.start + len(self.content)


class ProjectedBatch(NamedTuple):
    """A projected batch: its complete header, and its ``header.stored_bytes`` bytes in pieces.

    The pieces may be views of the stored batch.
    """

    header: BatchHeader
    pieces: tuple[bytes | memoryview, ...]
    #: The running CRCs of the stored batch, if they are worth keeping.
    running: RunningCrcs | None = None
    #: The positions and lengths, in the stored batch, of the bytes that will be sent and were not read yet.
    unread: tuple[tuple[int, int], ...] = ()

    @property
    def body(self) -> bytes:
        """Return the bytes of the projected batch in one piece."""
        return b"".join(self.pieces)


def projected_schema(schema: pa.Schema, columns: Collection[str]) -> pa.Schema:
    """Return the schema of projected batches: those fields of ``schema`` that are in ``columns``, in the same order."""
    return pa.schema([field for field in schema if field.name in columns])


def plan_projection(schema: pa.Schema, columns: Collection[str]) -> Projection:
    """Return the plan of a projection to ``columns``. Names that ``schema`` does not have are ignored."""
    layout = layout_of(schema)
    starts: list[tuple[int, int]] = []
    buffers = 0
    for number, node in enumerate(layout.nodes):
        if node.top:
            starts.append((number, buffers))
        buffers += node.buffers
    ends = [*starts[1:], (len(layout.nodes), buffers)]
    chosen = tuple(number for number, name in enumerate(schema.names) if name in columns)
    spans: list[ColumnSpan] = []
    for number in chosen:
        first = number
        if spans and spans[-1].columns[1] == number:
            first = spans.pop().columns[0]
        nodes, own = zip(starts[first], ends[number], strict=True)
        spans.append(ColumnSpan((first, number + 1), nodes, own))
    firsts = (*(first for _, first in starts), layout.buffers)
    return Projection(tuple(spans), chosen, len(layout.nodes), layout.buffers, firsts)


def project_batch(
    header: BatchHeader, body: memoryview, plan: Projection, kept: RunningCrcs | None = None
) -> ProjectedBatch:
    """Return the batch with only the columns of ``plan``.

    If the plan has no columns, only the header and the offset array remain. ``body`` is the stored batch of
    ``header.stored_bytes`` bytes.

    ``kept`` are the running CRCs that an earlier projection of this batch returned, with a plan of the same schema.
    With them, this function reads no columns and verifies only the message's metadata. If the metadata has changed, the
    function verifies the whole batch.

    Raises:
        BrokerError: CORRUPT_MESSAGE if the stored batch has a wrong CRC or does not fit its schema.
    """
    checked = body[: header.length + header.offset_array_length]
    offset_array = body[header.length : header.stored_bytes]
    if not plan.spans or header.flags & Flag.CONTROL:
        verify_body_crc(header, checked)
        return _sealed(header, [], offset_array, {})
    stored = body[: header.length]
    try:
        if kept is not None and not _is_of(kept, header, stored, plan):
            kept = None
        whole = read_batch_message(stored)
        message = _project_message(whole, stored, plan)
    except BrokerError:
        verify_body_crc(header, checked)  # If the batch is damaged, raise the error of the CRC instead.
        raise
    if kept is not None:
        unread = tuple((piece.start, len(piece.content)) for piece in message if piece.start >= 0)
        edges = _edges_of(kept, header, message, plan)
        return _sealed(header, message, offset_array, edges, unread=True)._replace(running=kept, unread=unread)
    if not _is_worth_keeping(header, plan):
        long = [piece for piece in message if piece.start >= 0 and len(piece.content) >= _LONG_BYTES]
        places = [place for piece in long for place in (piece.start, piece.end)]
        return _sealed(header, message, offset_array, _verify(header, checked, places))
    places = _places(header, whole, plan)
    running = _verify(header, checked, places)
    return _sealed(header, message, offset_array, running)._replace(
        running=array("I", [running[place] for place in places])
    )


def _is_worth_keeping(header: BatchHeader, plan: Projection) -> bool:
    columns = len(plan.first_buffers) - 1
    return header.length >= max(_KEPT_BYTES, columns * _COLUMN_BYTES, len(plan.spans) * RUN_BYTES)


def _is_of(kept: RunningCrcs, header: BatchHeader, stored: memoryview, plan: Projection) -> bool:
    """Return whether ``kept`` belongs to this message, and using it is faster than verifying the batch.

    The metadata must have the recorded CRC, and the number of CRCs must fit the schema. If the plan has many runs, the
    arithmetic would take longer than the verification.
    """
    return (
        len(kept) == 2 * len(plan.first_buffers)
        and len(plan.spans) * RUN_BYTES <= header.length
        and crc32c(stored[: read_metadata_length(stored)]) == kept[0]
    )


def _places(header: BatchHeader, whole: BatchMessage, plan: Projection) -> list[int]:
    """Return the positions in the stored batch up to which ``RunningCrcs`` are computed.

    A column without bytes begins where the next column with bytes begins, and ends where the previous one ends. So a
    run begins where its first column begins, and ends where its last column ends.
    """
    starts: list[int] = []
    ends: list[int] = []
    for first, end in pairwise(plan.first_buffers):
        own = [buffer for buffer in whole.buffers[first:end] if buffer[1]]
        starts.append(whole.metadata_length + own[0][0] if own else header.length)
        ends.append(whole.metadata_length + sum(own[-1]) if own else 0)
    starts = [*accumulate(reversed(starts), min)][::-1]
    ends = [*accumulate(ends, max, initial=whole.metadata_length)][1:]
    edges = chain.from_iterable(zip(starts, ends, strict=True))
    return [whole.metadata_length, *edges, header.length]


def _edges_of(kept: RunningCrcs, header: BatchHeader, message: Sequence[_Piece], plan: Projection) -> dict[int, int]:
    """Return the running CRCs up to the beginning and the end of each run, and up to the end of the stored message.

    The keys of the result are positions in the stored batch.
    """
    found = {header.length: kept[-1]}
    for span, piece in zip(plan.spans, (piece for piece in message if piece.start >= 0), strict=True):
        if len(piece.content):
            found[piece.start] = kept[1 + 2 * span.columns[0]]
            found[piece.end] = kept[2 * span.columns[1]]
    return found


def _verify(header: BatchHeader, checked: memoryview, places: Iterable[int]) -> dict[int, int]:
    """Verify ``checked``, and return the running CRCs up to ``places``. The bytes are read once.

    Raises:
        BrokerError: CORRUPT_MESSAGE.
    """
    crc = at = 0
    found: dict[int, int] = {}
    for place in sorted(set(places)):
        found[place] = crc = crc32c_extended(crc, checked[at:place])
        at = place
    compare_body_crc(header, crc32c_extended(crc, checked[at:]))
    return found


def read_columns(
    header: BatchHeader, body: memoryview, schema: pa.Schema, plan: Projection
) -> tuple[pa.RecordBatch, int]:
    """Return the columns of ``plan`` from a batch in a mapped file, and the number of bytes that were read.

    ``schema`` is the schema of the whole batch. Only the message's metadata and the columns of ``plan`` are read. The
    checksum is not verified, because it covers the whole batch. A damaged column may have wrong values, but it does no
    other harm, because the columns are validated. Uncompressed columns are views of ``body``.

    Raises:
        BrokerError: CORRUPT_MESSAGE if the message or a column is invalid, or does not fit the header or the schema.
    """
    stored = body[: header.length]
    whole = read_batch_message(stored)
    names = [schema.names[number] for number in plan.columns]
    if whole.codec == NOT_COMPRESSED:
        records = read_record_batch(pa.py_buffer(stored), schema).select(names)
    else:
        records = read_record_batch(
            pa.py_buffer(b"".join(piece.content for piece in _project_message(whole, stored, plan))),
            projected_schema(schema, names),
        )
    try:
        records.validate(full=True)
    except pa.ArrowInvalid as error:
        raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"a damaged column: {str(error)[:200]}") from None
    if records.num_rows != header.record_count:
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE, f"{records.num_rows} records found, {header.record_count} expected"
        )
    sizes = (size for span in plan.spans for _, size in whole.buffers[slice(*span.buffers)])
    return records, whole.metadata_length + sum(sizes)


def header_alone(header: BatchHeader) -> ProjectedBatch:
    """Return the projection of a batch to no columns. The batch must have no offset array."""
    assert not header.offset_array_length, header
    return _sealed(header, [], memoryview(b""), {})


def _project_message(whole: BatchMessage, source: memoryview, plan: Projection) -> list[_Piece]:
    """Return the pieces of the projected message, in order. Column pieces are views of ``source``."""
    if len(whole.nodes) != plan.nodes or len(whole.buffers) != plan.buffers:
        raise malformed(
            f"{len(whole.nodes)} columns with {len(whole.buffers)} buffers found, {plan.nodes} with {plan.buffers} "
            "expected (nested columns included)"
        )
    nodes: list[tuple[int, int]] = []
    buffers: list[tuple[int, int]] = []
    runs: list[_Piece] = []
    length = 0
    for span in plan.spans:
        nodes += whole.nodes[slice(*span.nodes)]
        own = whole.buffers[slice(*span.buffers)]
        start = min((offset for offset, size in own if size), default=0)
        end = max((offset + size for offset, size in own if size), default=0)
        buffers += [(offset - start + length if size else length, size) for offset, size in own]
        padding = -(end - start) % ALIGNMENT
        place = whole.metadata_length + start
        runs.append(_Piece(source[place : whole.metadata_length + end], place))
        if padding:
            runs.append(_Piece(bytes(padding)))
        length += end - start + padding
    metadata = record_batch_metadata(whole.rows, nodes=nodes, buffers=buffers, codec=whole.codec, body_length=length)
    return [_Piece(metadata), *runs]


def _sealed(
    header: BatchHeader,
    message: Sequence[_Piece],
    offset_array: memoryview,
    running: Mapping[int, int],
    *,
    unread: bool = False,
) -> ProjectedBatch:
    """Return the projected batch with its CRC and complete header.

    ``running`` has CRCs of the stored batch up to some positions. If it has both ends of a piece, the piece's CRC is
    computed from them. Other pieces are read, so they must just have been verified. ``unread`` means that the pieces
    were not read, and perhaps are not in memory. Then short pieces are not joined either.
    """
    crc = 0
    for piece in message:
        if piece.start in running and piece.end in running:
            crc = _joined(crc, running[piece.start], running[piece.end], len(piece.content))
        else:
            crc = crc32c_extended(crc, piece.content)
    array_bytes = header.offset_array_length
    if array_bytes and header.length in running:
        crc = _joined(crc, running[header.length], header.body_crc, array_bytes)
    else:
        crc = crc32c_extended(crc, offset_array[:array_bytes])
    pieces = tuple(piece.content for piece in message)
    length = sum(map(len, pieces))
    if len(pieces) > 1 and length <= _ONE_PIECE_BYTES and not unread:
        pieces = (b"".join(pieces),)
    if len(offset_array):
        pieces = (*pieces, bytes(offset_array))
    flags = header.flags | Flag.PROJECTED
    return ProjectedBatch(header._replace(length=length, body_crc=crc, flags=flags), pieces)


def _joined(crc: int, before: int, after: int, length: int) -> int:
    """Return ``crc`` extended by a piece of ``length`` bytes.

    ``before`` and ``after`` are the running CRCs of the stored batch at the beginning and the end of the piece.
    """
    return Following.of(length).joined(crc ^ before, after)
