"""The size of a micro-batch: limits by rows and time, and the distribution of the rows over partitions.

Source: Spark's KafkaMicroBatchStream (rateLimit, delayBatch), with the same results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows

from sparklog.model import OffsetRange, TopicPartition


@dataclass(frozen=True, slots=True)
class TriggerLimits:
    """The limits of a micro-batch: the maximum (``most``) and minimum (``least``) number of offsets, or None.

    Once ``max_delay_ms`` have passed since the last batch with rows, the minimum is ignored.
    """

    most: int | None = None
    least: int | None = None
    max_delay_ms: int = 15 * 60 * 1000

    def default_read_limit(self) -> ReadLimit:
        """Return the limit that the source reports to Spark.

        Spark accepts only one limit (pyspark 4.2.0), so ``least`` is not reported if ``most`` is set. Spark passes the
        limit back when it plans a batch, except for the trigger Once, which ignores limits.
        """
        if self.most is not None:
            return ReadMaxRows(self.most)
        return ReadAllAvailable() if self.least is None else ReadMinRows(self.least)


class TriggerClock:
    """A clock for maxTriggerDelay: it stores the time of the last planned batch with rows.

    Each run of a query has its own clock.
    """

    def __init__(self) -> None:
        self._last_ms: float | None = None

    def is_too_early(self, limits: TriggerLimits, waiting: int, now_ms: float) -> bool:
        """Return whether ``waiting`` offsets are too few to begin a batch now. The first batch of a run never waits."""
        if limits.least is None or not waiting:
            return False
        if self._last_ms is not None and waiting < limits.least and now_ms - self._last_ms < limits.max_delay_ms:
            return True
        self._last_ms = now_ms
        return False


def spread(available: Mapping[TopicPartition, OffsetRange], limit: int | None) -> dict[TopicPartition, int]:
    """Return the end offset of each partition in a batch of about ``limit`` offsets.

    Each partition gets a share in proportion to its available offsets. A partition with a share below one gets one
    offset, so that small partitions do not starve.
    """
    total = sum(found.end - found.start for found in available.values())
    if limit is None or total <= limit:
        return {tp: found.end for tp, found in available.items()}
    ends = {}
    for tp, found in available.items():
        share = limit * (found.end - found.start) / total
        step = math.ceil(share) if share < 1 else math.floor(share)
        ends[tp] = min(found.end, found.start + step)
    return ends
