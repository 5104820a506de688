"""Tests that records of all codecs are decompressed, and that no input takes more memory than the limit allows."""

from __future__ import annotations

import gzip
import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import cramjam
import pyarrow as pa
import pytest

from sparklog.errors import ErrorCode
from sparklog.kafka.records.compression import GZIP, LZ4, SNAPPY, ZSTD, decompressed
from sparklog.kafka.records.invalid import InvalidRecords

PLAIN = b"".join(b"value %d, " % (number * number) for number in range(20_000))
LIMIT = 1 << 20
XERIAL_HEADER = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)


def xerial(data: bytes, block: int = 32 * 1024) -> bytes:
    parts = [XERIAL_HEADER]
    for at in range(0, len(data), block):
        compressed = bytes(cramjam.snappy.compress_raw(data[at : at + block]))
        parts += [struct.pack(">i", len(compressed)), compressed]
    return b"".join(parts)


def zstd_stream(data: bytes) -> bytes:
    """Return a zstd frame that does not declare the size of its content, as streaming writers make it."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


FORMS = {
    "gzip": (GZIP, gzip.compress(PLAIN)),
    "gzip of two members": (GZIP, gzip.compress(PLAIN[:1000]) + gzip.compress(PLAIN[1000:])),
    "raw snappy": (SNAPPY, bytes(cramjam.snappy.compress_raw(PLAIN))),
    "xerial snappy": (SNAPPY, xerial(PLAIN)),
    "lz4": (LZ4, bytes(cramjam.lz4.compress(PLAIN))),
    "lz4 with small blocks": (LZ4, pa.Codec("lz4").compress(PLAIN, asbytes=True)),
    "lz4 of two frames": (LZ4, bytes(cramjam.lz4.compress(PLAIN[:9])) + bytes(cramjam.lz4.compress(PLAIN[9:]))),
    "zstd": (ZSTD, bytes(cramjam.zstd.compress(PLAIN))),
    "zstd stream": (ZSTD, zstd_stream(PLAIN)),
    "zstd of two frames": (ZSTD, bytes(cramjam.zstd.compress(PLAIN[:70_000])) + zstd_stream(PLAIN[70_000:])),
    "zstd after a skippable frame": (ZSTD, b"\x53\x2a\x4d\x18\x03\0\0\0abc" + zstd_stream(PLAIN)),
}


@pytest.mark.parametrize(("codec", "data"), FORMS.values(), ids=FORMS)
def test_every_form_is_decompressed(codec: int, data: bytes) -> None:
    assert decompressed(memoryview(data), codec, max_bytes=LIMIT) == PLAIN
    assert decompressed(memoryview(data), codec, max_bytes=len(PLAIN)) == PLAIN


@pytest.mark.parametrize(("codec", "data"), FORMS.values(), ids=FORMS)
def test_one_byte_above_the_limit_is_refused(codec: int, data: bytes) -> None:
    with pytest.raises(InvalidRecords) as refused:
        decompressed(memoryview(data), codec, max_bytes=len(PLAIN) - 1)
    assert refused.value.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize(("codec", "data"), FORMS.values(), ids=FORMS)
def test_truncated_data_is_refused(codec: int, data: bytes) -> None:
    for cut in (1, 5, len(data) // 2):
        with pytest.raises(InvalidRecords) as refused:
            decompressed(memoryview(data[:-cut]), codec, max_bytes=LIMIT)
        assert refused.value.code is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize(("codec", "data"), FORMS.values(), ids=FORMS)
def test_random_damage_gives_bytes_or_the_error(codec: int, data: bytes) -> None:
    dice = random.Random(codec)
    for _ in range(200):
        changed = bytearray(data)
        for _ in range(dice.choice((1, 2, 8))):
            changed[dice.randrange(min(len(changed), dice.choice((16, 10**6))))] = dice.randrange(256)
        try:
            found = decompressed(memoryview(changed), codec, max_bytes=LIMIT)
        except InvalidRecords as error:
            assert error.code in {ErrorCode.INVALID_RECORD, ErrorCode.MESSAGE_TOO_LARGE}
        else:
            assert len(found) <= LIMIT


def zstd_bomb() -> bytes:
    """Return a frame of 8 GiB of zeros, in 64 ki blocks of one repeated byte each."""
    block = (1 << 17 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\x00\x38" + block * (1 << 16) + b"\x01\0\0"


BOMBS = {
    "gzip": (GZIP, gzip.compress(bytes(64 << 20))),
    "gzip of very many members": (GZIP, gzip.compress(bytes(2000)) * 20_000),
    "raw snappy": (SNAPPY, bytes(cramjam.snappy.compress_raw(bytes(64 << 20)))),
    "raw snappy of 4 GiB": (SNAPPY, b"\xff\xff\xff\xff\x0f\0"),
    "xerial snappy": (SNAPPY, xerial(bytes(64 << 20))),
    "xerial snappy of empty blocks": (SNAPPY, XERIAL_HEADER + b"\0\0\0\x01\0" * 100_000),
    "lz4": (LZ4, bytes(cramjam.lz4.compress(bytes(64 << 20)))),
    "zstd": (ZSTD, bytes(cramjam.zstd.compress(bytes(64 << 20)))),
    "zstd stream": (ZSTD, zstd_stream(bytes(64 << 20))),
    "zstd of repeated bytes": (ZSTD, zstd_bomb()),
    "zstd of empty blocks": (ZSTD, b"\x28\xb5\x2f\xfd\x00\x38" + bytes(3 << 20)),
    "zstd that declares 16 EiB": (ZSTD, b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + b"\x01\0\0"),
}


@pytest.mark.parametrize(("codec", "data"), BOMBS.values(), ids=BOMBS)
def test_bombs_are_refused_within_the_limits_memory(codec: int, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRecords):
            decompressed(memoryview(data), codec, max_bytes=LIMIT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * LIMIT + len(data)


@pytest.mark.parametrize("window_log", [21, 27, 41])
def test_a_large_zstd_window_is_declared_as_a_small_one(window_log: int) -> None:
    data = bytearray(zstd_stream(PLAIN))
    assert data[4] & 0x20 == 0, "the frame declares a window"
    data[5] = window_log - 10 << 3
    # A window of more than 128 MiB is refused by the library, so the smaller one is what it has seen.
    assert decompressed(memoryview(data), ZSTD, max_bytes=LIMIT) == PLAIN


@pytest.mark.parametrize(
    ("codec", "frame"),
    [
        (GZIP, gzip.compress(b"")),
        (LZ4, bytes(cramjam.lz4.compress(b""))),
        (LZ4, b"\x50\x2a\x4d\x18\0\0\0\0"),
        (ZSTD, bytes(cramjam.zstd.compress(b""))),
        (ZSTD, b"\x50\x2a\x4d\x18\0\0\0\0"),
        (SNAPPY, struct.pack(">i", 1) + bytes(cramjam.snappy.compress_raw(b""))),
    ],
    ids=["gzip", "lz4", "lz4 skippable", "zstd", "zstd skippable", "snappy"],
)
def test_empty_frames_above_the_limit_are_refused(codec: int, frame: bytes) -> None:
    header = XERIAL_HEADER if codec == SNAPPY else b""
    data = header + frame * (2 * LIMIT // len(frame))
    with pytest.raises(InvalidRecords) as refused:
        decompressed(memoryview(data), codec, max_bytes=LIMIT)
    assert refused.value.code is ErrorCode.MESSAGE_TOO_LARGE


def test_many_skippable_zstd_frames_are_refused() -> None:
    data = b"\x50\x2a\x4d\x18\0\0\0\0" * (LIMIT // 8) + zstd_stream(PLAIN)
    with pytest.raises(InvalidRecords, match="skippable"):
        decompressed(memoryview(data), ZSTD, max_bytes=LIMIT)


@pytest.mark.parametrize(
    ("codec", "compress"),
    [(GZIP, gzip.compress), (SNAPPY, xerial), (LZ4, cramjam.lz4.compress), (ZSTD, cramjam.zstd.compress)],
)
def test_random_bytes_of_the_greatest_size_are_decompressed(codec: int, compress: Callable[[bytes], Any]) -> None:
    plain = random.Random(7).randbytes(LIMIT)
    data = bytes(compress(plain))
    assert len(data) > LIMIT
    assert bytes(decompressed(memoryview(data), codec, max_bytes=LIMIT)) == plain
