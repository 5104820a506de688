"""Random record batches for the tests of Kafka's records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.kafka.records.reference import Batch, Record

#: The times of which all fit into microseconds, with those at the borders.
LEAST_MS, GREATEST_MS = -9223372036854775, 9223372036854775

_TIMES = st.one_of(
    st.integers(1_700_000_000_000, 1_700_000_100_000),
    st.sampled_from((-1, 0, 1, -2, LEAST_MS, GREATEST_MS)),
    st.integers(LEAST_MS, GREATEST_MS),
)
#: Lengths at which the varint of a length, or of the record's length, gets another byte.
_LENGTHS = st.sampled_from((0, 1, 55, 56, 63, 64, 127, 128, 8180, 8191, 8192))
_BYTES = st.one_of(st.none(), st.binary(max_size=20), _LENGTHS.map(lambda length: b"v" * length))
_HEADERS = st.lists(st.tuples(st.text(max_size=5), st.one_of(st.none(), st.binary(max_size=5))), max_size=3)

RECORDS = st.builds(Record, _BYTES, _BYTES, st.one_of(st.just(()), _HEADERS.map(tuple)), _TIMES)
PLAIN_RECORDS = st.builds(Record, _BYTES, _BYTES, st.just(()), st.integers(1_700_000_000_000, 1_700_000_100_000))


@st.composite
def record_lists(draw: st.DrawFn) -> list[Record]:
    """Draw the records of a batch: few different ones, or some repeated so often that runs of equal ones begin."""
    records = draw(st.lists(draw(st.sampled_from((RECORDS, PLAIN_RECORDS))), min_size=1, max_size=12))
    copies = draw(st.sampled_from((1, 1, 1, 3, 40)))
    if draw(st.booleans()):
        return [record for record in records for _ in range(copies)]
    return records * copies


def produced(records: Sequence[Record], *, base_timestamp: int | None = None, **changes: Any) -> Batch:
    """Return ``records`` as the batch that a producer sends. ``changes`` are other fields."""
    base = records[0].time_ms if base_timestamp is None else base_timestamp
    batch = Batch(
        base_offset=0,
        leader_epoch=-1,
        attributes=0,
        last_offset_delta=len(records) - 1,
        base_timestamp=base,
        max_timestamp=max(record.time_ms for record in records),
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        offsets=tuple(range(len(records))),
        records=tuple(records),
    )
    return batch._replace(**changes)
