"""Topics that are to go: which deletions were asked for, and what is to be done about them.

A request is a node in ZooKeeper with the topic's name and id, and a level like the others. Mutable, owned by one
``Controller``.
"""

from __future__ import annotations

from collections.abc import Mapping

from sparklog.controller.cluster_state import Topic
from sparklog.controller.effects import DeleteTopic, DropDeletionRequest


class Deletions:
    """Ids of the topics to be deleted, by name."""

    def __init__(self) -> None:
        self._asked: dict[str, str] = {}

    def read(self, asked: Mapping[str, str]) -> None:
        """All requests there are."""
        self._asked = dict(asked)

    def order(self, topic: Topic) -> DeleteTopic | DropDeletionRequest | None:
        """What is to be done about this topic now. A request for a topic of the same name that went before is void."""
        name, topic_id = topic.record.name, topic.record.topic_id
        if topic.deleting or name not in self._asked:
            return None
        if self._asked[name] != topic_id:
            return DropDeletionRequest(name, self._asked.pop(name))
        topic.deleting = True
        return DeleteTopic(name, topic_id)

    def done(self, name: str, topic_id: str) -> None:
        """Not what was asked meanwhile of a topic made anew under this name."""
        if self._asked.get(name) == topic_id:
            del self._asked[name]
