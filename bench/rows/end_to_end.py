"""The time of a record from the producer to a reader at 50,000 records/s of 100 B, with six partitions and acks=all.

The time begins with the call that passes the record to the producer, and ends when the reader's call returns the
record. Producer, reader and brokers are processes of one machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from bench.measure import Contestant, Figures, Ratio, Row
from bench.paced import Place, Stream, readers
from bench.sides import Bench, Side

_RATE = 50_000
_SECONDS, _WARM_UP_S = 10.0, 3.0
#: The linger times: the default of both systems, and Kafka's usual setting for low latency.
_DEFAULT_MS, _SHORT_MS = 5.0, 1.0


def one_run(bench: Bench, side: Side, linger_ms: float) -> Figures:
    seconds = bench.count(round(_SECONDS), 1)
    rate = _RATE // 10 if bench.quick else _RATE
    with ExitStack() as ends:
        place = Place(side.name, side.bootstrap, ends.enter_context(bench.topic(side, partitions=6)))
        (reader,) = ends.enter_context(readers(place, 1))
        stream = Stream(place, rate=rate, seconds=seconds, linger_ms=linger_ms)
        late_ms = stream.wait()
        latencies = reader.latencies(stream.count)
    counted = latencies if bench.quick else latencies[round(_WARM_UP_S * _RATE) :]
    p50, p99 = np.percentile(counted, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "sender_late": late_ms}


@contextmanager
def open_end_to_end(bench: Bench) -> Iterator[list[Contestant]]:
    contestants = [Contestant("sparklog", functools.partial(one_run, bench, bench.ours, _DEFAULT_MS), bench.ours)]
    if bench.kafka is not None:
        for name, linger_ms in (("linger 5 ms", _DEFAULT_MS), ("linger 1 ms", _SHORT_MS)):
            run = functools.partial(one_run, bench, bench.kafka, linger_ms)
            contestants.append(Contestant(name, run, bench.kafka))
    yield contestants


def _ratio(figure: str, goal: float | None) -> Ratio:
    against = (("linger 5 ms", figure), ("linger 1 ms", figure))
    return Ratio(f"end to end at 50,000 records/s: {figure}", "ms", ("sparklog", figure), against, goal, lower=True)


ROWS = (Row("end-to-end", (_ratio("p50", None), _ratio("p99", 0.5)), open_end_to_end),)
