"""A process that decodes broken record batches, so that a crash or an appetite for memory is visible.

Run as ``python -m tests.kafka.records.fuzz_records <seed> <rounds>``. Every round changes the bytes of a good batch, or
of its records before their compression, adds a matching CRC, and decodes it record by record and field by field. Both
ways must raise the same ``InvalidRecords``, or return the same valid rows, which the log accepts and a consumer can
read. JSON documents for a typed topic are broken likewise, and read in bulk and one by one. The process prints the
counts as JSON, and the MiB by which it has grown.
"""

from __future__ import annotations

import collections
import gzip
import json
import random
import resource
import struct
import sys
from collections.abc import Callable
from unittest.mock import patch

import cramjam
import pyarrow as pa

from sparklog.kafka.records import decode, encode
from sparklog.kafka.records.batch_view import read_batches
from sparklog.kafka.records.decode import DecodedBatch, decode_batch
from sparklog.kafka.records.encode import encode_batch, rows_that_fit
from sparklog.kafka.records.invalid import InvalidRecords
from sparklog.record.checksum import crc32c
from sparklog.record.schema import DEFAULT_EVENT_TIME, DEFAULT_SCHEMA
from sparklog.record.validate import validate_batch
from tests.kafka.records.batches import GREATEST_MS, LEAST_MS, produced
from tests.kafka.records.reference import Batch, Record, write_batch, write_record
from tests.kafka.records.test_json_columns import NESTED, PLAIN, columns, mangled, one_by_one
from tests.kafka.records.test_json_columns import outcome as outcome_of_documents

MAX_BYTES = 1 << 20
HEADER_BYTES = 61


def _xerial(data: bytes) -> bytes:
    block = bytes(cramjam.snappy.compress_raw(data))
    return b"\x82SNAPPY\0" + struct.pack(">iii", 1, 1, len(block)) + block


CODECS: list[tuple[int, Callable[[bytes], bytes]]] = [
    (0, bytes),
    (0, bytes),
    (1, gzip.compress),
    (2, lambda data: bytes(cramjam.snappy.compress_raw(data))),
    (2, _xerial),
    (3, lambda data: bytes(cramjam.lz4.compress(data))),
    (4, lambda data: bytes(cramjam.zstd.compress(data))),
]
#: Records above the limit after decompression, for the same codecs.
BOMBS = [compress(bytes(4 * MAX_BYTES)) if codec else b"" for codec, compress in CODECS]
BYTES = (0, 1, 2, 3, 0x7F, 0x80, 0x81, 0xFE, 0xFF)


def good_batch(dice: random.Random) -> Batch:
    count = dice.choice((1, 2, 5, 40))
    headed, timed = dice.random() < 0.4, dice.random() < 0.8
    records = []
    for number in range(count):
        key = None if dice.random() < 0.4 else dice.randbytes(dice.choice((0, 3, 70)))
        value = None if dice.random() < 0.1 else b"v" * dice.choice((0, 5, 5, 5, 60, 300))
        headers = tuple((f"h{n}", dice.choice((None, b"x"))) for n in range(dice.choice((0, 1, 2)))) if headed else ()
        time = 1_700_000_000_000 + number if timed else dice.choice((-1, 0, LEAST_MS, GREATEST_MS))
        records.append(Record(key, value, headers, time))
    return produced(records, **dice.choice(({}, {"producer_id": 3, "producer_epoch": 0, "base_sequence": 9})))


def broken_batch(dice: random.Random) -> bytes:
    """Return a batch whose records are changed before or after their compression, or whose header is changed."""
    batch, number = good_batch(dice), dice.randrange(len(CODECS))
    codec, compress = CODECS[number]
    records = b"".join(
        write_record(record, time_delta=record.time_ms - batch.base_timestamp, offset_delta=offset)
        for offset, record in enumerate(batch.records)
    )
    place = dice.random()
    if place < 0.6:
        records = mutated(records, dice)
    records = BOMBS[number] if place < 0.01 else compress(records)
    if 0.6 <= place < 0.8:
        records = mutated(records, dice)
    data = write_batch(batch._replace(attributes=codec), records)
    if place >= 0.8:
        fields = mutated(data[21:HEADER_BYTES], dice) if place < 0.95 else bytes([0, dice.randrange(64)]) + data[23:61]
        data = data[:21] + fields + data[HEADER_BYTES:]
        data = (
            data[:8]
            + struct.pack(">i", len(data) - 12)
            + data[12:17]
            + struct.pack(">I", crc32c(data[21:]))
            + data[21:]
        )
    return data


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Return ``data`` with one to four changes, mostly of single bytes."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at = dice.randrange(len(changed) + 1)
        kind = dice.randrange(12)
        if kind < 5 and at < len(changed):
            changed[at] = dice.choice(BYTES)
        elif kind < 8 and at < len(changed):
            changed[at] ^= 1 << dice.randrange(8)
        elif kind == 8:
            changed[at:at] = bytes(dice.choices(BYTES, k=dice.choice((1, 2, 5))))
        elif kind == 9:
            del changed[at : at + dice.choice((1, 2, 5))]
        elif kind == 10:
            other = dice.randrange(len(changed) + 1)
            changed[at : at + 8] = changed[other : other + 8]
        else:
            del changed[at:]
    return bytes(changed)


