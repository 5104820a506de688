"""What a controller term is told of topics: each record, again when it changes, and that a topic is gone.

Names come from one watch, records from one for each topic. A record's watch ends where its node is gone: names of
deleted topics may never come again, and ZooKeeper would keep a watch for each.
"""

from __future__ import annotations

from collections.abc import Callable

from sparklog.model import check_topic_name
from sparklog.zk import paths
from sparklog.zk.session import Node, ZkSession


class TopicWatcher:
    """Owner: the term. Life cycle: watches until ``close``."""

    def __init__(self, session: ZkSession, *, found: Callable[[str, Node], None], gone: Callable[[str], None]) -> None:
        """``found`` is told a topic's name and node, as it is and after each change; ``gone`` of a name that is listed
        no more. One that is deleted and made anew at once may be told of by ``found`` alone."""
        self._session = session
        self._found = found
        self._gone = gone
        #: What ends the watch of each name that is listed.
        self._unwatch: dict[str, Callable[[], None]] = {}
        #: Of these, those whose node was not there: the list is out of date, or names a topic made anew by now.
        self._missing: set[str] = set()
        self._unwatch_names = session.watch_children(paths.TOPICS, self._listed)

    def close(self) -> None:
        for unwatch in (self._unwatch_names, *self._unwatch.values()):
            unwatch()

    def _listed(self, names: tuple[str, ...] | None) -> None:
        """A list that was read behind the deletion of one of these always comes: the deletion changes it, and answers
        of a session come in the order of its requests."""
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
