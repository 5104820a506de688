"""The access of a term's ``Controller`` to the topics in ZooKeeper.

The module watches topics, and performs the reads, writes and deletions that the ``Controller`` requests.

One watch reports the names of all topics, and one watch per topic reports its record. The watch of a record ends when
its node is deleted. Otherwise ZooKeeper would keep a watch for each deleted topic, although its name may never be used
again.
"""

from __future__ import annotations

from collections.abc import Callable

from sparklog.cluster.core_runner import CoreRunner
from sparklog.controller.effects import DeleteTopicNodes, WriteTopic
from sparklog.controller.events import (
    Fenced,
    TopicDeleted,
    TopicGone,
    TopicNotWritten,
    TopicRead,
    TopicSnapshot,
    TopicWritten,
)
from sparklog.errors import BrokerError
from sparklog.model import TopicRecord, check_topic_name
from sparklog.zk import codecs, paths
from sparklog.zk.codecs import ZkFormatError
from sparklog.zk.controller_store import ControllerStore, EpochLost, StateChange, WriteSuperseded, Written
from sparklog.zk.session import Node, ZkSession


class TopicIo:
    """The reader, writer and watcher of topics in ZooKeeper, for one controller term. Its tasks end with the term."""

    def __init__(self, runner: CoreRunner, store: ControllerStore) -> None:
        self._runner = runner
        self._store = store
        self._deleting: dict[str, str] = {}  # Topic id to name: a recreated topic may be deleted as well.

    def follow(self) -> Callable[[], None]:
        """Pass every topic, and later every change, to the ``Controller``. Return a function that ends the watches."""
        return TopicWatcher(self._store.session, found=self._found, gone=self._unlisted).close

    def _found(self, name: str, node: Node) -> None:
        # The snapshot has no partition states, because partitions of a topic that is new to the core usually have none.
        # If an earlier controller has written some, ZooKeeper refuses the core's write, and the core learns them from
        # the refusal.
        path = paths.topic(name)
        try:
            record = codecs.decode_topic(path, node.data, name)
        except ZkFormatError as error:
            # The core keeps the last readable record. The watcher calls this method again when the node changes.
            self._store.unreadable.skip(path, error)
            self._runner.report_change()
            return
        self._runner.step(TopicRead(TopicSnapshot(record, {}, node.version)))

    def _unlisted(self, name: str) -> None:
        self._runner.start(self.check_unlisted(name), f"check unlisted topic {name}")

    async def check_unlisted(self, name: str) -> None:
        """Read a topic that is no longer in the list of topics. If the topic has no node, report that it is gone.

        The node is read first because the topic may have been recreated, and brokers stop using the logs of a topic
        that is reported as gone. If this term itself deletes the topic, the task that deletes it makes the report.
        """
        found: tuple[TopicRecord, int] | None = None

        async def read() -> None:
            nonlocal found
            found = await self._store.cluster.read_topic(name)

        if name not in self._deleting.values():
            await self._runner.retry(read)
            if found is None and name not in self._deleting.values():
                await self._report_gone(name)

    async def _report_gone(self, name: str) -> None:
        """Report that the topic no longer exists, and whether ZooKeeper lists its id as deleted.

        Brokers may delete its logs only if ZooKeeper lists it.
        """
        known = self._runner.core.state.topics.get(name)
        topic_ids = () if known is None else (known.record.topic_id,)
        deleted = False

        async def read() -> None:
            nonlocal deleted
            deleted = bool(await self._store.cluster.deleted_topics(topic_ids))

        if topic_ids:
            await self._runner.retry(read)
        self._runner.step(TopicGone(name, deleted, topic_ids[0] if topic_ids else ""))

    async def read(self, name: str) -> None:
        """Read a topic and pass it to the ``Controller``. Retry a failed read, because no other code retries it."""
        found: tuple[TopicRecord, int] | None = None

        async def read() -> None:
            nonlocal found
            found = await self._store.levels.topic(name)

        await self._runner.retry(read)
        if found is None:
            if name not in self._deleting.values():
                await self._report_gone(name)
        elif found[0].topic_id not in self._deleting:
            self._runner.step(TopicRead(TopicSnapshot(found[0], {}, found[1])))

    async def write(self, effect: WriteTopic) -> None:
        """Write a topic's metadata and partition states to ZooKeeper. Pass the outcome to the ``Controller``."""
        record = effect.record
        changes = [StateChange(w.tp, w.state, w.leader_incarnation, w.expected_version) for w in effect.writes]
        try:
            outcome = await self._store.write_topic(record, effect.expected_version, changes)
        except BrokerError as error:
            outcome = WriteSuperseded(str(error))
        if isinstance(outcome, Written):
            self._runner.step(TopicWritten(record.name, record.topic_id))
        elif isinstance(outcome, EpochLost):
            self._runner.step(Fenced("another controller has a higher epoch"))
        else:
            detail = outcome.reason if isinstance(outcome, WriteSuperseded) else "the connection to ZooKeeper broke"
            self._runner.step(TopicNotWritten(record.name, record.topic_id, detail))

    def delete(self, effect: DeleteTopicNodes) -> None:
        """Start a task that deletes a topic, unless the deletion of this topic is already in progress."""
        if effect.topic_id not in self._deleting:
            self._deleting[effect.topic_id] = effect.name
            self._runner.start(self._delete(effect.name, effect.topic_id), f"delete topic {effect.name}")

    async def _delete(self, name: str, topic_id: str) -> None:
        deleted = False

        async def delete() -> None:
            nonlocal deleted
            deleted = await self._store.delete_topic(name, topic_id)

        try:
            await self._runner.retry(delete)
        finally:
            del self._deleting[topic_id]
        if deleted:
            self._runner.step(TopicDeleted(name, topic_id))
        else:
            self._runner.step(Fenced("another controller has a higher epoch"))


class TopicWatcher:
    """The watcher of all topics in ZooKeeper, until ``close``."""

    def __init__(self, session: ZkSession, *, found: Callable[[str, Node], None], gone: Callable[[str], None]) -> None:
        """Start the watches.

        ``found`` is called with a topic's name and node, first with the current node and then after each change.
        ``gone`` is called with a name that is no longer listed. If a topic is recreated immediately after its deletion,
        only ``found`` may be called.
        """
        self._session = session
        self._found = found
        self._gone = gone
        #: For each listed topic, the function that ends its watch.
        self._unwatch: dict[str, Callable[[], None]] = {}
        #: The listed topics whose node was missing when it was read. Either the list is outdated, or the topic has been
        #: recreated since.
        self._missing: set[str] = set()
        self._unwatch_names = session.watch_children(paths.TOPICS, self._listed)

    def close(self) -> None:
        for unwatch in (self._unwatch_names, *self._unwatch.values()):
            unwatch()

    def _listed(self, names: tuple[str, ...] | None) -> None:
        """Watch new and recreated topics, and report names that are no longer listed.

        If a listed topic is deleted, a newer list always follows, because the deletion changes the list.
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
