"""Requested topic deletions and the effects that they need.

A request is a node in ZooKeeper with the topic's name and id. The requests are a level: each read returns all of them.
Mutable, owned by one ``Controller``.
"""

from __future__ import annotations

from collections.abc import Mapping

from sparklog.controller.cluster_state import Topic
from sparklog.controller.effects import DeleteTopic, DropDeletionRequest


class Deletions:
    """The ids of the topics to be deleted, by name."""

    def __init__(self) -> None:
        self._asked: dict[str, str] = {}

    def read(self, asked: Mapping[str, str]) -> None:
        """Replace the known requests by ``asked``, which has all of them."""
        self._asked = dict(asked)

    def order(self, topic: Topic) -> DeleteTopic | DropDeletionRequest | None:
        """Return the effect that this topic's request needs now, or None.

        A request for an earlier topic of the same name is void.
        """
        name, topic_id = topic.record.name, topic.record.topic_id
        if topic.deleting or name not in self._asked:
            return None
        if self._asked[name] != topic_id:
            return DropDeletionRequest(name, self._asked.pop(name))
        topic.deleting = True
        return DeleteTopic(name, topic_id)

    def done(self, name: str, topic_id: str) -> None:
        """Drop a finished request, but not a later request for a recreated topic of this name."""
        if self._asked.get(name) == topic_id:
            del self._asked[name]
