"""The controller's handling of topics: reads and writes of their metadata, and deletions.

The objects of this module are not thread-safe: they are parts of ``Controller``. A topic's metadata has at most one
write in flight. That write may also contain states of the topic's partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparklog.controller.cluster_state import ClusterPartition, ClusterState, ClusterTopic
from sparklog.controller.effects import (
    ControllerReport,
    DeleteTopicNodes,
    DropDeletionRequest,
    Effect,
    ReadTopic,
    WriteTopic,
)
from sparklog.controller.events import DeletionsRead, Loaded, TopicDeleted, TopicNotWritten, TopicSnapshot, TopicWritten
from sparklog.controller.outbox import Outbox
from sparklog.controller.partition_states import PartitionStates
from sparklog.model import VersionedState


class TopicChanges:
    """The part of ``Controller`` that handles topics: changes read from ZooKeeper, and its own writes of topics."""

    def __init__(
        self,
        state: ClusterState,
        states: PartitionStates,
        *,
        outbox: Outbox,
        forget: Callable[[ClusterPartition], None],
        effects: list[Effect],
    ) -> None:
        """Create the part. ``forget`` removes a deleted partition from the other parts of the controller."""
        self._state = state
        self._states = states
        self._outbox = outbox
        self._forget = forget
        self._effects = effects
        self._deletions = _Deletions()

    def read(self, snapshot: TopicSnapshot) -> None:
        """Store a topic that was read from ZooKeeper, and notify brokers of the changes."""
        record = snapshot.record
        known = self._state.topics.get(record.name)
        if known is not None and known.record.topic_id != record.topic_id:
            # The topic was probably deleted and created again between two reads. Before brokers delete logs they check
            # the deletion in ZooKeeper.
            self.drop(record.name, deleted=False)
            known = None
        if known is not None:
            if known.rereading:
                known.rereading = False
                self._states.mark(known.partitions)
            if snapshot.version < known.version:
                self._states.adopt_found(known)
                return  # Ignore a snapshot that is older than the known record.
            if known.record == record:
                # The record was changed and changed back. A write that expects the old version would always be refused.
                self._state.put_record(known, record, snapshot.version)
                self._states.adopt_found(known)
                return
        topic, changed = self._state.put_topic(snapshot)
        self._states.adopt_found(topic)
        if known is None:
            topic.announced = any(p.stored is not None for p in topic.partitions)
            if not topic.announced:
                self._outbox.topic_created(topic)
        if topic.announced:
            # Include the partitions in reassignment: with other settings, other replicas may leave.
            stored = [p for p in dict.fromkeys((*changed, *topic.moving)) if p.stored is not None]
            self._outbox.topic_changed(topic, stored)
        self._states.mark(topic.partitions)  # Mark all partitions, because the topic may allow unclean elections now.
        self._delete_if_requested(topic)

    def on_deletions(self, event: Loaded | DeletionsRead) -> None:
        """Replace the known deletion requests by the requests of the event, and begin the deletions."""
        self._deletions.read(event.deletions)
        for name in event.deletions:
            self._delete_if_requested(self._state.topics.get(name))

    def _delete_if_requested(self, topic: ClusterTopic | None) -> None:
        order = self._deletions.order(topic) if topic is not None else None
        if order is not None:
            self._effects.append(order)

    def on_deleted(self, event: TopicDeleted) -> None:
        """Remove a topic whose deletion is complete, unless another topic with the same name has been created since."""
        self._deletions.done(event.name, event.topic_id)
        topic = self._state.topics.get(event.name)
        if topic is not None and topic.record.topic_id == event.topic_id:
            self.drop(event.name, deleted=True)

    def drop(self, name: str, *, deleted: bool) -> None:
        """Remove a topic that no longer exists, and notify brokers. They delete its logs only if it was ``deleted``."""
        topic = self._state.drop_topic(name)
        if topic is None:
            return
        self._outbox.topic_gone(topic, deleted=deleted)
        for partition in topic.partitions:
            self._states.end_write(partition)
            self._states.unmark(partition)
            self._forget(partition)

    def write(self, topic: ClusterTopic, order: WriteTopic) -> None:
        """Request a write of a topic's metadata. The write may include states of the topic's partitions."""
        topic.pending = order
        for write in order.writes:
            self._states.begin_write(topic.partitions[write.tp.partition], write)
        self._effects.append(order)

    def on_written(self, event: TopicWritten | TopicNotWritten) -> None:
        """Store the metadata and states that were written. If the write failed, request reads of them."""
        topic = self._state.topics.get(event.name)
        if topic is None or topic.record.topic_id != event.topic_id or topic.pending is None:
            return
        order, topic.pending = topic.pending, None
        partitions = [p for p in (self._state.partition(write.tp) for write in order.writes) if p is not None]
        for partition in partitions:
            self._states.end_write(partition)
        if isinstance(event, TopicNotWritten):
            self._effects.append(ControllerReport("controller.topics.refused", f"{event.name}: {event.detail}"))
            topic.rereading = True
            if self._states.connected:
                self._effects.append(ReadTopic(event.name))
            self._states.reread(partitions)
            return
        for partition, write in zip(partitions, order.writes, strict=True):
            stored = VersionedState(write.state, write.expected_version + 1, write.leader_incarnation)
            self._states.adopt(partition, stored)
        version = order.expected_version + 1
        if version > topic.version:
            partitions += self._state.put_record(topic, order.record, version)
        if order.ended:
            detail = f"{len(order.ended)} partitions of {event.name}, {order.ended[0]} among them"
            self._effects.append(ControllerReport("controller.reassignments.finished", detail, len(order.ended)))
        self._outbox.partitions_changed(partitions)
        self._states.mark(topic.partitions)


class _Deletions:
    """A tracker of the requested deletions. It maps the name of each topic to the id of the topic to delete.

    A request is a node in ZooKeeper with the topic's name and id. Each read returns all deletion requests.
    """

    def __init__(self) -> None:
        self._requested: dict[str, str] = {}

    def read(self, requested: Mapping[str, str]) -> None:
        """Replace the known deletion requests by ``requested``, which has all current ones."""
        self._requested = dict(requested)

    def order(self, topic: ClusterTopic) -> DeleteTopicNodes | DropDeletionRequest | None:
        """Return the effect that the request to delete this topic needs now, or None.

        A request to delete an earlier topic of the same name is void.
        """
        name, topic_id = topic.record.name, topic.record.topic_id
        if topic.deleting or name not in self._requested:
            return None
        if self._requested[name] != topic_id:
            return DropDeletionRequest(name, self._requested.pop(name))
        topic.deleting = True
        return DeleteTopicNodes(name, topic_id)

    def done(self, name: str, topic_id: str) -> None:
        """Remove a finished deletion request, but keep a later request to delete a recreated topic of this name."""
        if self._requested.get(name) == topic_id:
            del self._requested[name]
