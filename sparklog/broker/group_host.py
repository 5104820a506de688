"""A group coordinator in a broker: told by the cluster's metadata which topics are gone."""

from __future__ import annotations

import logging
from typing import Any

from sparklog.broker.coordinator_host import CoordinatorHost
from sparklog.broker.partition import Partition
from sparklog.broker.state import BrokerState
from sparklog.config import BrokerConfig
from sparklog.coordinator.group_offsets import Groups, GroupSettings, TopicsGone
from sparklog.errors import BrokerError, ClusterError

_log = logging.getLogger(__name__)


class GroupHost(CoordinatorHost):
    """One led partition of the groups' topic."""

    def __init__(self, broker: BrokerState, partition: Partition) -> None:
        self.groups = Groups(_settings(broker.config))
        #: The topic that had been deleted last when this was looked at last.
        self._forgotten = ""
        super().__init__(broker, partition, self.groups)

    def perform(self, effect: Any) -> None:
        raise AssertionError(f"not an order of a group coordinator: {effect!r}")

    async def load(self) -> None:
        await super().load()
        if not self.unready:
            self._drop_deleted()
            self.broker.metadata_listeners.append(self._metadata_changed)

    def end(self) -> None:
        super().end()
        if self._metadata_changed in self.broker.metadata_listeners:
            self.broker.metadata_listeners.remove(self._metadata_changed)

    def _metadata_changed(self) -> None:
        newest = next(reversed(self.broker.cache.forgotten), "")
        if newest != self._forgotten:
            self._drop_deleted()

    def _drop_deleted(self) -> None:
        """Drop the offsets of topics that were deleted, or made anew under their name: so the controller said, or
        ZooKeeper does, for this broker may be the last to hear of a new topic."""
        forgotten = self.broker.cache.forgotten
        self._forgotten = next(reversed(forgotten), "")
        unknown = []
        for topic, topic_id in self.groups.topics():
            known = self.broker.cache.topic(topic)
            if known is None or topic_id not in {"", known.change.topic_id}:
                unknown.append((topic, topic_id))
        told = [one for one in unknown if one[1] in forgotten]
        if told:
            self.step(TopicsGone(tuple(told)))
        if len(unknown) > len(told):
            asked = [one for one in unknown if one[1] not in forgotten]
            self.broker.spawn(self._drop_if_gone(asked), f"topics of {self.partition.tp}")

    async def _drop_if_gone(self, topics: list[tuple[str, str]]) -> None:
        try:
            gone = [one for one in topics if not await self.broker.registry.topic_lives(*one)]
        except (BrokerError, ClusterError) as error:  # the next deletion, or the next coordinator, looks again
            _log.info("%s: whether topics are gone is not known: %s", self.partition.tp, error)
            return
        if gone:
            self.step(TopicsGone(tuple(gone)))


def _settings(config: BrokerConfig) -> GroupSettings:
    """The memory of a transaction's decision ends well before the transaction's key is forgotten, after which its
    decisions count from the beginning."""
    return GroupSettings(
        retention_ms=config.offsets_retention_ms,
        handover_ms=min(86_400_000, config.transactional_id_expiration_ms // 2, config.sink_id_expiration_ms // 2),
    )
