"""``groupId``: progress of a query, stored as a consumer group's offsets for monitoring. It never determines where a
query starts.

Spark reports to a source that a batch is complete only when it builds the next one, and never for the last one. But the
start of a batch is the end of the last completed batch, so that is stored.
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

#: Only monitoring needs the stored progress, so a query waits briefly, and not in every batch if no broker responds.
_TIMEOUT_S = 5.0
_PAUSE_S = 30.0


class GroupProgress:
    """Writer of one query's positions to one group. Owner: the query's planning thread."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._stored: Mapping[TopicPartition, Position] = {}
        self._silent_until = 0.0

    def store(self, link: BlockingCluster, positions: Mapping[TopicPartition, Position]) -> None:
        """Set the group's offsets to ``positions``; an error is logged, and the query continues."""
        if positions == self._stored or time.monotonic() < self._silent_until:
            return
        offsets = [
            GroupOffset(tp.topic, tp.partition, found.offset, found.topic_id, found.epoch)
            for tp, found in positions.items()
            if found != self._stored.get(tp)
        ]
        from sparklog.client.admin.groups import commit_offsets  # only for queries with a group

        try:
            commit_offsets(link, self._group, offsets, timeout_s=_TIMEOUT_S)
        except SparklogError as error:
            self._silent_until = time.monotonic() + _PAUSE_S
            _LOG.warning("could not store progress in group %s: %s", self._group, error)
        else:
            self._stored = dict(positions)
