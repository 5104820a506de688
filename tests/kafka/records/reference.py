"""A plain, slow writer and reader of Kafka's record batches, as the tests' own statement of the format.

It is written from Kafka's documentation, one field after the other, and shares no code with the package.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_CRC_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    _CRC_TABLE.append(_byte)


class Record(NamedTuple):
    """One record. ``time_ms`` is -1 for a record without a timestamp."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    time_ms: int


class Batch(NamedTuple):
    """The content of a batch."""

    base_offset: int
    leader_epoch: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    offsets: tuple[int, ...]
    records: tuple[Record, ...]


def crc32c(data: bytes) -> int:
    found = 0xFFFFFFFF
    for byte in data:
        found = found >> 8 ^ _CRC_TABLE[(found ^ byte) & 0xFF]
    return found ^ 0xFFFFFFFF


def zigzag(number: int) -> bytes:
    raw = number * 2 if number >= 0 else -number * 2 - 1
    out = b""
    while True:
        seven, raw = raw % 128, raw // 128
        if not raw:
            return out + bytes([seven])
        out += bytes([seven + 128])


def sized(data: bytes | None) -> bytes:
    return zigzag(-1) if data is None else zigzag(len(data)) + data


def write_record(record: Record, *, time_delta: int, offset_delta: int) -> bytes:
    body = b"\0" + zigzag(time_delta) + zigzag(offset_delta) + sized(record.key) + sized(record.value)
    body += zigzag(len(record.headers))
    for key, value in record.headers:
        body += sized(key.encode()) + sized(value)
    return zigzag(len(body)) + body


def write_batch(batch: Batch, records: bytes | None = None) -> bytes:
    """Return the bytes of a batch. ``records`` replaces its records, for example by compressed ones."""
    if records is None:
        records = b"".join(
            write_record(
                record, time_delta=record.time_ms - batch.base_timestamp, offset_delta=offset - batch.base_offset
            )
            for offset, record in zip(batch.offsets, batch.records, strict=True)
        )
    covered = struct.pack(">h", batch.attributes) + struct.pack(">i", batch.last_offset_delta)
    covered += struct.pack(">q", batch.base_timestamp) + struct.pack(">q", batch.max_timestamp)
    covered += struct.pack(">q", batch.producer_id) + struct.pack(">h", batch.producer_epoch)
    covered += struct.pack(">i", batch.base_sequence) + struct.pack(">i", len(batch.records)) + records
    after_length = struct.pack(">i", batch.leader_epoch) + b"\x02"
    after_length += struct.pack(">I", crc32c(covered)) + covered
    return struct.pack(">q", batch.base_offset) + struct.pack(">i", len(after_length)) + after_length


class Reader:
    """A cursor over bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        assert 0 <= count <= len(self.data) - self.at
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack(">" + form, self.take(struct.calcsize(form)))[0])

    def zigzag(self) -> int:
        raw = shift = 0
        while True:
            byte = self.take(1)[0]
            raw += byte % 128 << shift
            shift += 7
            if byte < 128:
                return -(raw // 2) - 1 if raw % 2 else raw // 2

    def sized(self) -> bytes | None:
        length = self.zigzag()
        return None if length == -1 else self.take(length)


def read_batch(data: bytes) -> Batch:
    """Return the content of an uncompressed batch, after a check of its lengths and its CRC."""
    reader = Reader(data)
    base_offset, length = reader.number("q"), reader.number("i")
    assert length == len(data) - 12
    leader_epoch, magic, crc = reader.number("i"), reader.number("b"), reader.number("I")
    assert magic == 2
    assert crc == crc32c(data[21:])
    fields = [reader.number(form) for form in "hiqqqhi"]
    count = reader.number("i")
    offsets, records = [], []
    for _ in range(count):
        end = reader.zigzag() + reader.at
        assert reader.take(1) == b"\0"
        time_delta, offset_delta = reader.zigzag(), reader.zigzag()
        key, value = reader.sized(), reader.sized()
        headers = []
        for _ in range(reader.zigzag()):
            name = reader.sized()
            assert name is not None
            headers.append((name.decode(), reader.sized()))
        assert reader.at == end
        offsets.append(base_offset + offset_delta)
        records.append(Record(key, value, tuple(headers), fields[2] + time_delta))
    assert reader.at == len(data)
    return Batch._make((base_offset, leader_epoch, *fields, tuple(offsets), tuple(records)))
