"""The rows of the table, one module for each kind of work, in the order in which they are printed."""

from __future__ import annotations

from bench.measure import Row
from bench.rows import (
    compaction,
    compression,
    consume,
    delta,
    end_to_end,
    kafka_listener,
    latency,
    limits,
    produce,
    recovery,
    spark,
    tailing,
    typed,
)

_MODULES = (
    produce,
    latency,
    consume,
    end_to_end,
    kafka_listener,
    spark,
    typed,
    delta,
    tailing,
    recovery,
    compaction,
    compression,
    limits,
)
ROWS: tuple[Row, ...] = tuple(row for module in _MODULES for row in module.ROWS)
