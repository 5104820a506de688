"""CreatePartitions requests: more partitions for an existing topic.

The new partitions are added at the end of the topic's metadata. Existing records stay in their partitions, so later
records of a key may go to another partition.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from sparklog.broker.context import BrokerContext
from sparklog.broker.internal_topics import refuse_internal
from sparklog.broker.lifecycle.broker_load import load
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.requests.delayed_replies import reply_later, wait_for_leaders
from sparklog.controller.placement import (
    FEW_PARTITIONS,
    MAX_PARTITIONS,
    Load,
    Placement,
    check_assignment,
    check_new,
    place,
)
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, TopicRecord
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import CreatePartitions, CreateTopicReply, Reply

_log = logging.getLogger(__name__)


class CreatePartitionsRequests:
    """The handler of CreatePartitions requests, which add partitions to an existing topic."""

    def __init__(self, context: BrokerContext, registry: ZkRegistration) -> None:
        self._context = context
        self._registry = registry

    def handle(self, connection: ServerConnection, request: CreatePartitions, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._create_partitions(request))

    async def _create_partitions(self, request: CreatePartitions) -> Reply:
        # With more partitions, a key might belong to another coordinator than the one that has its state.
        refuse_internal(request.topic, "not extended")
        placed: Placement | None = None
        carried = load(self._context.cache)

        def grown(record: TopicRecord) -> TopicRecord:
            nonlocal placed
            before = len(record.assignment)
            if placed is not None and record.assignment[before - len(placed.assignment) :] == placed.assignment:
                return record  # an earlier attempt wrote the partitions, and its response was lost
            placed = _placement(self._context.cache.brokers, request, record, carried)
            return msgspec.structs.replace(record, assignment=record.assignment + placed.assignment)

        known = self._context.cache.topic(request.topic)
        added = request.partitions - len(known.partitions) if known is not None else request.partitions
        record = await self._registry.change_topic(request.topic, grown, in_thread=added > FEW_PARTITIONS)
        if record is None or placed is None:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {request.topic!r} does not exist")
        _log.info("topic %s now has %d partitions", record.name, len(record.assignment))

        if not await wait_for_leaders(self._context, record, request.timeout_ms):
            raise BrokerError(
                ErrorCode.REQUEST_TIMED_OUT,
                f"topic {record.name!r} has {len(record.assignment)} partitions, but some have no leader yet",
            )
        return CreateTopicReply(request.cid, record.topic_id, placed.warning)

    async def check(self, request: CreatePartitions) -> None:
        """Raise the BrokerError with which the request would be refused, and change nothing."""
        refuse_internal(request.topic, "not extended")
        carried = load(self._context.cache)

        def checked(record: TopicRecord) -> TopicRecord:
            _placement(self._context.cache.brokers, request, record, carried)
            return record

        known = self._context.cache.topic(request.topic)
        added = request.partitions - len(known.partitions) if known is not None else request.partitions
        if await self._registry.change_topic(request.topic, checked, in_thread=added > FEW_PARTITIONS) is None:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {request.topic!r} does not exist")


def _placement(
    brokers: Sequence[BrokerEndpoint], request: CreatePartitions, record: TopicRecord, carried: Load
) -> Placement:
    """Return replicas for the partitions that the request adds to ``record``.

    Raises:
        BrokerError: INVALID_PARTITIONS, INVALID_REPLICA_ASSIGNMENT, INVALID_REPLICATION_FACTOR.
    """
    before, factor = len(record.assignment), record.replication_factor
    if not before < request.partitions <= MAX_PARTITIONS:
        raise BrokerError(
            ErrorCode.INVALID_PARTITIONS,
            f"found {request.partitions} partitions for topic {record.name!r}; it has {before}, "
            f"expected {before + 1} to {MAX_PARTITIONS}",
        )
    added = request.partitions - before
    check_new(added)
    if not request.assignment:
        return place(brokers, partitions=added, replication_factor=factor, load=carried, beside=record.assignment)
    if len(request.assignment) != added or len(request.assignment[0]) != factor:
        raise BrokerError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"found replicas for {len(request.assignment)} partitions, {len(request.assignment[0])} each; expected "
            f"them for {added}, {factor} each",
        )
    return check_assignment(request.assignment, brokers)
