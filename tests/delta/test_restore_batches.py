"""Tests of a table's rows as batches of a log: offsets, times and values stay equal."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.delta.restore_batches import RestoreBatches, RestoredRows
from sparklog.record.codec import decode_batch
from sparklog.record.compacted_batch import MAX_SPAN, offsets_of
from sparklog.record.validate import validate_placed_batch

AT = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema([pa.field("text", pa.string()), pa.field("at", AT)])
#: One original batch: the event times (None: the record has none), and the leader's clock at the append.
Original = tuple[list[int | None], int]


def shown(batches: list[Original]) -> list[int]:
    """Return the times that readers see. A record without an event time has the largest time of its batch. If no
    record has one, it has the leader's clock."""
    found = []
    for times, clock in batches:
        known = [time for time in times if time is not None]
        found += [(max(known) if known else clock) if time is None else time for time in times]
    return found


def rows_of(batches: list[Original], offsets: list[int], text: str = "x") -> RestoredRows:
    own = [time for times, _ in batches for time in times]
    records = pa.record_batch([pa.array([text] * len(own)), pa.array(own, AT)], SCHEMA)
    return RestoredRows(records, np.array(offsets, dtype=np.int64), np.array(shown(batches), dtype=np.int64))


def read_back(placing: RestoreBatches, rows: RestoredRows, begin: int) -> tuple[list[int], list[int], list[object]]:
    """Return the offsets, times and texts that readers of the batches see. The leader would accept each batch."""
    offsets: list[int] = []
    times: list[int] = []
    texts: list[object] = []
    for header, body in placing.batches(rows, begin):
        validate_placed_batch(
            header,
            memoryview(body),
            schema=SCHEMA,
            schema_id=0,
            max_message_bytes=placing.max_message_bytes,
            event_time=placing.event_time,
        )
        assert header.base_offset == begin
        begin = header.next_offset
        records = decode_batch(header, body, SCHEMA)
        if not header.record_count:
            continue
        offsets += offsets_of(header, memoryview(body)).tolist()
        texts += records.column("text").to_pylist()
        own = records.column("at").cast(pa.int64()).to_pylist() if placing.event_time else [None] * len(records)
        times += [header.max_timestamp if time is None else time for time in own]
    assert begin == int(rows.offsets[-1]) + 1
    return offsets, times, texts


TIMES = st.one_of(st.none(), st.integers(-3, 20))
ORIGINALS = st.lists(st.tuples(st.lists(TIMES, min_size=1, max_size=6), st.integers(0, 20)), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(batches=ORIGINALS, gaps=st.lists(st.integers(0, 2), min_size=36, max_size=36), event_time=st.booleans())
def test_restored_batches_equal_the_archived_rows(batches: list[Original], gaps: list[int], event_time: bool) -> None:
    if not event_time:
        batches = [([None] * len(times), clock) for times, clock in batches]
    count = sum(len(times) for times, _ in batches)
    offsets = (np.cumsum(np.array(gaps[:count])) + np.arange(count) + 10).tolist()
    rows = rows_of(batches, offsets)
    placing = RestoreBatches(SCHEMA, 0, "at" if event_time else None, 1 << 20)
    assert read_back(placing, rows, 7) == (offsets, shown(batches), ["x"] * count)


def test_records_with_and_without_times_share_a_batch() -> None:
    """If producers omit every second time, the restored topic must not have batches of one record."""
    originals: list[Original] = [([*range(number, number + 9), None], 0) for number in range(0, 1000, 10)]
    rows = rows_of(originals, list(range(1000)))
    placing = RestoreBatches(SCHEMA, 0, "at", 1 << 20)
    assert len(list(placing.batches(rows, 0))) == 100
    assert read_back(placing, rows, 0)[1] == shown(originals)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_batches_obey_the_topics_size_limit(compression: str | None) -> None:
    texts = ["a" * size for size in (10, 20_000, 30_000, 90_000, 5, 7)] * 20
    records = pa.record_batch([pa.array(texts), pa.array(range(120), AT)], SCHEMA)
    offsets = np.arange(120, dtype=np.int64)
    placing = RestoreBatches(SCHEMA, 0, "at", 100_000, compression)
    found = read_back(placing, RestoredRows(records, offsets, offsets), 0)
    assert found == (list(range(120)), list(range(120)), texts)


def test_a_part_of_a_column_of_lists_is_written_alone() -> None:
    tags = pa.field("tags", pa.list_(pa.struct([pa.field("name", pa.string())])))
    schema = SCHEMA.append(tags)
    lists = [[{"name": "n"}]] * 20_000 + [None] * 5
    columns = [pa.array(["x"] * 20_005), pa.array([*[1] * 20_000, *[None] * 5], AT), pa.array(lists, tags.type)]
    offsets = np.arange(20_005, dtype=np.int64)
    rows = RestoredRows(pa.record_batch(columns, schema), offsets, np.where(offsets < 20_000, 1, 0))
    batches = list(RestoreBatches(schema, 0, "at", 20_000).batches(rows, 0))
    assert max(batch.header.length for batch in batches) < 20_000
    assert [decode_batch(*batch, schema).column("tags").to_pylist() for batch in batches][-1] == [None] * 5


def test_gaps_too_long_for_a_batch_split_it() -> None:
    offsets = [0, 1, 5 * MAX_SPAN, 5 * MAX_SPAN + 1, 6 * MAX_SPAN]
    rows = rows_of([([1, 2, 3, 4, 5], 0)], offsets)
    assert read_back(RestoreBatches(SCHEMA, 0, "at", 1 << 20), rows, 0)[:2] == (offsets, [1, 2, 3, 4, 5])
