"""A parser, without Arrow, of encapsulated Arrow IPC messages: their layout, and the content that they declare.

::

    u32 0xFFFFFFFF | i32 n | n bytes of flatbuffer, zeros up to 8 | body, a multiple of 8
    '---- metadata_length = 8 + n ----------------------------'

With this parser the broker checks sizes and positions before native code uses them. Source: Arrow columnar format,
"Encapsulated message format"; format/Message.fbs and Schema.fbs of Arrow.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from sparklog.record.flatbuffer import LONG, SHORT, UBYTE, ReadOnly, Table, malformed, root_table
from sparklog.record.header import BatchHeader, Flag

CONTINUATION = 0xFFFFFFFF
PREFIX_BYTES = 8
ALIGNMENT = 8
_PREFIX = struct.Struct("<Ii")
_PAIR = struct.Struct("<qq")
_I64 = struct.Struct("<q")

#: Arrow's MetadataVersion V5, which is current since Arrow 1.0. V4 encodes compression in another way.
METADATA_V5 = 4
#: The maximum size of metadata that is cached. The metadata of a batch of about twenty columns has this size.
_SMALL_METADATA_BYTES = 2048

# Message: version, header type, header, body length, custom metadata
_VERSION, _HEADER_TYPE, _HEADER, _BODY_LENGTH, _CUSTOM_METADATA = 0, 1, 2, 3, 4
# KeyValue: key, value
_KEY, _VALUE = 0, 1
_SCHEMA, RECORD_BATCH = 1, 3
_COMPRESSED = int(Flag.LZ4 | Flag.ZSTD)
_HEADER_NAMES = {0: "none", 1: "Schema", 2: "DictionaryBatch", 3: "RecordBatch", 4: "Tensor", 5: "SparseTensor"}
# RecordBatch: length, nodes, buffers, compression, variadic buffer counts
_ROWS, _NODES, _BUFFERS, _COMPRESSION, _VARIADIC = 0, 1, 2, 3, 4
# BodyCompression: codec, method
_CODEC, _METHOD = 0, 1

NOT_COMPRESSED = -1
LZ4_FRAME = 0
ZSTD = 1


class BatchMessage(NamedTuple):
    """The content that a RecordBatch message declares. Sizes are in bytes.

    All buffers are inside the body, in order and without overlap.
    """

    rows: int
    #: (length, null count) of every column and nested column, depth first.
    nodes: tuple[tuple[int, int], ...]
    #: (offset, length) of every buffer, relative to the body's start.
    buffers: tuple[tuple[int, int], ...]
    #: NOT_COMPRESSED, LZ4_FRAME or ZSTD.
    codec: int
    #: The number of counts of variadic buffers: one for each column of a view type.
    variadic_counts: int
    metadata_length: int
    body_length: int


def read_batch_message(source: ReadOnly) -> BatchMessage:
    """Read ``source``, which must be exactly one RecordBatch message, padded to a multiple of 8 bytes.

    Raises:
        BrokerError: CORRUPT_MESSAGE if it is another kind of message, or has another length than it declares; also if a
            buffer is outside the body, is not aligned to 8 bytes, or overlaps another one.
    """
    metadata_length = read_metadata_length(source)
    read = _read_small if metadata_length <= _SMALL_METADATA_BYTES else _read
    return read(bytes(source[PREFIX_BYTES:metadata_length]), metadata_length, len(source))


def _read(flatbuffer: bytes, metadata_length: int, message_length: int) -> BatchMessage:
    message = _message_of(flatbuffer, RECORD_BATCH)
    body_length = message.scalar(_BODY_LENGTH, LONG)
    if metadata_length + body_length != message_length:
        raise malformed(f"metadata of {metadata_length} and body of {body_length} bytes in {message_length} bytes")
    if body_length % ALIGNMENT:
        # Otherwise every later batch of the file would begin at a position where Arrow cannot read it.
        raise malformed(f"a body of {body_length} bytes, expected a multiple of {ALIGNMENT}")
    batch = message.table(_HEADER)
    if batch is None:
        raise malformed("a RecordBatch message without a record batch")
    return BatchMessage(
        rows=batch.scalar(_ROWS, LONG),
        nodes=_pairs(batch, _NODES),
        buffers=_checked_buffers(_pairs(batch, _BUFFERS), body_length),
        codec=_codec(batch),
        variadic_counts=_count(batch, _VARIADIC, LONG.size),
        metadata_length=metadata_length,
        body_length=body_length,
    )


#: Batches with the same number of records of the same sizes have the same metadata, which is parsed only once.
_read_small = lru_cache(maxsize=256)(_read)


def read_message_length(source: ReadOnly) -> int:
    """Return the length that the RecordBatch message at the beginning of ``source`` declares.

    Raises:
        BrokerError: CORRUPT_MESSAGE if ``source`` does not begin with such a message, or is shorter than the message.
    """
    metadata_length = read_metadata_length(source)
    body_length = _message_of(bytes(source[PREFIX_BYTES:metadata_length]), RECORD_BATCH).scalar(_BODY_LENGTH, LONG)
    if not 0 <= body_length <= len(source) - metadata_length:
        raise malformed(f"a body of {body_length} bytes in {len(source) - metadata_length} bytes")
    return metadata_length + int(body_length)


def read_custom_metadata(source: ReadOnly) -> dict[bytes, bytes]:
    """Return the keys and values of a RecordBatch message's custom metadata.

    Raises:
        BrokerError: CORRUPT_MESSAGE if ``source`` is not a RecordBatch message, or its metadata is damaged.
    """
    message = _message_of(source[PREFIX_BYTES : read_metadata_length(source)], RECORD_BATCH)
    return {pair.text(_KEY): pair.text(_VALUE) for pair in message.tables(_CUSTOM_METADATA)}


def read_metadata_length(source: ReadOnly) -> int:
    """Return the total size of prefix, flatbuffer and padding of the message at the beginning of ``source``.

    Raises:
        BrokerError: CORRUPT_MESSAGE if ``source`` does not begin with a message, or is shorter than its metadata.
    """
    if len(source) < PREFIX_BYTES:
        raise malformed(f"{len(source)} bytes found, at least {PREFIX_BYTES} expected")
    continuation, size = _PREFIX.unpack_from(source, 0)
    if continuation != CONTINUATION:
        raise malformed(f"a message starts with {CONTINUATION:#x}, found {continuation:#x}")
    if size <= 0 or size % ALIGNMENT or PREFIX_BYTES + size > len(source):
        raise malformed(f"metadata of {size} bytes in a message of {len(source)} bytes")
    return PREFIX_BYTES + int(size)


def schema_table_position(flatbuffer: ReadOnly) -> int:
    """Return the position of the Schema table in the flatbuffer of a Schema message.

    Raises:
        BrokerError: CORRUPT_MESSAGE if ``flatbuffer`` is not the flatbuffer of a Schema message.
    """
    schema = _message_of(flatbuffer, _SCHEMA).table(_HEADER)
    if schema is None:
        raise malformed("a Schema message without a schema")
    return schema.at


def counted_bytes(message: BatchMessage, source: ReadOnly) -> int:
    """Return the size of a batch that both producer and leader compare with ``max.message.bytes``.

    The result is the size of ``source``, or the declared size after decompression, whichever is greater. Kafka limits
    only the compressed size, but a reader needs memory for the decompressed batch.

    Raises:
        BrokerError: CORRUPT_MESSAGE if a compressed buffer's size cannot be read.
    """
    if message.codec == NOT_COMPRESSED:
        return len(source)
    body = source[message.metadata_length :]
    unpacked = sum(buffer_uncompressed_bytes(body, offset, length) for offset, length in message.buffers)
    return max(len(source), message.metadata_length + unpacked)


def unpacked_bytes(header: BatchHeader, body: memoryview) -> int:
    """Return the size of a batch after decompression.

    Raises:
        BrokerError: CORRUPT_MESSAGE if the batch is compressed and its message is damaged.
    """
    if not header.flags & _COMPRESSED:
        return len(body)
    message = body[: header.length]
    return counted_bytes(read_batch_message(message), message)


def buffer_uncompressed_bytes(body: ReadOnly, offset: int, length: int) -> int:
    """Return the uncompressed size that one buffer of a compressed body declares, without decompressing it.

    Raises:
        BrokerError: CORRUPT_MESSAGE if the buffer is too short to declare a size, or the size is negative.
    """
    if length == 0:
        return 0
    if length < _I64.size:
        raise malformed(f"a compressed buffer of {length} bytes")
    declared = int(_I64.unpack_from(body, offset)[0])
    if declared == -1:  # The buffer is not compressed, because compression would have made it larger.
        return length - _I64.size
    if declared < 0:
        raise malformed(f"a compressed buffer of {declared} bytes uncompressed")
    return declared


def _message_of(flatbuffer: ReadOnly, header_type: int) -> Table:
    message = root_table(flatbuffer)
    version = message.scalar(_VERSION, SHORT)
    if version != METADATA_V5:
        raise malformed(f"metadata version V{version + 1}, V{METADATA_V5 + 1} expected")
    found = message.scalar(_HEADER_TYPE, UBYTE)
    if found != header_type:
        raise malformed(f"a {_HEADER_NAMES.get(found, found)} message, {_HEADER_NAMES[header_type]} expected")
    return message


def _pairs(batch: Table, index: int) -> tuple[tuple[int, int], ...]:
    vector = batch.vector(index, _PAIR.size)
    if vector is None:
        return ()
    end = vector.start + vector.items * _PAIR.size
    return tuple(_PAIR.iter_unpack(batch.source[vector.start : end]))


def _checked_buffers(buffers: tuple[tuple[int, int], ...], body_length: int) -> tuple[tuple[int, int], ...]:
    # If buffers could overlap, a small body could be decoded to a very large batch.
    end = 0
    for number, (offset, length) in enumerate(buffers):
        if length == 0:
            # pyarrow creates a view at this offset even if the buffer is empty.
            if not 0 <= offset <= body_length:
                raise malformed(f"empty buffer {number} at {offset} in a body of {body_length} bytes")
            continue
        if offset % ALIGNMENT or length < 0 or offset < end or offset + length > body_length:
            raise malformed(
                f"buffer {number} of {length} bytes at {offset}, expected a multiple of {ALIGNMENT} from {end} on "
                f"and its end within the body of {body_length} bytes"
            )
        end = offset + length
    return buffers


def _codec(batch: Table) -> int:
    compression = batch.table(_COMPRESSION)
    if compression is None:
        return NOT_COMPRESSED
    codec, method = compression.scalar(_CODEC, UBYTE), compression.scalar(_METHOD, UBYTE)
    if codec not in {LZ4_FRAME, ZSTD} or method != 0:
        raise malformed(f"compression codec {codec} with method {method}")
    return codec


def _count(batch: Table, index: int, item_bytes: int) -> int:
    vector = batch.vector(index, item_bytes)
    return 0 if vector is None else vector.items
