"""The plan of a task that reads a range of offsets, and the error for lost records."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.datasource import InputPartition

from sparklog.client.cluster.replica_selector import LocalReadMode
from sparklog.delta.origin import ArchiveOrigin
from sparklog.errors import SparklogError
from sparklog.model import NO_EPOCH, Span, TopicPartition
from sparklog.spark.columns import ColumnPlan

if TYPE_CHECKING:
    from sparklog.net.client_security import ClientSecurity
    from sparklog.spark.token_renewal import TokenRenewal

_LOG = logging.getLogger(__name__)


class DataLoss(SparklogError):
    """The error for requested records that are lost or may be lost. With failOnDataLoss=false a read skips them."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"{detail}; set option failOnDataLoss=false to skip them with a warning")


def report_losses(losses: Sequence[str], *, fail: bool) -> None:
    """Report lost records: with ``fail``, raise DataLoss with the first loss; otherwise log a warning for each."""
    if losses and fail:
        raise DataLoss(losses[0] + (f" (and {len(losses) - 1} more)" if len(losses) > 1 else ""))
    for loss in losses:
        _LOG.warning("records may be missing: %s", loss)


class ArchivePlace(NamedTuple):
    """The location of a topic's archive, where a task finds records that were archived after the read was planned.

    ``origin`` identifies the topic, so that the task can check that the table is an archive of the topic.
    """

    table: str
    origin: ArchiveOrigin


@dataclass(frozen=True)
class RangeRead(InputPartition):
    """The plan of a task: read the offsets ``[start, end)`` of one partition as ``columns``. The driver pickles it.

    ``last_epoch`` is a leader epoch in which the log had reached ``start``. With it, the task detects that the log was
    later truncated below ``start`` (NO_EPOCH: it does not). ``local`` says whether the task may read the files of a
    replica on its host. If ``times`` (us) is set, only records with these timestamps are read. ``archive`` is set if
    the read includes the archive.
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
    local: LocalReadMode = "auto"
    archive: ArchivePlace | None = None
    security: ClientSecurity | None = None
    #: The time from which the task renews the token in ``security``; None if the task need not renew it.
    renewal: TokenRenewal | None = None
