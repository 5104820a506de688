"""Tests of the records of Fetch responses: original offsets, pieces, markers, aborted transactions and gaps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Sequence
from typing import cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.broker.kafka.fetched_records import DecodedBatches, FetchedRecords, Rows, encode_fetched
from sparklog.broker.requests.slices import Waited
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.records.batch_view import BatchView, read_batches
from sparklog.kafka.records.json_rows import JsonTopic
from sparklog.protocol.messages import AbortedRange
from sparklog.record.checksum import crc32c
from sparklog.record.codec import encode_batch
from sparklog.record.compacted_batch import offset_array
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.marker import Marker, encode_marker
from sparklog.record.schema import DEFAULT_SCHEMA
from tests.kafka.records.reference import read_batch

Stored = tuple[BatchHeader, bytes]
EPOCH = 4


class Source:
    """A partition without a log, which keeps decoded batches and knows what producers have sent."""

    stamped = False
    json = False

    def __init__(self) -> None:
        self.kept: dict[int, Rows] = {}
        self.known: dict[int, memoryview] = {}

    def schema(self, schema_id: int) -> pa.Schema:
        return DEFAULT_SCHEMA

    def records(self, rows: pa.RecordBatch, header: BatchHeader) -> pa.RecordBatch:
        return rows

    def sent(self, header: BatchHeader) -> memoryview | None:
        return self.known.get(header.base_offset)

    def decoded(self, header: BatchHeader) -> Rows | None:
        return self.kept.get(header.base_offset)

    def keep_decoded(self, header: BatchHeader, rows: Rows) -> None:
        self.kept[header.base_offset] = rows


def rows(first: int, count: int, size: int = 1) -> pa.RecordBatch:
    values = [str(number).encode() * size for number in range(first, first + count)]
    times = pa.array([1000 * number for number in range(first, first + count)], pa.timestamp("us", tz="UTC"))
    columns = [pa.array(values, pa.binary()), pa.array(values, pa.binary()), [None] * count, times]
    return pa.record_batch(columns, DEFAULT_SCHEMA)


def stored(base: int, count: int, *, size: int = 1, producer: int = -1, transactional: bool = False) -> Stored:
    header, body = encode_batch(
        rows(base, count, size),
        schema_id=0,
        compression=None,
        event_time="timestamp",
        producer_id=producer,
        producer_epoch=0 if producer >= 0 else -1,
        first_sequence=0 if producer >= 0 else -1,
        transactional=transactional,
    )
    return header._replace(base_offset=base, leader_epoch=EPOCH), body.to_pybytes()


def compacted(base: int, span: int, kept: Sequence[int]) -> Stored:
    """Return a batch whose records at the offsets ``kept`` are left of ``span`` records.

    The cleaner writes an offset array only if a gap is before a record.
    """
    header, _ = stored(base, span)
    body = rows(base, span).take(pa.array([offset - base for offset in kept], pa.int64())).serialize()
    deltas = offset_array(np.array(kept, np.int64), base)
    whole = body.to_pybytes() + deltas
    header = header._replace(
        base_offset=base,
        leader_epoch=EPOCH,
        record_count=len(kept),
        length=body.size,
        offset_array_length=len(deltas),
        flags=int(Flag.CLEANED | (Flag.OFFSET_ARRAY if deltas else 0)),
        body_crc=crc32c(whole),
    )
    return header, whole


Producers = tuple[tuple[int, int], ...]


def marker(offset: int, *, committed: Producers = (), aborted: Producers = ()) -> Stored:
    header, body = encode_marker(Marker(committed, aborted), DEFAULT_SCHEMA, schema_id=0)
    return header._replace(base_offset=offset, leader_epoch=EPOCH, max_timestamp=7000), body.to_pybytes()


def fetch(
    batches: Sequence[Stored],
    offset: int = 0,
    *,
    max_bytes: int = 1 << 20,
    aborted: Sequence[AbortedRange] = (),
    source: Source | None = None,
    joined: bool = False,
) -> FetchedRecords:
    bodies = [body for _, body in batches]
    buffers = [b"".join(header.pack() for header, _ in batches), *([b"".join(bodies)] if joined else bodies)]
    work = encode_fetched(buffers, offset, source or Source(), max_bytes=max_bytes, aborted=aborted)
    found = result_of(work)
    assert sum(map(len, found.buffers)) == found.size
    return found


def result_of(work: Generator[Waited, None, FetchedRecords]) -> FetchedRecords:
    async def run() -> FetchedRecords:
        while True:
            try:
                waited = next(work)
            except StopIteration as end:
                return cast(FetchedRecords, end.value)
            if waited is not None:
                await asyncio.wait([waited])

    return asyncio.run(run())


def views(found: FetchedRecords) -> list[BatchView]:
    return read_batches(memoryview(b"".join(found.buffers)))


def numbers(found: FetchedRecords) -> dict[int, int]:
    """Return the number in the value of each record, by offset."""
    return {
        offset: int(record.value or b"")
        for view in views(found)
        if not view.control
        for batch in [read_batch(bytes(view.data))]
        for offset, record in zip(batch.offsets, batch.records, strict=True)
    }


def spans(found: FetchedRecords) -> list[tuple[int, int, bool]]:
    """Return first offset, last offset and whether it is a control batch, for each batch."""
    return [(view.base_offset, view.base_offset + view.last_offset_delta, view.control) for view in views(found)]


@pytest.mark.parametrize("joined", [False, True])
def test_batches_keep_their_offsets_and_epochs(joined: bool) -> None:
    found = fetch([stored(10, 60), stored(70, 1), stored(71, 55)], 10, joined=joined)
    assert numbers(found) == {number: number for number in range(10, 126)}
    assert spans(found) == [(10, 69, False), (70, 70, False), (71, 125, False)]
    assert {view.leader_epoch for view in views(found)} == {EPOCH}


def test_no_batches_give_no_bytes() -> None:
    assert fetch([]) == FetchedRecords([], 0)
    assert result_of(encode_fetched((), 0, Source(), max_bytes=1, aborted=())) == FetchedRecords([], 0)


def test_an_offset_inside_a_batch_begins_at_its_record() -> None:
    found = fetch([stored(10, 5, producer=7), stored(15, 2, producer=7)], 13)
    assert numbers(found) == {13: 13, 14: 14, 15: 15, 16: 16}
    assert [(view.base_offset, view.base_sequence) for view in views(found)] == [(13, 3), (15, 0)]


def test_small_batches_are_sent_as_one() -> None:
    found = fetch([stored(0, 1), stored(1, 3, producer=7), stored(4, 2, producer=8), stored(6, 60), stored(66, 1)])
    assert numbers(found) == {number: number for number in range(67)}
    assert spans(found) == [(0, 5, False), (6, 65, False), (66, 66, False)]
    assert {view.producer_id for view in views(found)} == {-1}


def test_small_batches_of_other_epochs_and_transactions_are_kept_apart() -> None:
    newer = [(header._replace(leader_epoch=EPOCH + 1), body) for header, body in (stored(2, 1), stored(3, 1))]
    aborted = stored(5, 1, producer=7, transactional=True)
    batches = [stored(0, 1), stored(1, 1), *newer, marker(4, committed=((9, 0),)), aborted, stored(6, 1), stored(7, 1)]
    found = fetch(batches, aborted=[AbortedRange(7, 5, 9)])
    assert list(numbers(found)) == [0, 1, 2, 3, 6, 7]
    assert spans(found) == [(0, 1, False), (2, 3, False), (4, 4, True), (6, 7, False)]
    assert [view.leader_epoch for view in views(found)] == [EPOCH, EPOCH + 1, EPOCH, EPOCH]


def test_a_gap_at_the_end_of_a_batch_moves_no_record() -> None:
    found = fetch([compacted(0, 10, range(5)), stored(10, 3), stored(13, 2)])
    assert numbers(found) == {number: number for number in (*range(5), *range(10, 15))}
    assert spans(found) == [(0, 9, False), (10, 14, False)]


def test_a_gap_between_batches_moves_no_record() -> None:
    found = fetch([stored(0, 2), stored(2, 1), stored(7, 1), stored(8, 1)])
    assert numbers(found) == {number: number for number in (0, 1, 2, 7, 8)}
    assert spans(found) == [(0, 2, False), (7, 8, False)]


@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.booleans(), min_size=1, max_size=6)), min_size=1, max_size=8
    ),
    offset=st.integers(0, 20),
)
def test_gaps_of_every_kind_move_no_record(shapes: list[tuple[int, list[bool]]], offset: int) -> None:
    """Check gaps before the batches, and at their start, inside them and at their end."""
    batches: list[Stored] = []
    kept: list[int] = []
    end = 0
    for gap, keeps in shapes:
        base = end + gap
        left = [base + delta for delta, keep in enumerate(keeps) if keep]
        batches.append(compacted(base, len(keeps), left))
        kept += left
        end = base + len(keeps)
    found = fetch([batch for batch in batches if batch[0].next_offset > offset], offset)
    assert numbers(found) == {number: number for number in kept if number >= offset}
    assert end <= offset or spans(found)[-1][1] == end - 1


@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    offset=st.integers(0, 100),
    max_bytes=st.integers(100, 5000),
    known=st.sets(st.integers(0, 11)),
)
def test_fetches_of_any_limit_read_every_record_once(
    sizes: list[int], offset: int, max_bytes: int, known: set[int]
) -> None:
    source, end = Source(), 0
    batches: list[Stored] = []
    for number, size in enumerate(sizes):
        batches.append(stored(end, size, size=1 + number % 3))
        if number in known:
            source.known[end] = memoryview(b"".join(fetch([batches[-1]], end).buffers))
        end += size
    at = first = min(offset, end - 1)
    seen: list[int] = []
    while at < end:
        found = fetch([batch for batch in batches if batch[0].next_offset > at], at, max_bytes=max_bytes, source=source)
        seen += numbers(found)
        assert seen[-1] >= at
        at = seen[-1] + 1
    assert seen == list(range(first, end))


def test_a_batch_above_the_limit_is_sent_in_pieces() -> None:
    source, offset = Source(), 0
    seen: dict[int, int] = {}
    batches = [stored(0, 50, size=20), stored(50, 2)]
    fetches = 0
    while offset < 52:
        rest = [batch for batch in batches if batch[0].next_offset > offset]
        found = fetch(rest, offset, max_bytes=700, source=source)
        assert 0 < found.size <= 700
        seen |= numbers(found)
        offset, fetches = max(seen) + 1, fetches + 1
    assert sorted(seen) == list(range(52))
    assert fetches > 3
    assert list(source.kept) == [0], "the second fetch does not decode the batch again"


def test_at_least_one_record_is_sent() -> None:
    found = fetch([stored(0, 3, size=500)], 1, max_bytes=1)
    assert list(numbers(found)) == [1]


def test_a_limit_ends_the_response() -> None:
    batches = [stored(0, 4, size=30), stored(4, 4, size=30)]
    whole = fetch(batches).size
    for limit in range(200, whole + 1, 50):
        found = fetch(batches, max_bytes=limit)
        assert found.size <= limit
        assert list(numbers(found)) == list(range(len(numbers(found))))
        assert 0 < len(numbers(found)) <= 8


def test_compacted_batches_keep_their_range_of_offsets() -> None:
    found = fetch([compacted(0, 10, [2, 5]), stored(10, 1)])
    assert list(numbers(found)) == [2, 5, 10]
    assert spans(found) == [(0, 9, False), (10, 10, False)]
    found = fetch([compacted(0, 10, [2, 5])], 3)
    assert list(numbers(found)) == [5]
    assert spans(found) == [(5, 9, False)]


def test_a_gap_at_the_end_is_filled_by_a_control_batch() -> None:
    assert spans(fetch([compacted(0, 10, [2, 5])], 6)) == [(9, 9, True)]
    assert spans(fetch([stored(0, 2), compacted(2, 5, []), compacted(7, 3, [])])) == [(0, 1, False), (9, 9, True)]
    assert spans(fetch([compacted(0, 5, []), stored(5, 1)])) == [(5, 5, False)], "clients accept a gap in between"


def test_markers_become_control_batches() -> None:
    ends = marker(1, committed=((7, 0),)), marker(2, aborted=((8, 0),))
    found = fetch([stored(0, 1, producer=7, transactional=True), *ends])
    assert spans(found) == [(0, 0, False), (1, 1, True), (2, 2, True)]
    first, commit, abort = views(found)
    assert (first.transactional, first.producer_id, first.base_sequence) == (True, 7, 0)
    assert [read_batch(bytes(view.data)).records[0].key for view in (commit, abort)] == [b"\0\0\0\1", b"\0\0\0\0"]
    assert (commit.producer_id, abort.producer_id) == (7, 8)
    assert commit.max_timestamp_ms == 7


def test_aborted_batches_are_left_out_for_committed_consumers() -> None:
    batches = [
        stored(0, 2, producer=7, transactional=True),
        stored(2, 2, producer=8, transactional=True),
        marker(4, aborted=((7, 0),)),
        stored(5, 1),
    ]
    aborted = [AbortedRange(7, 0, 4)]
    assert list(numbers(fetch(batches, aborted=aborted))) == [2, 3, 5]
    assert list(numbers(fetch(batches))) == [0, 1, 2, 3, 5]
    assert spans(fetch(batches[:1], aborted=aborted)) == [(1, 1, True)]
    later = [stored(5, 2, producer=7, transactional=True)]
    assert list(numbers(fetch(later, 5, aborted=aborted))) == [5, 6], "only the range of the transaction is aborted"


def test_bytes_of_the_producer_are_sent_from_their_first_offset_on() -> None:
    source = Source()
    sent = b"".join(fetch([stored(3, 4)], 3).buffers)
    source.known[10] = memoryview(sent)
    found = fetch([stored(10, 4)], 10, source=source)
    assert b"".join(found.buffers)[12:] == sent[12:]
    assert spans(found) == [(10, 13, False)]
    assert numbers(found) == {10: 3, 11: 4, 12: 5, 13: 6}
    assert numbers(fetch([stored(10, 4)], 12, source=source)) == {12: 12, 13: 13}
    small = fetch([stored(10, 4)], 10, source=source, max_bytes=len(sent) - 1)
    assert 10 in numbers(small)
    assert small.size < len(sent)


def test_a_damaged_batch_is_an_error_at_its_offset() -> None:
    header, body = stored(1, 2)
    damaged = (header, body[:-1] + bytes([body[-1] ^ 1]))
    assert list(numbers(fetch([stored(0, 1), damaged, stored(3, 1)]))) == [0]
    with pytest.raises(BrokerError) as caught:
        fetch([damaged], 1)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


def test_columns_after_those_of_kafka_are_left_out() -> None:
    wide = DEFAULT_SCHEMA.append(pa.field("city", pa.string()))

    class WideSource(Source):
        def schema(self, schema_id: int) -> pa.Schema:
            return wide

    columns = [*rows(0, 2).columns, pa.array(["a", None])]
    header, body = encode_batch(pa.record_batch(columns, wide), schema_id=0, compression="lz4", event_time="timestamp")
    found = fetch([(header._replace(leader_epoch=EPOCH), body.to_pybytes())], source=WideSource())
    assert numbers(found) == {0: 0, 1: 1}


def test_rows_of_a_typed_topic_are_sent_as_json_in_pieces() -> None:
    schema = pa.schema([pa.field("id", pa.int32()), pa.field("name", pa.string())])
    topic = JsonTopic(schema, ("id",), None)

    class JsonSource(Source):
        json = True

        def schema(self, schema_id: int) -> pa.Schema:
            return schema

        def records(self, rows: pa.RecordBatch, header: BatchHeader) -> pa.RecordBatch:
            return topic.records(rows, append_time_us=header.append_time)

    count = 40_000
    table = pa.record_batch([pa.array(range(count), pa.int32()), pa.array(["n" * 30] * count)], schema)
    header, body = encode_batch(table, schema_id=0, compression="lz4", event_time=None)
    header = header._replace(leader_epoch=EPOCH, append_time=5_000_999)
    found = fetch([(header, body.to_pybytes())], source=JsonSource(), max_bytes=1 << 30)
    batches = [read_batch(bytes(view.data)) for view in views(found)]
    assert len(batches) > 3
    assert [offset for batch in batches for offset in batch.offsets] == list(range(count))
    records = [record for batch in batches for record in batch.records]
    assert {record.time_ms for record in records} == {5000}
    assert records[7].key == b"\0\0\0\x07" and json.loads(records[7].value or b"") == {"id": 7, "name": "n" * 30}


def test_topics_with_log_append_time_have_one_time_a_batch() -> None:
    class StampedSource(Source):
        stamped = True

    header, body = stored(0, 2)
    found = views(fetch([(header._replace(max_timestamp=5_000_999), body)], source=StampedSource()))[0]
    assert found.log_append_time
    assert found.max_timestamp_ms == 5000


def test_decoded_batches_are_kept_up_to_a_limit() -> None:
    one = Rows(rows(0, 100), None)
    kept = DecodedBatches(2 * one.rows.get_total_buffer_size())
    for number in range(4):
        kept.add(("t", 0, number, 0), one)
    assert [kept.get(("t", 0, number, 0)) is one for number in range(4)] == [False, False, True, True]
    kept = DecodedBatches(1)
    kept.add(("t", 0, 0, 0), one)
    assert kept.get(("t", 0, 0, 0)) is one, "the newest stays, or each piece of a large batch would decode it"
