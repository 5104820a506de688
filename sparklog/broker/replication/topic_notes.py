"""The file ``topics`` of the log directory: name, schemas, settings and replicas of each topic that this broker hosts.

The content comes from the controller's updates. The file is needed only to rebuild a lost ZooKeeper, and for set-aside
logs. So the broker writes it with some delay, in a thread, and only if its content has changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import msgspec

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.partitions import Partitions
from sparklog.model import TopicNote
from sparklog.protocol.messages import ControlUpdate, PartitionDecision

_log = logging.getLogger(__name__)


class TopicNotes:
    """A list of the topics that this broker hosts, in memory and in the file ``topics``.

    Not thread-safe: use it on the broker's event loop. Only ``write`` may run in any thread, one call at a time.
    """

    def __init__(self, context: BrokerContext, partitions: Partitions) -> None:
        self._context = context
        self._partitions = partitions
        self._directory = directory = partitions.directory
        self._noted = directory.topic_notes()
        #: The topics that updates have named since the last ``collect``, and whether a topic may have been deleted
        #: since.
        self._named: set[str] = set()
        self._may_be_gone = False

    def start(self) -> None:
        self._context.spawn(self._repeat(), "topic notes")

    def on_update(self, update: ControlUpdate) -> None:
        """Remember the topics in an applied update, so that ``collect`` checks their notes."""
        self._may_be_gone |= update.full or bool(update.deleted)
        self._named.update(change.name for change in update.topics)
        self._named.update(decision.topic for decision in update.partitions)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._context.config.checkpoint_interval_ms / 1000)
            if self.collect():
                await asyncio.to_thread(self.write)

    def collect(self) -> bool:
        """Update the notes of the topics that ``on_update`` received. Return whether the caller must call ``write``."""
        named, self._named = self._named, set()
        hosted = {partition.tp.topic for partition in self._partitions} & named if named else set()
        changed, self._may_be_gone = self._may_be_gone, False
        for name in hosted:
            topic = self._context.cache.topic(name)
            if topic is None:
                continue
            change = topic.change
            known = self._noted.get(change.topic_id)
            note = TopicNote(
                change.name,
                change.topic_id,
                change.schemas,
                change.key_columns,
                change.event_time,
                change.config,
                _replicas(topic.partitions),
                change.order,
                known.noted_ms if known is not None else 0,
            )
            if note != known:
                now_ms = time.time_ns() // 1_000_000
                self._noted[change.topic_id] = msgspec.structs.replace(note, noted_ms=now_ms)
                changed = True
        return changed

    def write(self) -> None:
        """Drop the notes on topics without data on this broker, and write all other notes to disk.

        This blocks for an fsync.
        """
        live = {log.topic_id for log in self._directory.logs()}
        hosted = {partition.topic_id for partition in self._partitions}
        kept = {entry.mark.topic_id for entry in self._directory.kept_aside.entries()}
        self._noted = {i: note for i, note in self._noted.items() if i in live or i in hosted or i in kept}
        try:
            self._directory.write_topic_notes(self._noted)
        except OSError as error:  # a full disk: a rebuild of ZooKeeper would not know the newest settings
            _log.warning("could not record topics in the log directory: %s", error)


def _replicas(partitions: Mapping[int, PartitionDecision]) -> tuple[tuple[int, ...], ...]:
    """Return the replicas of each partition, by its number; an empty tuple for an unknown partition."""
    count = max(partitions, default=-1) + 1
    return tuple(partitions[number].replicas if number in partitions else () for number in range(count))
