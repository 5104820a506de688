"""Tests of batches that compaction merges: records keep their times, in any new batch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from sparklog.record.codec import decode_batch, encode_batch
from sparklog.record.compacted_batch import BatchMerger, CompactedBatch, Source, offsets_of

SCHEMA = pa.schema([("key", pa.int64()), ("time", pa.timestamp("us"))])
APPENDED = 1_000_000


def _source(times: Sequence[int | None], *, base: int, event_time: str | None, keep: Sequence[int] = ()) -> Source:
    """Return a batch as its leader stores it, with the records ``keep``, or with all if it is empty."""
    batch = pa.record_batch([pa.array(range(len(times))), pa.array(times, pa.timestamp("us"))], SCHEMA)
    header, body = encode_batch(batch, schema_id=0, compression=None, event_time=event_time)
    if header.max_timestamp < 0:
        header = header._replace(min_timestamp=APPENDED + base, max_timestamp=APPENDED + base)
    header = header._replace(base_offset=base, offset_span=len(times), leader_epoch=1, append_time=APPENDED + base)
    kept = np.array(keep or range(len(times)), np.int64)
    return Source(header, memoryview(body), batch.take(pa.array(kept)), base + kept)


def _merged(sources: Sequence[Source], event_time: str | None, *, keep_times: bool = True) -> list[CompactedBatch]:
    merger = BatchMerger(SCHEMA, target_bytes=1 << 20, event_time=event_time, keep_times=keep_times)
    made = [batch for source in sources for batch in merger.add(source, alone=False)]
    return made + merger.flush()


def _shown(records: pa.RecordBatch, offsets: Sequence[int], greatest: int, event_time: str | None) -> dict[int, int]:
    """Return the time of each record by its offset, as docs/spark.md defines it."""
    times = records.column("time").cast(pa.int64()).to_pylist() if event_time else [None] * len(offsets)
    return {int(at): greatest if time is None else time for at, time in zip(offsets, times, strict=True)}


def _shown_by(made: Sequence[CompactedBatch], event_time: str | None) -> dict[int, int]:
    shown: dict[int, int] = {}
    for header, body in made:
        records = decode_batch(header, memoryview(body)[: header.length + header.offset_array_length], SCHEMA)
        found = _shown(records, list(offsets_of(header, body)), header.max_timestamp, event_time)
        assert all(header.min_timestamp <= time <= header.max_timestamp for time in found.values())
        shown |= found
    return shown


@pytest.mark.parametrize("event_time", ["time", None])
@pytest.mark.parametrize("seed", range(100))
def test_no_record_changes_its_time(seed: int, event_time: str | None) -> None:
    chance = random.Random(seed)
    sources: list[Source] = []
    before: dict[int, int] = {}
    base = 0
    for _ in range(chance.randrange(1, 8)):
        times = [chance.choice([None, chance.randrange(1, 50)]) for _ in range(chance.randrange(1, 5))]
        keep = sorted(chance.sample(range(len(times)), chance.randint(1, len(times))))
        source = _source(times, base=base, event_time=event_time, keep=keep)
        before |= _shown(source.records, list(source.offsets), source.header.max_timestamp, event_time)
        sources.append(source)
        base += len(times)
    assert _shown_by(_merged(sources, event_time), event_time) == before


def test_batches_with_own_times_are_merged() -> None:
    sources = [_source([base + 7, base + 5], base=base, event_time="time") for base in (0, 2, 4)]
    (made,) = _merged(sources, "time")
    assert (made.header.record_count, made.header.min_timestamp, made.header.max_timestamp) == (6, 5, 11)


@pytest.mark.parametrize("event_time", ["time", None])
def test_batches_without_times_merge_if_they_show_the_same_time(event_time: str | None) -> None:
    sources = [_source([None], base=base, event_time=event_time) for base in range(4)]
    sources[1] = sources[1]._replace(header=sources[1].header._replace(max_timestamp=APPENDED))
    made = _merged(sources, event_time)
    assert [(batch.header.record_count, batch.header.max_timestamp - APPENDED) for batch in made] == [
        (2, 0),
        (1, 2),
        (1, 3),
    ]


def test_batches_without_shown_times_all_merge() -> None:
    """Coordinators write such logs: one record a batch, which the next coordinator has to read at its start."""
    sources = [_source([None], base=base, event_time="time") for base in range(4)]
    (made,) = _merged(sources, "time", keep_times=False)
    assert (made.header.record_count, made.header.min_timestamp, made.header.max_timestamp) == (
        4,
        APPENDED,
        APPENDED + 3,
    )
