"""The speed of the conversion between Kafka's record batches and the log's batches: ``python -m bench.kafka_records``.

Each row is a batch of ``n`` records. The sizes of its values are equal, or vary around the given size. A figure is the
number of records, in millions, for one second of processor time. It is the best of several runs in one process.
``loop`` reads or writes one record after the other. ``numpy`` reads or writes one field of all records at once.
``stored`` is the batch of the log, with its checksum. The codec uses ``loop`` for batches with fewer records than a
threshold. This table shows the threshold at which ``numpy`` is as fast as ``loop``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from sparklog.kafka.records import decode, encode
from sparklog.kafka.records.batch_view import read_batches
from sparklog.kafka.records.decode import decode_batch
from sparklog.kafka.records.encode import encode_batch
from sparklog.record.arrays import array_of, binary_of
from sparklog.record.schema import DEFAULT_SCHEMA

#: Number of records, size of a value, whether sizes vary, whether records have keys, headers of each record.
SHAPES = [
    (1, 100, True, False, 0),
    (10, 100, True, False, 0),
    (60, 100, True, False, 0),
    (130, 100, True, False, 0),
    (250, 100, True, False, 0),
    (400, 100, True, False, 0),
    (1000, 100, True, False, 0),
    (10_000, 100, True, False, 0),
    (10_000, 100, False, False, 0),
    (10_000, 100, True, True, 0),
    (10_000, 100, True, False, 2),
    (16, 1000, True, False, 0),
    (130, 1000, True, False, 0),
    (1000, 1000, True, False, 0),
    (1000, 1000, False, False, 0),
]
#: The processor time of the runs of one figure, in seconds.
_BUDGET_S = 0.4
_LIMIT = 64 << 20


def rows_of(count: int, size: int, varying: bool, keyed: bool, headers: int) -> pa.RecordBatch:
    """Return rows with ascending times. Values have ``size`` bytes, or with ``varying`` 0.5 to 1.5 times ``size``."""
    dice = np.random.default_rng(1)
    sizes = dice.integers(size // 2, size * 3 // 2, count) if varying else np.full(count, size)
    values = binary_of([dice.bytes(length) for length in sizes.tolist()])
    keys = binary_of([b"key-%d" % number if keyed else None for number in range(count)])
    pairs = [[("trace", b"%016d" % number)] * headers or None for number in range(count)]
    times = array_of(1_700_000_000_000_000 + np.arange(count) * 50, DEFAULT_SCHEMA.field("timestamp").type)
    return pa.RecordBatch.from_arrays(
        [keys, values, pa.array(pairs, DEFAULT_SCHEMA.field("headers").type), times], schema=DEFAULT_SCHEMA
    )


def rate(work: Callable[[], object], count: int) -> float:
    """Return the best rate of ``work`` on ``count`` records, in millions of records per second of processor time."""
    best, end = float("inf"), time.process_time() + _BUDGET_S
    while time.process_time() < end:
        began = time.perf_counter()
        for _ in range(repeats := max(2000 // count, 1)):
            work()
        best = min(best, (time.perf_counter() - began) / repeats)
    return count / best / 1e6


def figures(count: int, size: int, varying: bool, keyed: bool, headers: int) -> dict[str, float]:
    rows = rows_of(count, size, varying, keyed, headers)
    data = memoryview(b"".join(encode_batch(rows, base_offset=0, leader_epoch=0)))

    def to_log() -> None:
        (view,) = read_batches(data)
        decode_batch(view, max_bytes=_LIMIT).stored(schema_id=0, timed=True)

    def to_kafka() -> None:
        encode_batch(rows, base_offset=1000, leader_epoch=3)

    found = {}
    for way, few in (("loop", 10**9), ("numpy", 0)):
        both = patch.multiple(decode, FEW_RECORDS=few, _FEW_BYTES=few)
        with both, patch.object(encode, "FEW_RECORDS", few):
            found[f"stored, {way}"] = rate(to_log, count)
            found[f"encode, {way}"] = rate(to_kafka, count)
    return found


def main() -> None:
    names = ["stored, loop", "stored, numpy", "encode, loop", "encode, numpy"]
    print(f"{'records':>28}" + "".join(f"{name:>16}" for name in names))
    for shape in SHAPES:
        count, size, varying, keyed, headers = shape
        label = f"{count} x {size} B{'' if varying else ' equal'}{' keys' if keyed else ''}"
        label += f" {headers} headers" if headers else ""
        found = figures(*shape)
        print(f"{label:>28}" + "".join(f"{found[name]:>16.2f}" for name in names), flush=True)


if __name__ == "__main__":
    main()
