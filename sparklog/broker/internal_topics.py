"""Internal topics, in which coordinators store their state. A topic is created at its first use.

Each partition of such a topic has one coordinator, on the broker that leads the partition. Names that begin with two
underscores are reserved: clients cannot create, delete or write to such a topic, and lists of topics omit it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import lru_cache

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.broker_load import load
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.requests.delayed_replies import reply_later, wait_for_metadata
from sparklog.config import MIB
from sparklog.controller.placement import place
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import INTERNAL_PREFIX, TopicPartition, TopicRecord, TopicSchema, is_internal
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import FindCoordinator, FindCoordinatorReply, Reply
from sparklog.record.partitioner import partition_for_key
from sparklog.record.schema import DEFAULT_EVENT_TIME, DEFAULT_KEY_COLUMNS, DEFAULT_SCHEMA, schema_message

_log = logging.getLogger(__name__)

TRANSACTIONS = INTERNAL_PREFIX + "transaction_state"
OFFSETS = INTERNAL_PREFIX + "consumer_offsets"
#: The internal topic for each ``FindCoordinator.kind``.
TOPIC_OF_KIND = {"transaction": TRANSACTIONS, "group": OFFSETS}

#: The maximum wait for the topic and its leaders. After that the client asks again.
_WAIT_MS = 5000
#: Compaction suits groups: the last record of a key has all of the key's state, and a tombstone removes it. It does not
#: suit transactions: the end of a transactional id also ends its participants, but compaction would keep their records.
_POLICY = {OFFSETS: "compact", TRANSACTIONS: "delete"}
_CONFIG = {
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.bytes": str(16 * MIB),
    "max.message.bytes": str(16 * MIB),
    "message.timestamp.type": "CreateTime",
    "unclean.leader.election.enable": "false",
}


def refuse_internal(name: str, what: str) -> None:
    """Raise BrokerError INVALID_TOPIC_EXCEPTION if ``name`` is the name of an internal topic."""
    if is_internal(name):
        detail = f"topic {name[:249]!r}: names that begin with {INTERNAL_PREFIX!r} are internal, {what} by clients"
        raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, detail)


def partition_of(cache: MetadataCache, topic: str, key: str) -> TopicPartition | None:
    """Return the partition whose leader coordinates ``key``; None while this broker does not know ``topic``.

    A key is a group id, a transactional id or the name of a sink. ``topic`` is the internal topic of its coordinators.
    """
    known = cache.topic(topic)
    if known is None or not known.partitions:
        return None
    return TopicPartition(topic, _number(key, len(known.partitions)))


@lru_cache(maxsize=10_000)
def _number(key: str, partitions: int) -> int:
    return partition_for_key(key.encode(), partitions)


def coordinator_of(cache: MetadataCache, topic: str, key: str) -> int | None:
    """Return the id of the broker that coordinates ``key``; None if no such live broker is known."""
    tp = partition_of(cache, topic, key)
    known = cache.partition(tp) if tp is not None else None
    if known is None or known.state.leader not in cache.incarnations:
        return None
    return known.state.leader


class InternalTopics:
    """The component that creates internal topics and handles FindCoordinator requests.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, context: BrokerContext, registry: ZkRegistration) -> None:
        self._context = context
        self._registry = registry
        #: Held while a topic is created.
        self._turn = asyncio.Lock()

    def find_coordinator(self, connection: ServerConnection, request: FindCoordinator, body: memoryview) -> None:
        topic = TOPIC_OF_KIND.get(request.kind)
        if topic is None:
            detail = f"coordinator of a {request.kind[:80]!r} requested, expected one of {', '.join(TOPIC_OF_KIND)}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        if not request.key:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{request.kind}: the name is empty")
        reply_later(self._context, connection, request, self._find(request, topic, connection.listener))

    async def _find(self, request: FindCoordinator, topic: str, listener: str) -> Reply:
        await self.create(topic)
        await wait_for_metadata(
            self._context, lambda: coordinator_of(self._context.cache, topic, request.key) is not None, _WAIT_MS
        )
        leader, tp = (
            coordinator_of(self._context.cache, topic, request.key),
            partition_of(self._context.cache, topic, request.key),
        )
        endpoint = self._context.cache.shown(listener).get(leader) if leader is not None else None
        if endpoint is None or tp is None:
            detail = f"{request.kind} {request.key!r}: {tp or topic} has no leader now"
            raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail)
        return FindCoordinatorReply(request.cid, endpoint, tp.partition)

    async def create(self, name: str) -> None:
        """Create the internal topic unless it exists. Several brokers may call this at the same time.

        The topic is created only while enough brokers are live for ``internal.topic.replication.factor``. A topic
        created with fewer replicas would never get more, so the loss of one broker could lose committed records.
        Source: Kafka, offsets.topic.replication.factor.

        Raises:
            BrokerError: COORDINATOR_NOT_AVAILABLE if too few brokers are live, or if the topic is not in this broker's
                metadata in time.
            ClusterError: ZooKeeper is unreachable.
        """
        if self._context.cache.topic(name) is not None:
            return
        async with self._turn:
            # A broker that has just started knows neither topics nor brokers.
            if not await wait_for_metadata(self._context, lambda: bool(self._context.cache.brokers), _WAIT_MS):
                detail = f"broker {self._context.broker_id} waits for its first update from the controller"
                raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail)
            if self._context.cache.topic(name) is not None:
                return
            factor, live = self._context.config.internal_replication_factor, len(self._context.cache.brokers)
            if live < factor:
                detail = (
                    f"{name}: {live} brokers are live, {factor} (internal.topic.replication.factor) needed to create it"
                )
                raise BrokerError(ErrorCode.COORDINATOR_NOT_AVAILABLE, detail)
            try:
                await self._registry.create_topic(self._record(name))
                _log.info("topic %s created", name)
            except BrokerError as error:
                if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                    raise
            if not await wait_for_metadata(
                self._context, lambda: self._context.cache.topic(name) is not None, _WAIT_MS
            ):
                raise BrokerError(
                    ErrorCode.COORDINATOR_NOT_AVAILABLE, f"topic {name} was created, but is not ready yet"
                )

    def _record(self, name: str) -> TopicRecord:
        live = self._context.cache.brokers
        config = self._context.config
        placement = place(
            live,
            partitions=config.transaction_partitions if name == TRANSACTIONS else config.offsets_partitions,
            replication_factor=config.internal_replication_factor,
            load=load(self._context.cache),
        )
        return TopicRecord(
            name=name,
            topic_id=uuid.uuid4().hex,
            assignment=placement.assignment,
            schemas=(TopicSchema(0, schema_message(DEFAULT_SCHEMA)),),
            key_columns=DEFAULT_KEY_COLUMNS,
            event_time=DEFAULT_EVENT_TIME,
            config={"cleanup.policy": _POLICY[name], **_CONFIG},
        )
