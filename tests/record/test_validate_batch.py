"""Tests of bad batches, one by one: each has its own typed error with the found and the expected value."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa
import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.checksum import crc32c
from sparklog.record.codec import EncodedBatch, encode_batch
from sparklog.record.header import Flag
from sparklog.record.message import read_batch_message, read_metadata_length
from sparklog.record.schema import DEFAULT_SCHEMA
from tests.record.batches import (
    MAX_MESSAGE_BYTES,
    NESTED_SCHEMA,
    default_batch,
    encoded,
    find_pair,
    nested_batch,
    resealed,
    validate,
)

CORRUPT = ErrorCode.CORRUPT_MESSAGE
TOO_LARGE = ErrorCode.MESSAGE_TOO_LARGE
MISMATCH = ErrorCode.SCHEMA_MISMATCH
OUTDATED = ErrorCode.SCHEMA_OUTDATED
INVALID = ErrorCode.INVALID_RECORD

TEXTS = pa.schema([pa.field("text", pa.string())])


def refused(batch: EncodedBatch, schema: pa.Schema = DEFAULT_SCHEMA, **changes: object) -> BrokerError:
    with pytest.raises(BrokerError) as caught:
        validate(batch, schema, **changes)
    return caught.value


def one_column(values: list[object], kind: pa.DataType, compression: str | None = None) -> EncodedBatch:
    return encoded(pa.RecordBatch.from_arrays([pa.array(values, kind)], ["text"]), compression)


def patched(batch: EncodedBatch, pair: tuple[int, int], replacement: tuple[int, int]) -> EncodedBatch:
    """Return ``batch`` with the first node or buffer equal to ``pair`` replaced, and a matching CRC."""
    body = bytearray(batch.body.to_pybytes())
    struct.pack_into("<qq", body, find_pair(bytes(body), pair), *replacement)
    return resealed(batch, bytes(body))


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_good_batches_are_accepted(compression: str | None) -> None:
    validate(encoded(default_batch(), compression))
    validate(encoded(nested_batch(), compression), NESTED_SCHEMA)
    validate(encoded(default_batch(1).slice(0), compression, producer_id=5, producer_epoch=0, first_sequence=0))


def test_a_body_that_does_not_match_its_header_is_refused() -> None:
    batch = encoded()
    body = bytearray(batch.body.to_pybytes())
    body[-1] ^= 1
    error = refused(EncodedBatch(batch.header, pa.py_buffer(body)))
    assert error.code is CORRUPT and "computed" in error.detail
    error = refused(EncodedBatch(batch.header._replace(length=8), batch.body))
    assert error.code is CORRUPT and f"{batch.body.size} bytes found, 8" in error.detail
    error = refused(EncodedBatch(batch.header._replace(offset_array_length=4), batch.body))
    assert error.code is CORRUPT and "offset array of 4" in error.detail


@pytest.mark.parametrize("flag", [Flag.CONTROL, Flag.FIRST_OF_SEGMENT, Flag.OFFSET_ARRAY, 1 << 11])
def test_flags_not_for_producers_are_refused(flag: int) -> None:
    batch = encoded()
    error = refused(batch._replace(header=batch.header._replace(flags=int(flag))))
    assert error.code is INVALID and f"{int(flag):#06x}" in error.detail


def test_wrong_record_counts_are_refused() -> None:
    header, body = encoded()
    more = header._replace(record_count=11, offset_span=11)
    assert "10 records found, 11 declared" in refused(EncodedBatch(more, body)).detail
    wider = refused(EncodedBatch(header._replace(offset_span=12), body))
    assert wider.code is INVALID and "10 records over 12 offsets" in wider.detail
    none = refused(EncodedBatch(header._replace(record_count=0, offset_span=0), body))
    assert none.code is INVALID


def test_unknown_schema_ids_are_refused() -> None:
    batch = encoded()
    assert refused(batch, schema_id=1).code is OUTDATED
    newer = refused(batch._replace(header=batch.header._replace(schema_id=2)))
    assert newer.code is OUTDATED and "schema id 2 found, 0 expected" in newer.detail


def test_columns_of_another_schema_are_refused() -> None:
    error = refused(one_column(["a"], pa.string()), event_time=None)
    assert error.code is MISMATCH
    assert "1 columns with 3 buffers" in error.detail and "7 with 17" in error.detail
    # equal numbers of nodes and buffers, but another type: numbers instead of offsets and text
    numbers = pa.RecordBatch.from_arrays([pa.array([b"\xff"], pa.binary())], ["text"])
    assert refused(encoded(numbers), TEXTS).code is CORRUPT
    views = pa.RecordBatch.from_arrays([pa.array(["a view longer than twelve bytes"], pa.string_view())], ["text"])
    assert "1 variadic counts" in refused(encoded(views), TEXTS).detail


def test_timestamps_must_equal_those_of_the_data() -> None:
    header, body = encoded()
    for change in ({"max_timestamp": 2**62}, {"min_timestamp": 0}, {"max_timestamp": -1, "min_timestamp": -1}):
        error = refused(EncodedBatch(header._replace(**change), body))
        assert error.code is INVALID and "1700000000000000 to 1700000000000009" in error.detail
    assert refused(EncodedBatch(header, body), event_time=None).code is INVALID


def test_nulls_in_required_columns_are_refused() -> None:
    nullable = pa.RecordBatch.from_arrays([pa.array([1, None])], ["id"])
    error = refused(encoded(nullable), pa.schema([pa.field("id", pa.int64(), nullable=False)]))
    assert error.code is INVALID and "'id'" in error.detail


def test_nested_nulls_count_only_in_existing_parents() -> None:
    required = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    loose = pa.struct([pa.field("x", pa.int64())])
    for wrap, holds, nested_null in (
        (lambda kind: kind, [{"x": 1}, None], [{"x": None}]),
        (pa.list_, [[{"x": 1}], None, []], [[{"x": 1}, {"x": None}]]),
        (lambda kind: pa.list_(kind, 1), [[{"x": 1}], None], [[{"x": None}]]),
        (lambda kind: pa.map_(pa.string(), kind), [[("k", {"x": 1})], None, []], [[], [("k", {"x": None})]]),
    ):
        schema = pa.schema([pa.field("a", wrap(required))])
        good = encoded(pa.RecordBatch.from_arrays([pa.array(holds, wrap(loose))], ["a"]))
        validate(good, schema)
        bad = encoded(pa.RecordBatch.from_arrays([pa.array(nested_null, wrap(loose))], ["a"]))
        error = refused(bad, schema)
        assert error.code is INVALID and "'a." in error.detail and ".x'" in error.detail


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_batches_above_the_topics_limit_are_refused() -> None:
    error = refused(encoded(), max_message_bytes=600)
    assert error.code is TOO_LARGE and "max.message.bytes is 600" in error.detail


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(compression: str) -> None:
    bomb = one_column(["\0" * (64 << 20)], pa.string(), compression)
    assert bomb.body.size < MAX_MESSAGE_BYTES
    before = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    error = refused(bomb, TEXTS)
    assert error.code is TOO_LARGE and error.detail.startswith(str(64 << 20)[:4])
    assert pa.total_allocated_bytes() <= before and pa.default_memory_pool().max_memory() == peak


def _declared_sizes(batch: EncodedBatch) -> Iterator[tuple[int, int]]:
    source = memoryview(batch.body)
    message = read_batch_message(source)
    for offset, length in message.buffers:
        if length:
            at = message.metadata_length + offset
            yield at, struct.unpack_from("<q", source, at)[0]


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("change", [-1, 1, 8, 1000])
def test_a_wrong_declared_size_is_refused(compression: str, change: int) -> None:
    # A declared size that is too small would write past the end, and one that is too large would expose unwritten
    # memory.
    batch = one_column(["hello " * 100] * 50, pa.string(), compression)
    tried = 0
    for at, size in _declared_sizes(batch):
        if size < 0:
            continue
        body = bytearray(batch.body.to_pybytes())
        struct.pack_into("<q", body, at, size + change)
        assert refused(resealed(batch, bytes(body)), TEXTS).code is CORRUPT
        tried += 1
    assert tried


@pytest.mark.parametrize("size", [-2, -(2**63), 2**62])
def test_impossible_declared_sizes_are_refused(size: int) -> None:
    batch = one_column(["hello " * 100] * 50, pa.string(), "zstd")
    body = bytearray(batch.body.to_pybytes())
    at, _ = next(_declared_sizes(batch))
    struct.pack_into("<q", body, at, size)
    assert refused(resealed(batch, bytes(body)), TEXTS).code is (TOO_LARGE if size > 0 else CORRUPT)


def test_the_codec_must_be_the_headers() -> None:
    for compression, flags in (("lz4", Flag.ZSTD), ("zstd", Flag(0)), (None, Flag.LZ4), ("lz4", Flag.LZ4 | Flag.ZSTD)):
        batch = encoded(compression=compression)
        error = refused(batch._replace(header=batch.header._replace(flags=int(flags))))
        assert error.code is CORRUPT and f"{int(flags):#06x}" in error.detail


# -- malformed on purpose --------------------------------------------------------------------------------------------


def test_known_metadata_are_compared_with_the_bytes_of_each_batch() -> None:
    batch = encoded()
    body = batch.body.to_pybytes()
    for other in (body + bytes(8), body[:-8]):
        validate(batch)
        assert refused(resealed(batch, other)).code is CORRUPT


def test_text_offsets_out_of_range_are_refused() -> None:
    batch = one_column(["aa", "bb", "cc"], pa.string())
    message = read_batch_message(memoryview(batch.body))
    at = message.metadata_length + message.buffers[1][0]
    for offsets in ((0, 2, 4, 2**31 - 1), (0, 2, -4, 6), (0, 4, 2, 6), (-8, 2, 4, 6), (100, 2, 4, 6)):
        body = bytearray(batch.body.to_pybytes())
        struct.pack_into("<4i", body, at, *offsets)
        assert refused(resealed(batch, bytes(body)), TEXTS).code is CORRUPT


def test_list_offsets_out_of_range_are_refused() -> None:
    schema = pa.schema([pa.field("text", pa.list_(pa.int64()))])
    batch = one_column([[1, 2], [3], [4]], pa.list_(pa.int64()))
    validate(batch, schema)
    message = read_batch_message(memoryview(batch.body))
    at = message.metadata_length + message.buffers[1][0]
    for offsets in ((0, 2, 3, 5), (0, 3, 2, 4), (0, 2, 3, 2**31 - 1), (-1, 2, 3, 4)):
        body = bytearray(batch.body.to_pybytes())
        struct.pack_into("<4i", body, at, *offsets)
        assert refused(resealed(batch, bytes(body)), schema).code is CORRUPT


def test_truncated_buffers_are_refused() -> None:
    batch = one_column(["aa", "bb", "cc"], pa.string())
    buffers = read_batch_message(memoryview(batch.body)).buffers
    assert buffers == ((0, 0), (0, 16), (16, 6))
    for pair, replacement in (
        ((0, 16), (0, 8)),
        ((0, 16), (0, 0)),
        ((16, 6), (16, 5)),
        ((16, 6), (16, 0)),
    ):
        assert refused(patched(batch, pair, replacement), TEXTS).code is CORRUPT


def test_buffers_outside_the_body_are_refused() -> None:
    batch = one_column(["aa", "bb", "cc"], pa.string())
    for replacement in ((16, 2**62), (24, 6), (2**62, 6), (-8, 6), (16, -6), (2**63 - 8, 16), (17, 5), (8, 6), (-8, 0)):
        error = refused(patched(batch, (16, 6), replacement), TEXTS)
        assert error.code is CORRUPT and "buffer 2" in error.detail


def test_a_length_not_a_multiple_of_8_is_refused() -> None:
    batch = one_column(["aa", "bb", "cc"], pa.string())
    source = batch.body.to_pybytes()
    message = read_batch_message(source)
    body = bytearray(source + bytes(3))
    length = struct.pack("<q", message.body_length)
    places = [at for at in range(0, message.metadata_length, 4) if source[at : at + 8] == length]
    errors = []
    for at in places:
        changed = bytearray(body)
        struct.pack_into("<q", changed, at, message.body_length + 3)
        errors.append(refused(resealed(batch, bytes(changed)), TEXTS))
    assert all(error.code is CORRUPT for error in errors)
    assert any("expected a multiple of 8" in error.detail for error in errors)


def test_nodes_with_wrong_counts_are_refused() -> None:
    batch = one_column(["aa"] * 77, pa.string())
    for replacement in ((78, 0), (76, 0), (-77, 0), (2**62, 0), (77, -1), (77, 78), (77, 1)):
        assert refused(patched(batch, (77, 0), replacement), TEXTS).code is CORRUPT
    lists = one_column([[1, 2]] * 50, pa.list_(pa.int64()))
    schema = pa.schema([pa.field("text", pa.list_(pa.int64()))])
    for replacement in ((99, 0), (2**40, 0), (-1, 0), (100, 2)):
        assert refused(patched(lists, (100, 0), replacement), schema).code is CORRUPT


def test_text_that_is_not_utf8_is_refused() -> None:
    batch = one_column(["aa"], pa.string())
    body = batch.body.to_pybytes()
    assert body.count(b"aa") == 1
    assert refused(resealed(batch, body.replace(b"aa", b"\xc3\x28")), TEXTS).code is CORRUPT


def test_decimals_beyond_their_precision_are_refused() -> None:
    kind = pa.decimal128(5, 2)
    batch = one_column([1], kind)
    body = bytearray(batch.body.to_pybytes())
    message = read_batch_message(batch.body.to_pybytes())
    body[message.metadata_length + message.buffers[1][0] + 15] = 0x7F
    assert refused(resealed(batch, bytes(body)), pa.schema([pa.field("text", kind)])).code is CORRUPT


def test_other_or_several_messages_are_refused() -> None:
    batch = encoded()
    body = batch.body.to_pybytes()
    schema_message = DEFAULT_SCHEMA.serialize().to_pybytes()
    dictionary_stream = pa.BufferOutputStream()
    values = pa.RecordBatch.from_arrays([pa.array(["a", "b"]).dictionary_encode()], ["text"])
    with pa.ipc.new_stream(dictionary_stream, values.schema) as writer:
        writer.write_batch(values)
    reader = pa.BufferReader(dictionary_stream.getvalue())
    pa.ipc.read_message(reader)
    start = reader.tell()
    pa.ipc.read_message(reader)
    dictionary_message = dictionary_stream.getvalue()[start : reader.tell()].to_pybytes()
    for bad, reason in (
        (schema_message, "a Schema message"),
        (dictionary_message, "a DictionaryBatch message"),
        (body + body, "bytes in"),
        (body + b"\xff\xff\xff\xff\0\0\0\0", "bytes in"),
        (body[:-8], "bytes in"),
        (body[:100], "metadata of"),
        (body[:4], "at least 8 expected"),
        (b"", "at least 8 expected"),
        (b"\0" * len(body), "0xffffffff"),
        (b"\xff\xff\xff\xff\0\0\0\0" + body[8:], "metadata of 0 bytes"),
        (b"ARROW1\0\0" + body, "0xffffffff"),
    ):
        error = refused(resealed(batch, bad))
        assert error.code is CORRUPT and reason in error.detail


def test_an_old_metadata_version_is_refused() -> None:
    old = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, DEFAULT_SCHEMA, options=old) as writer:
        writer.write_batch(default_batch())
    stream = sink.getvalue().to_pybytes()
    batch = encoded()
    error = refused(resealed(batch, stream[read_metadata_length(stream) : -8]))
    assert error.code is CORRUPT and "metadata version V4, V5 expected" in error.detail


def test_a_crc_is_checked_first_but_protects_nothing() -> None:
    batch = encode_batch(default_batch(), schema_id=9, compression=None, event_time=None)
    broken = batch._replace(header=batch.header._replace(body_crc=crc32c(b"other")))
    assert "CRC32C" in refused(broken).detail
