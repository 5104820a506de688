"""The option ``groupId``: a query's progress is stored as offsets of a consumer group, for monitoring only.

These offsets never determine where a query starts. Spark informs a source about a completed batch only when Spark plans
the next batch, and never about the last batch of a query. The start of a planned batch is the end of the last completed
batch, so this start is stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import SparklogError
from sparklog.model import TopicPartition
from sparklog.protocol.messages import GroupOffset
from sparklog.spark.stream_offset import Position

_LOG = logging.getLogger(__name__)

#: The maximum wait of a query for a broker, and the pause after a failure before it stores offsets again. Only
#: monitoring needs the offsets, so a query must neither wait long nor wait in every batch.
_TIMEOUT_S = 5.0
_PAUSE_S = 30.0


class GroupProgress:
    """A writer that stores one query's positions as offsets of one consumer group.

    Not thread-safe: use it only in the query's planning thread.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._stored: Mapping[TopicPartition, Position] = {}
        self._silent_until = 0.0

    def store(self, link: BlockingCluster, positions: Mapping[TopicPartition, Position]) -> None:
        """Set the group's offsets to ``positions``. An error is only logged, so that the query continues."""
        if positions == self._stored or time.monotonic() < self._silent_until:
            return
        offsets = [
            GroupOffset(tp.topic, tp.partition, found.offset, found.topic_id, found.epoch)
            for tp, found in positions.items()
            if found != self._stored.get(tp)
        ]
        from sparklog.client.admin.groups import commit_offsets  # Only queries with a group need it.

        try:
            commit_offsets(link, self._group, offsets, timeout_s=_TIMEOUT_S)
        except SparklogError as error:
            self._silent_until = time.monotonic() + _PAUSE_S
            _LOG.warning("could not store progress in group %s: %s", self._group, error)
        else:
            self._stored = dict(positions)