def outcome(data: bytes, *, few: bool) -> DecodedBatch | InvalidRecords:
    with patch.object(decode, "FEW_RECORDS", 10**9 if few else 0):
        try:
            (view,) = read_batches(memoryview(data))
            return decode_batch(view, max_bytes=MAX_BYTES)
        except InvalidRecords as error:
            return error


def judge(data: bytes) -> str:
    """Return the error's name, or "accepted" if every reader accepts the rows."""
    found, other = outcome(data, few=True), outcome(data, few=False)
    if isinstance(found, InvalidRecords):
        assert isinstance(other, InvalidRecords), "only one way refuses the batch"
        assert (found.code, found.record_errors) == (other.code, other.record_errors), (found, other)
        return found.code.name
    assert isinstance(other, DecodedBatch), f"only one way refuses the batch: {other}"
    assert found.rows.equals(other.rows) and found.max_timestamp_ms == other.max_timestamp_ms
    for batch in (found, other):
        check(batch)
    return "accepted"


def check(batch: DecodedBatch) -> None:
    """Check that the rows are valid, that a leader accepts them, and that consumers get the same records."""
    batch.rows.validate(full=True)
    header, body = batch.stored(schema_id=0, timed=True)
    validate_batch(
        header,
        memoryview(body),
        schema=DEFAULT_SCHEMA,
        schema_id=0,
        max_message_bytes=64 * MAX_BYTES,
        event_time=DEFAULT_EVENT_TIME,
    )
    sent = []
    for few in (True, False):
        with patch.object(encode, "FEW_RECORDS", 10**9 if few else 0):
            sent.append(b"".join(encode_batch(batch.rows, base_offset=0, leader_epoch=0)))
    assert sent[0] == sent[1]
    assert rows_that_fit(batch.rows, 2 * len(sent[0]) + 100 * batch.count) == batch.count
    again = outcome(sent[0], few=True)
    assert isinstance(again, DecodedBatch) and again.rows.equals(batch.rows)


def broken_documents(dice: random.Random) -> list[bytes]:
    """Return documents for a typed topic, some of them mangled, changed or deeply nested."""
    documents = []
    for _ in range(dice.choice((1, 2, 5))):
        document = dice.choice((PLAIN, NESTED, mangled(dice)))
        if dice.random() < 0.3:
            document = mutated(document, dice)
        if dice.random() < 0.02:
            document = document.replace(b"[", b"[" * 100_000)
        documents.append(document)
    return documents


def judge_documents(documents: list[bytes]) -> str:
    """Return the outcome of documents that both ways must read alike."""
    results = [outcome_of_documents(read, documents) for read in (columns, one_by_one)]
    assert results[0] == results[1], documents
    return "documents refused" if results[0].startswith("(RecordError") else "documents accepted"


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(seed: int, rounds: int) -> None:
    dice = random.Random(seed)
    tally: collections.Counter[str] = collections.Counter()
    tally.update(judge(broken_batch(dice)) for _ in range(200))  # everything is imported and warm
    for records, (codec, _) in zip(BOMBS, CODECS, strict=True):
        judge(write_batch(good_batch(dice)._replace(attributes=codec), records))
    before = peak_mib()
    tally.update(judge(broken_batch(dice)) for _ in range(rounds))
    tally.update(judge_documents(broken_documents(dice)) for _ in range(rounds // 4))
    print(json.dumps(tally | {"grown MiB": peak_mib() - before, "arrow bytes": pa.total_allocated_bytes()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
