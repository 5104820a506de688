"""The plan of a task that reads a range of offsets, which the driver makes and pickles, and the loss of records."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from sparklog.client.cluster.replica_selector import LocalReads
from sparklog.delta.origin import Origin
from sparklog.errors import SparklogError
from sparklog.model import NO_EPOCH, Span, TopicPartition
from sparklog.spark.columns import ColumnPlan

_LOG = logging.getLogger(__name__)


class DataLoss(SparklogError):
    """Records that were to be read are gone, or may be. With failOnDataLoss=false they are passed over."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"{detail}; with option failOnDataLoss=false they are passed over with a warning")


def tell_losses(losses: Sequence[str], *, fail: bool) -> None:
    """Raises DataLoss for the first, or warns of each."""
    if losses and fail:
        raise DataLoss(losses[0] + (f" (and {len(losses) - 1} more)" if len(losses) > 1 else ""))
    for loss in losses:
        _LOG.warning("records may be missing: %s", loss)


class ArchivePlace(NamedTuple):
    """Where the topic's archive is, for what it has taken over from the log since a read of history was planned;
    ``origin`` says whose archive it may be."""

    table: str
    origin: Origin


@dataclass(frozen=True)
class RangeRead(InputPartition):
    """Offsets ``[start, end)`` of one partition of the topic with this id, as ``columns``; pickled to its task.

    ``last_epoch`` and ``local``: as for PartitionReader. ``times``: only records of these times (us). ``archive``: that
    of a read of history.
    """

    bootstrap: str
    partition: TopicPartition
    topic_id: str
    start: int
    end: int
    columns: ColumnPlan
    isolation: int
    fail_on_data_loss: bool
    last_epoch: int = NO_EPOCH
    times: Span | None = None
    local: LocalReads = "auto"
    archive: ArchivePlace | None = None
