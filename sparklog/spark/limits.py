"""How much of what is there one micro-batch takes: limits by rows, by time, and how they spread over partitions. Pure.

Source: Spark's KafkaMicroBatchStream (rateLimit, delayBatch), whose results these are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows

from sparklog.model import OffsetRange, TopicPartition


@dataclass(frozen=True, slots=True)
class TriggerLimits:
    """``most`` and ``least`` offsets of a batch, None for no limit; ``least`` holds for ``max_delay_ms`` at most."""

    most: int | None = None
    least: int | None = None
    max_delay_ms: int = 15 * 60 * 1000

    def default_read_limit(self) -> ReadLimit:
        """What Spark is told. It takes no two limits at once (pyspark 4.2.0), so ``least`` may be kept from it; what
        it hands back tells Once, which ignores limits, from the rest."""
        if self.most is not None:
            return ReadMaxRows(self.most)
        return ReadAllAvailable() if self.least is None else ReadMinRows(self.least)


class TriggerClock:
    """When the last batch with rows was planned: what maxTriggerDelay counts from. One per run of a query."""

    def __init__(self) -> None:
        self._last_ms: float | None = None

    def is_too_early(self, limits: TriggerLimits, waiting: int, now_ms: float) -> bool:
        """Whether ``waiting`` offsets are too few to begin a batch with. The first batch of a run never waits."""
        if limits.least is None or not waiting:
            return False
        if self._last_ms is not None and waiting < limits.least and now_ms - self._last_ms < limits.max_delay_ms:
            return True
        self._last_ms = now_ms
        return False


def spread(available: Mapping[TopicPartition, OffsetRange], limit: int | None) -> dict[TopicPartition, int]:
    """The offset up to which each partition is read, so that about ``limit`` offsets are: in proportion to what each
    has, and at least one where there is any, so that small partitions do not starve."""
    total = sum(found.end - found.start for found in available.values())
    if limit is None or total <= limit:
        return {tp: found.end for tp, found in available.items()}
    ends = {}
    for tp, found in available.items():
        share = limit * (found.end - found.start) / total
        step = math.ceil(share) if share < 1 else math.floor(share)
        ends[tp] = min(found.end, found.start + step)
    return ends
