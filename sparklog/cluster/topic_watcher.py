"""Watcher of the topics in ZooKeeper for a controller term: it reports each record, its changes, and removed topics.

One watch reports the names, and one watch per topic reports its record. The watch of a record ends when its node is
gone. Otherwise ZooKeeper would keep a watch for each deleted topic, whose name may never be used again.
"""

from __future__ import annotations

from collections.abc import Callable

from sparklog.model import check_topic_name
from sparklog.zk import paths
from sparklog.zk.session import Node, ZkSession


class TopicWatcher:
    """Watches of all topics. Owner: the term. Life cycle: active until ``close``."""

    def __init__(self, session: ZkSession, *, found: Callable[[str, Node], None], gone: Callable[[str], None]) -> None:
        """Start to watch. ``found`` receives a topic's name and node, first the present one and then each changed one.
        ``gone`` receives a name that is no longer listed. For a topic that is recreated immediately after its deletion,
        only ``found`` may be called."""
        self._session = session
        self._found = found
        self._gone = gone
        #: For each listed name, the function that ends its watch.
        self._unwatch: dict[str, Callable[[], None]] = {}
        #: The listed names whose node was missing: either the list is out of date, or the topic was recreated since
        #: then.
        self._missing: set[str] = set()
        self._unwatch_names = session.watch_children(paths.TOPICS, self._listed)

    def close(self) -> None:
        for unwatch in (self._unwatch_names, *self._unwatch.values()):
            unwatch()

    def _listed(self, names: tuple[str, ...] | None) -> None:
        """Watch new and recreated topics, and report names that are no longer listed.

        After the deletion of a listed topic a newer list always arrives, because the deletion changes the list and a
        session's responses arrive in the order of its requests.
        """
        present = {name for name in names or () if not check_topic_name(name)}
        for name in present - (self._unwatch.keys() - self._missing):
            self._missing.discard(name)
            self._unwatch[name] = self._session.watch_data(paths.topic(name), self._reader(name), until_gone=True)
        for name in self._unwatch.keys() - present:
            self._unwatch.pop(name)()
            self._missing.discard(name)
            self._gone(name)

    def _reader(self, name: str) -> Callable[[Node | None], None]:
        def read(node: Node | None) -> None:
            if node is None:
                self._missing.add(name)
            else:
                self._found(name, node)

        return read
