"""A batch cut down to some of its columns, without decoding a value: what a reader that wants few columns is sent.

The buffers of a column lie next to each other in the body of a RecordBatch message, compressed each for itself or not
at all. So a projection takes the bytes of the chosen columns as they are, one run for columns that are neighbours, and
writes a new message in front of them (``batch_metadata``). Long runs are not copied.

A projected batch has a header of its own, with ``Flag.PROJECTED``, the length of what is left and its CRC. It is never
stored: followers are not sent any, and none is taken from a producer. The CRC of long runs comes from the pass over the
stored batch that verifies it, so it is of the very bytes that were verified. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.batch_metadata import record_batch_metadata
from sparklog.record.checksum import Following, crc32c_extended
from sparklog.record.codec import compare_body_crc, read_record_batch, verify_body_crc
from sparklog.record.flatbuffer import malformed
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.layout import layout_of
from sparklog.record.message import ALIGNMENT, NOT_COMPRESSED, BatchMessage, read_batch_message

#: Messages up to this size are copied into one piece: less work than sending their pieces.
_ONE_PIECE_BYTES = 64 * 1024
#: Runs from this size on are not read a second time for the CRC of what is sent: arithmetic takes less time.
_LONG_BYTES = 256 * 1024


class ColumnSpan(NamedTuple):
    """Where columns that are neighbours in a schema are in its messages: half-open ranges of nodes and of buffers."""

    nodes: tuple[int, int]
    buffers: tuple[int, int]


class Projection(NamedTuple):
    """The chosen columns of one schema, in the schema's order."""

    spans: tuple[ColumnSpan, ...]
    #: Their numbers in the schema.
    columns: tuple[int, ...]
    #: Nodes and buffers of a whole message.
    nodes: int
    buffers: int


class _Piece(NamedTuple):
    """Of a projected message: bytes made for it, or those that begin at ``start`` in the stored batch."""

    content: bytes | memoryview
    start: int = -1


class ProjectedBatch(NamedTuple):
    """A batch as it is sent: a sealed header, and ``header.stored_bytes`` bytes in pieces, which may be views of the
    stored batch."""

    header: BatchHeader
    pieces: tuple[bytes | memoryview, ...]

    @property
    def body(self) -> bytes:
        """The pieces in one."""
        return b"".join(self.pieces)


def projected_schema(schema: pa.Schema, columns: Collection[str]) -> pa.Schema:
    """Those fields of ``schema`` that are among ``columns``, in its order; the others are not in its batches."""
    return pa.schema([field for field in schema if field.name in columns])


def plan_projection(schema: pa.Schema, columns: Collection[str]) -> Projection:
    """Which nodes and buffers the ``columns`` have; names that ``schema`` does not have are passed over."""
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
        first = starts[number]
        if spans and spans[-1].nodes[1] == first[0]:
            last = spans.pop()
            first = last.nodes[0], last.buffers[0]
        spans.append(ColumnSpan((first[0], ends[number][0]), (first[1], ends[number][1])))
    return Projection(tuple(spans), chosen, len(layout.nodes), layout.buffers)


def project_batch(header: BatchHeader, body: memoryview, plan: Projection) -> ProjectedBatch:
    """The batch with the columns of ``plan`` alone; without any, its header and its offset array.

    ``body`` is the batch as stored, ``header.stored_bytes`` long.

    Raises:
        BrokerError: CORRUPT_MESSAGE when the stored batch fails its CRC or contradicts its schema.
    """
    checked = body[: header.length + header.offset_array_length]
    offset_array = body[header.length : header.stored_bytes]
    if not plan.spans or header.flags & Flag.CONTROL:
        verify_body_crc(header, checked)
        return _sealed(header, [], offset_array, {})
    stored = body[: header.length]
    try:
        message = _project_message(read_batch_message(stored), stored, plan)
    except BrokerError:
        verify_body_crc(header, checked)  # of damage the CRC is what is told
        raise
    return _sealed(header, message, offset_array, _verify(header, checked, message))


def _verify(header: BatchHeader, checked: memoryview, message: Sequence[_Piece]) -> dict[int, tuple[Following, int]]:
    """Verify ``checked``, and on the one way through it take the CRCs of long runs, by their number in ``message``.

    Raises:
        BrokerError: CORRUPT_MESSAGE.
    """
    found = at = 0
    long: dict[int, tuple[Following, int]] = {}
    for number, piece in enumerate(message):
        size = len(piece.content)
        if piece.start < at or size < _LONG_BYTES:
            continue
        before = crc32c_extended(found, checked[at : piece.start])
        found = crc32c_extended(before, piece.content)
        at = piece.start + size
        following = Following.of(size)
        long[number] = following, following.joined(before, found)
    compare_body_crc(header, crc32c_extended(found, checked[at:]))
    return long


def read_columns(
    header: BatchHeader, body: memoryview, schema: pa.Schema, plan: Projection
) -> tuple[pa.RecordBatch, int]:
    """The columns of ``plan`` out of a batch in a file that is mapped, and how many bytes were looked at for it: those
    of the message's metadata and of these columns, no others. ``schema``: of the whole batch.

    The checksum is of the whole batch and so is not verified. What is damaged may show as other values; it is no harm
    beyond that, as columns are validated. Those that are not compressed are views of ``body``.

    Raises:
        BrokerError: CORRUPT_MESSAGE when the message or a column contradicts itself, the header or the schema.
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
    """The batch without any column; only for batches whose offsets are dense."""
    assert not header.offset_array_length, header
    return _sealed(header, [], memoryview(b""), {})


def _project_message(whole: BatchMessage, source: memoryview, plan: Projection) -> list[_Piece]:
    """The message in pieces, those of columns views of ``source``, in its order."""
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
    long: Mapping[int, tuple[Following, int]],
) -> ProjectedBatch:
    """``long``: as ``_verify`` returns it."""
    length = sum(len(piece.content) for piece in message)
    if len(message) > 1 and length <= _ONE_PIECE_BYTES:
        message = [_Piece(b"".join(piece.content for piece in message))]
    crc = 0
    for number, piece in enumerate(message):
        if number in long:
            following, own = long[number]
            crc = following.joined(crc, own)
        else:
            crc = crc32c_extended(crc, piece.content)
    crc = crc32c_extended(crc, offset_array[: header.offset_array_length])
    pieces = tuple(piece.content for piece in message)
    if len(offset_array):
        pieces = (*pieces, bytes(offset_array))
    flags = header.flags | Flag.PROJECTED
    return ProjectedBatch(header._replace(length=length, body_crc=crc, flags=flags), pieces)
