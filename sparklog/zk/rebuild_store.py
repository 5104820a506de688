"""The creation of all nodes of a cluster in an empty ZooKeeper, if the data of the old ZooKeeper is lost or outdated.

No broker and no controller may run at the same time. Existing topics are never overwritten. Therefore an interrupted
rebuild cannot be continued; it must be started again on an empty chroot.
"""

from __future__ import annotations

from contextlib import suppress

from sparklog.errors import ClusterError
from sparklog.model import LeaderAndIsr, TopicPartition, TopicRecord
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore, encode_record
from sparklog.zk.errors import ZkNoNode
from sparklog.zk.session import Create, Op, SetData, ZkSession

#: The number of writes in one multi when a node is written repeatedly to raise its version.
_AT_ONCE = 1000


class RebuildStore:
    """A writer that creates all nodes of a cluster again, over one session. Call ``begin`` first."""

    def __init__(self, session: ZkSession) -> None:
        self._session = session

    async def begin(self, cluster_id: str) -> None:
        """Create the nodes that every cluster has, with this cluster id.

        Raises:
          ClusterError: a cluster exists already, or some of its processes run.
        """
        where = self._session.connect_string
        await ClusterStore(self._session).prepare()
        topics = await self._session.children(paths.TOPICS)
        if topics:
            raise ClusterError(
                f"ZooKeeper at {where} has {len(topics)} topics, such as {topics[0]!r}, but must be empty:"
                " pass an empty chroot, or move ZooKeeper's data away"
            )
        brokers = await self._session.children(paths.BROKER_IDS)
        if brokers or await self._session.exists(paths.CONTROLLER):
            running = f"brokers {', '.join(brokers)}" if brokers else "a controller"
            raise ClusterError(f"{running} of ZooKeeper at {where} are running: stop the cluster first")
        try:
            node = await self._session.get(paths.CLUSTER_ID)
        except ZkNoNode:
            await self._session.create(paths.CLUSTER_ID, cluster_id.encode())
        else:
            await self._session.set(paths.CLUSTER_ID, cluster_id.encode(), node.version)

    async def counters(self, *, controller_epoch: int, producer_ids: int, next_broker_id: int) -> None:
        """Raise the controller epoch, the next producer id and the next broker id to at least these values."""
        for path, value in ((paths.CONTROLLER_EPOCH, controller_epoch), (paths.PRODUCER_IDS, producer_ids)):
            node = await self._session.get(path)
            known = codecs.decode(path, node.data, codecs.CounterNode).value
            await self._session.set(path, codecs.encode(codecs.CounterNode(max(value, known))), node.version)
        await self._raise(paths.BROKER_ID_SEQUENCE, next_broker_id)

    async def broker(self, broker_id: int, incarnation: int) -> None:
        """Raise the last incarnation of the broker to at least this value. Its next registration gets a higher one."""
        await self._session.ensure(paths.incarnation(broker_id))
        await self._raise(paths.incarnation(broker_id), incarnation)

    async def _raise(self, path: str, version: int) -> None:
        at = (await self._session.get(path)).version
        while at < version:
            end = min(version, at + _AT_ONCE)
            await self._session.multi([SetData(path, b"", number) for number in range(at, end)])
            at = end

    async def topic(self, record: TopicRecord, states: dict[int, LeaderAndIsr]) -> None:
        """Create the nodes of one topic and the states of its partitions."""
        with suppress(ZkNoNode):
            await self._session.delete(paths.deleted_topic(record.topic_id))
        ops: list[Op] = [
            Create(paths.topic(record.name), encode_record(record)),
            Create(paths.partitions(record.name), b""),
            Create(paths.topic_id(record.topic_id), record.name.encode()),
        ]
        await self._session.multi(ops)
        for number, state in states.items():
            tp = TopicPartition(record.name, number)
            value = codecs.encode_state(state, -1)
            await self._session.multi([Create(paths.partition(tp), b""), Create(paths.state(tp), value)])
