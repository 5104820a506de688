"""The reads and watches from which the ``Controller`` of a term learns the cluster's state and its changes.

After a change of a node's children, and after every reconnection, the term reads all children again and passes their
complete current values to the ``Controller``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sparklog.cluster.core_runner import CoreRunner
from sparklog.cluster.partition_state_io import PartitionStateIo
from sparklog.cluster.required_proofs import RequiredProofs
from sparklog.cluster.topic_io import TopicIo
from sparklog.controller.events import (
    BrokersRead,
    DeletionsRead,
    ElectionRequested,
    ElectionsRead,
    Fenced,
    Loaded,
    RefusalsRead,
    StatesReported,
    StoppingRead,
    TopicSnapshot,
    TruncationRefused,
)
from sparklog.model import BrokerRegistration, TopicPartition
from sparklog.zk import paths
from sparklog.zk.controller_store import ControllerStore
from sparklog.zk.errors import ZkUnreachable
from sparklog.zk.session import PAUSE_S, Node, SessionState

log = logging.getLogger(__name__)


class ZookeeperFacts:
    """The reader and watcher of ZooKeeper for the ``Controller`` of one term.

    The term calls ``load``, then ``follow``, and at the end ``close``.
    """

    def __init__(
        self,
        runner: CoreRunner,
        store: ControllerStore,
        *,
        topics: TopicIo,
        states: PartitionStateIo,
        proofs: RequiredProofs,
    ) -> None:
        self._runner = runner
        self._store = store
        self._session = store.session
        self._topics = topics
        self._states = states
        self._proofs = proofs
        self._unwatch: list[Callable[[], None]] = []
        self._reading_brokers = asyncio.Lock()

    async def load(self, *, cautious: bool) -> Loaded:
        """Return the cluster's complete state.

        ``cautious`` means that this process's own session had expired, so brokers that seem absent may be alive.

        Raises:
            ZkError: the connection was lost, a node is missing, or ZooKeeper refused a request.
        """
        # Read the brokers first. Then every state is newer than the registrations, so the states contain each ISR
        # membership that an untrusted broker still has.
        await self._proofs.load()
        brokers, retired = await self._brokers()
        absent = self._proofs.admitted(await self._store.levels.absent({found.broker_id for found in brokers}))
        stopping = await self._store.levels.stopping()
        topics, unreadable = await self._store.levels.topics()
        deletions = await self._store.levels.deletions()
        snapshots = tuple(TopicSnapshot(topic.record, topic.states, topic.version) for topic in topics)
        elections = await self._elections()
        refusals = await self._refusals()
        return Loaded(
            brokers, stopping, snapshots, deletions, cautious, retired, elections, absent, unreadable, refusals
        )

    async def _brokers(self) -> tuple[tuple[BrokerRegistration, ...], frozenset[int]]:
        brokers = self._proofs.admitted(await self._store.levels.brokers())
        return brokers, await self._store.levels.retired({found.broker_id for found in brokers})

    async def _elections(self) -> dict[str, ElectionRequested]:
        found = await self._store.levels.elections()
        return {
            name: ElectionRequested(
                request.kind,
                None if request.partitions is None else tuple(TopicPartition(*tp) for tp in request.partitions),
                request.topic_ids,
            )
            for name, request in found.items()
        }

    async def _refusals(self) -> tuple[TruncationRefused, ...]:
        return tuple(
            TruncationRefused(
                TopicPartition(found.topic, found.partition),
                found.topic_id,
                found.broker_id,
                found.incarnation,
                found.leader_epoch,
                found.offset,
                found.high_watermark,
            )
            for found in await self._store.levels.refusals()
        )

    def follow(self) -> None:
        """Start to pass every change in ZooKeeper to the ``Controller``."""
        self._unwatch.append(self._session.watch_data(paths.CONTROLLER, self._on_controller))
        self._unwatch.append(self._topics.follow())
        self._start(paths.BROKER_IDS, self._read_brokers, "live brokers")
        # Watch ``/brokers/retired`` as well. If a registration no longer exists when a supervisor finds the process
        # dead, only the mark in ``/brokers/retired`` changes.
        self._start(paths.RETIRED, self._read_brokers, "retired brokers")
        self._start(paths.STOPPING, self.read_stopping, "stopping brokers")
        self._start(paths.DELETE_TOPICS, self._read_deletions, "topic deletions")
        self._start(paths.ELECTIONS, self._read_elections, "elections")
        self._start(paths.TRUNCATION_REFUSALS, self._read_refusals, "refused cuts")
        self._start(paths.ISR_CHANGES, self._read_isr_changes, "ISR changes")

    def close(self) -> None:
        """End the watches. The ``CoreRunner`` ends the tasks of this object."""
        for unwatch in self._unwatch:
            unwatch()

    def _start(self, path: str, read: Callable[[], Awaitable[None]], name: str) -> None:
        self._runner.start(self.follow_level(path, read), name)

    async def follow_level(self, path: str, read: Callable[[], Awaitable[None]]) -> None:
        """Call ``read`` now, after each change of the children of the node ``path``, and after each reconnection."""
        while True:
            changed = asyncio.Event()
            try:
                await self._session.connected()
                await self._session.children(path, on_change=changed.set)
                await read()
            except ZkUnreachable as error:
                if self._session.state is SessionState.CLOSED:
                    return
                log.info("reading %s again after %s", path, error)
                # If every read breaks the connection, for example because its response is too large, the pause prevents
                # a tight loop of reconnections.
                await asyncio.sleep(PAUSE_S)
                continue
            await changed.wait()

    def _on_controller(self, node: Node | None) -> None:
        if not self._store.owns(node):
            self._runner.step(Fenced("/controller is not this controller's any more"))

    async def _read_brokers(self) -> None:
        async with self._reading_brokers:  # Only one read at a time: an older, slower one could overwrite a newer one.
            brokers, retired = await self._brokers()
            self._runner.step(BrokersRead(brokers, retired))
            await self._proofs.settle(brokers, retired=retired, hosting=self._hosting)

    def _hosting(self) -> set[int]:
        return {broker for partition in self._runner.core.state.partitions() for broker in partition.replicas}

    async def read_stopping(self) -> None:
        """Read which brokers request a controlled shutdown, and pass them to the ``Controller``."""
        stopping = await self._store.levels.stopping()
        if not self._runner.core.brokers.stopping <= stopping.keys():
            # A broker that no longer requests a shutdown may have ended. Read the registrations first. Otherwise the
            # core would treat the ended broker for a moment as live and not stopping.
            await self._read_brokers()
        self._runner.step(StoppingRead(stopping))

    async def _read_deletions(self) -> None:
        self._runner.step(DeletionsRead(await self._store.levels.deletions()))

    async def _read_elections(self) -> None:
        self._runner.step(ElectionsRead(await self._elections()))

    async def _read_refusals(self) -> None:
        self._runner.step(RefusalsRead(await self._refusals()))

    async def _read_isr_changes(self) -> None:
        """Read notifications of ISR changes until none is left.

        A write to an existing notification fires no watch of its parent.
        """
        while True:
            nodes, reported, named = await self._store.levels.isr_changes()
            if not nodes:
                return
            if reported:
                self._runner.step(StatesReported(reported))
            if named is None:
                named = tuple(partition.tp for partition in self._runner.core.state.partitions())
            if named:
                await self._states.read_changed(named)
            if await self._store.delete_isr_changes(nodes):
                return
