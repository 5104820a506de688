"""Decompression of the records of a batch, with a limit on the memory that it allocates.

A few bytes may declare, or expand to, gigabytes. So the module trusts no size that a client declares. It compares the
size that snappy declares with the limit first. The other codecs run as streams that stop at the limit.

zstd keeps a window of past bytes, and the client declares the window's size too, up to 128 MiB. Records within the
limit never refer further back than the limit. So the module reduces a larger window in the frame's header before the
decompressor reads it. The compressed bytes have a limit too, because millions of empty frames take seconds and give no
records.

Clients write snappy in two forms. The first one is one raw block. The second one has the frames of Java's library
(xerial): a header of 16 bytes, and then blocks, each after its length as a big-endian i32. Gzip may have several
members, lz4 and zstd several frames.

Sources: RFC 1952, RFC 8878, the descriptions of snappy's and lz4's formats, and snappy-java's SnappyOutputStream.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

import pyarrow as pa

from sparklog.errors import ErrorCode
from sparklog.kafka.records.invalid import InvalidRecords

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)

#: Arrow's names of the codecs that it reads as streams of any number of members or frames. ``lz4`` is the framed form.
_STREAMS = {GZIP: "gzip", LZ4: "lz4", ZSTD: "zstd"}
#: The first read of a stream expects records that are larger than their compressed form by this factor.
_USUAL_FACTOR = 8
_LEAST_READ = 64 * 1024

_SNAPPY = pa.Codec("snappy")
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
_I32 = struct.Struct(">i")

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
#: The size of the smallest window that holds a block of the maximum size, 128 KiB, as a power of two.
_LEAST_WINDOW_LOG = 17
#: The first byte of a skippable frame is 0x50 to 0x5F. These bytes follow, and then the frame's size.
_SKIPPABLE_MAGIC = b"\x2a\x4d\x18"
#: The minimum size of a frame without its last block, in bytes.
_ZSTD_LEAST_BYTES = 6
_SINGLE_SEGMENT, _CHECKSUM = 0x20, 0x04
_CONTENT_SIZE_BYTES = (1, 2, 4, 8)
_DICTIONARY_ID_BYTES = (0, 1, 2, 4)
_RLE_BLOCK = 1


def refuse_large(records: memoryview, codec: int, *, max_bytes: int) -> None:
    """Refuse records whose size before decompression already shows that they are too large.

    Compressed records may be a little larger than ``max_bytes``, because a codec makes bytes that it cannot compress
    larger. The limit allows for the bytes that snappy adds, which are the most of all codecs.

    Raises:
        InvalidRecords: MESSAGE_TOO_LARGE.
    """
    limit = max_bytes if codec == NONE else max_bytes + max_bytes // 6 + 1024
    if len(records) > limit:
        detail = f"records of {len(records)} bytes found before decompression, at most {limit} expected"
        raise InvalidRecords(ErrorCode.MESSAGE_TOO_LARGE, detail)


def decompressed(records: memoryview, codec: int, *, max_bytes: int) -> bytes | memoryview:
    """Return the records of a batch after decompression.

    Without compression the result is ``records`` itself. The result never has more than ``max_bytes``.

    Raises:
        InvalidRecords: UNSUPPORTED_COMPRESSION_TYPE for an unknown codec; MESSAGE_TOO_LARGE for more than
            ``max_bytes``; INVALID_RECORD for bytes that the codec cannot read.
    """
    refuse_large(records, codec, max_bytes=max_bytes)
    if codec == NONE:
        return records
    if codec == SNAPPY:
        decompress: Callable[[memoryview, int], bytes | memoryview | None] = _unsnappy
    elif codec == ZSTD:
        decompress = _unzstd
    elif codec in _STREAMS:
        decompress = partial(_read_stream, _STREAMS[codec])
    else:
        raise InvalidRecords(
            ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"compression codec {codec} found, expected 0 to 4"
        )
    try:
        found = decompress(records, max_bytes)
    except (pa.ArrowException, OSError, ValueError) as error:
        found, reason = b"", str(error).partition("\n")[0][:200] or "no reason given"
    else:
        reason = ""
    # The errors are raised here, so that they do not keep frames alive in which decompressors still have their memory.
    if reason:
        raise InvalidRecords(ErrorCode.INVALID_RECORD, f"the records cannot be decompressed: {reason}")
    if found is None:
        raise _too_large(max_bytes + 1, max_bytes)
    return found


def _read_stream(codec: str, source: bytes | memoryview, max_bytes: int) -> bytes | memoryview | None:
    """Return the decompressed bytes of the stream, or None if they are more than ``max_bytes``."""
    stream = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(source)), codec)
    try:
        return _read_at_most(stream, max_bytes, max(_USUAL_FACTOR * len(source), _LEAST_READ))
    finally:
        del stream


def _read_at_most(stream: pa.CompressedInputStream, max_bytes: int, first_read: int) -> bytes | memoryview | None:
    room = max_bytes + 1
    size = min(room, first_read)
    # Not ``read``: in pyarrow 26 it never frees the memory of a read that fails.
    parts = [memoryview(stream.read_buffer(size))]
    room -= len(parts[0])
    while room > 0 and len(parts[-1]) == size:  # a short read is the end
        size = min(room, 2 * size)
        parts.append(memoryview(stream.read_buffer(size)))
        room -= len(parts[-1])
    if room <= 0:
        return None
    return parts[0] if len(parts) == 1 else b"".join(parts)


# --- snappy ---


def _unsnappy(source: memoryview, max_bytes: int) -> bytes | memoryview | None:
    if len(source) < _XERIAL_HEADER_BYTES or source[: len(_XERIAL)] != _XERIAL:
        return _snappy_block(source, max_bytes)
    parts: list[memoryview] = []
    at, room, most_blocks = _XERIAL_HEADER_BYTES, max_bytes, _most_blocks(source)
    while at < len(source):
        if len(parts) == most_blocks:
            raise ValueError(f"more than {most_blocks} snappy blocks")
        if len(source) - at < _I32.size:
            raise ValueError("a snappy frame is truncated")
        (size,) = _I32.unpack_from(source, at)
        at += _I32.size
        if not 0 < size <= len(source) - at:
            raise ValueError(f"a snappy block of {size} bytes, 1 to {len(source) - at} expected")
        part = _snappy_block(source[at : at + size], room)
        if part is None:
            return None
        parts.append(part)
        at += size
        room -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _most_blocks(source: memoryview) -> int:
    """Return the maximum number of blocks of a frame, which bounds the loop over its blocks."""
    return 1024 + len(source) // 64


def _snappy_block(source: memoryview, room: int) -> memoryview | None:
    """Decompress one raw block, or return None if it declares more than ``room`` bytes."""
    size = shift = 0
    for byte in source[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        raise ValueError("a snappy block has no length")
    if size > room:
        return None
    return memoryview(_SNAPPY.decompress(pa.py_buffer(source), size)) if size else memoryview(b"")


# --- zstd ---


def _unzstd(source: memoryview, max_bytes: int) -> bytes | memoryview | None:
    small = _with_small_windows(source, max_bytes)
    return None if small is None else _read_stream(_STREAMS[ZSTD], small, max_bytes)


def _with_small_windows(source: memoryview, max_bytes: int) -> bytes | memoryview | None:
    """Return the frames with windows of at most about ``max_bytes``.

    Return None if a frame declares content of more than ``max_bytes``.
    """
    limit_log = max(max_bytes.bit_length(), _LEAST_WINDOW_LOG)
    most_blocks = _most_blocks(source) + (max_bytes >> _LEAST_WINDOW_LOG)
    patched: bytearray | None = None
    at = 0
    while at + _ZSTD_LEAST_BYTES <= len(source):
        if source[at + 1 : at + 4] == _SKIPPABLE_MAGIC and source[at] >> 4 == 5:
            at += 8 + int.from_bytes(source[at + 4 : at + 8], "little")
            most_blocks -= 1
            if most_blocks < 0:
                raise ValueError("too many skippable zstd frames")
            continue
        if source[at : at + 4] != _ZSTD_MAGIC:
            break  # the decompressor refuses it
        descriptor = source[at + 4]
        if descriptor & _SINGLE_SEGMENT:  # the window is as large as the content
            if _content_bytes(source, at) > max_bytes:
                return None
        elif 10 + (source[at + 5] >> 3) >= limit_log:
            patched = patched or bytearray(source)
            patched[at + 5] = limit_log - 10 << 3
        at, blocks = _after_frame(source, at, most_blocks)
        most_blocks -= blocks
    return source if patched is None else bytes(patched)


def _content_bytes(source: memoryview, at: int) -> int:
    """Return the size of the content that a frame with the flag ``_SINGLE_SEGMENT`` declares."""
    size = _CONTENT_SIZE_BYTES[source[at + 4] >> 6]
    first = at + 5 + _DICTIONARY_ID_BYTES[source[at + 4] & 3]
    return int.from_bytes(source[first : first + size], "little") + (256 if size == 2 else 0)


def _after_frame(source: memoryview, at: int, most_blocks: int) -> tuple[int, int]:
    """Return the position after a frame, and the number of its blocks. The frame may be truncated."""
    descriptor = source[at + 4]
    single_segment = bool(descriptor & _SINGLE_SEGMENT)
    size_bytes = _CONTENT_SIZE_BYTES[descriptor >> 6] if single_segment or descriptor >> 6 else 0
    at += 5 + (not single_segment) + _DICTIONARY_ID_BYTES[descriptor & 3] + size_bytes
    last = blocks = 0
    while not last and at + 3 <= len(source):
        block = int.from_bytes(source[at : at + 3], "little")
        last = block & 1
        at += 3 + (1 if block >> 1 & 3 == _RLE_BLOCK else block >> 3)
        blocks += 1
        if blocks > most_blocks:
            raise ValueError(f"more than {most_blocks} zstd blocks")
    return at + (4 if descriptor & _CHECKSUM else 0), blocks


def _too_large(least: int, limit: int) -> InvalidRecords:
    return InvalidRecords(
        ErrorCode.MESSAGE_TOO_LARGE, f"records of at least {least} bytes uncompressed found, at most {limit} expected"
    )
