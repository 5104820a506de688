"""CreateTopic, DeleteTopic and InitProducerId requests.

Any broker accepts such a request, checks it and writes it to ZooKeeper; the controller carries it out. A handler that
waits for ZooKeeper or for the controller's update runs as a task. It responds when the update shows the result, or when
the request's timeout is over.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial

import msgspec
import pyarrow as pa

from sparklog.broker.context import BrokerContext
from sparklog.broker.internal_topics import refuse_internal
from sparklog.broker.lifecycle.broker_load import load
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.requests.alter_topic import check_config
from sparklog.broker.requests.delayed_replies import reply_later, wait_for_leaders, wait_for_metadata
from sparklog.controller.placement import FEW_PARTITIONS, Placement, check_assignment, check_new, place
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicRecord, TopicSchema, check_topic_name
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    Ack,
    CreateTopic,
    CreateTopicReply,
    DeleteTopic,
    InitProducerId,
    InitProducerIdReply,
    Reply,
)
from sparklog.record.schema import DEFAULT_SCHEMA, check_case, parse_schema, schema_message

_log = logging.getLogger(__name__)


class TopicRequests:
    """The handlers of CreateTopic, DeleteTopic and InitProducerId requests."""

    def __init__(self, context: BrokerContext, registry: ZkRegistration) -> None:
        self._context = context
        self._registry = registry

    def create(self, connection: ServerConnection, request: CreateTopic, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._create_topic(request))

    async def _create_topic(self, request: CreateTopic) -> Reply:
        record, warning = await self.planned(request)
        await self._registry.create_topic(record)
        _log.info("topic %s (%s) created with %d partitions", record.name, record.topic_id, len(record.assignment))

        if not await wait_for_leaders(self._context, record, request.timeout_ms):
            raise BrokerError(
                ErrorCode.REQUEST_TIMED_OUT,
                f"topic {record.name!r} was created, but some partitions have no leader yet",
            )
        return CreateTopicReply(request.cid, record.topic_id, warning)

    async def planned(self, request: CreateTopic) -> tuple[TopicRecord, str]:
        """Return the record that the topic would get, and the warning about its placement. Create nothing.

        Raises:
            BrokerError: the request would be refused.
        """
        # Before its first update from the controller, a broker that has just started knows no live broker, not even
        # itself.
        if not await wait_for_metadata(self._context, lambda: bool(self._context.cache.brokers), request.timeout_ms):
            raise BrokerError(
                ErrorCode.BROKER_NOT_AVAILABLE,
                f"broker {self._context.broker_id} cannot place topic {request.name!r}: "
                "it has no metadata from a controller",
            )
        unplaced = self._checked_topic(request)
        placement = await self._placement(request)
        return msgspec.structs.replace(unplaced, assignment=placement.assignment), placement.warning

    def _checked_topic(self, request: CreateTopic) -> TopicRecord:
        """Check the request, and return the topic's record without replicas."""
        bad_name = check_topic_name(request.name)
        if bad_name:
            raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, bad_name)
        refuse_internal(request.name, "not created")
        if self._context.cache.topic(request.name) is not None:
            raise BrokerError(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {request.name!r} exists")
        schema, key_columns, event_time = _checked_schema(request)
        record = TopicRecord(
            name=request.name,
            topic_id=uuid.uuid4().hex,
            assignment=(),
            schemas=(TopicSchema(0, schema),),
            key_columns=key_columns,
            event_time=event_time,
            config=dict(request.config),
        )
        check_config(self._context.config, record, record.config)
        return record

    async def _placement(self, request: CreateTopic) -> Placement:
        live = self._context.cache.brokers
        if request.assignment:
            return check_assignment(request.assignment, live)
        partitions = request.partitions if request.partitions != -1 else self._context.config.num_partitions
        check_new(partitions)
        factor = request.replication_factor
        if factor == -1:
            factor = self._context.config.default_replication_factor
        found = partial(place, live, partitions=partitions, replication_factor=factor, load=load(self._context.cache))
        # The placement of 10,000 partitions on a hundred brokers takes half a second.
        return (
            found() if partitions <= FEW_PARTITIONS else await asyncio.get_running_loop().run_in_executor(None, found)
        )

    def delete(self, connection: ServerConnection, request: DeleteTopic, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._delete_topic(request))

    async def _delete_topic(self, request: DeleteTopic) -> Reply:
        refuse_internal(request.name, "not deleted")
        topic = self._context.cache.topic(request.name)
        if topic is None:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"this broker does not know topic {request.name!r}")
        topic_id = topic.change.topic_id
        await self._registry.request_delete(request.name, topic_id)

        def gone() -> bool:
            known = self._context.cache.topic(request.name)
            return known is None or known.change.topic_id != topic_id

        if not await wait_for_metadata(self._context, gone, request.timeout_ms):
            raise BrokerError(
                ErrorCode.REQUEST_TIMED_OUT,
                f"deletion of topic {request.name!r} was requested, but is not complete yet",
            )
        return Ack(request.cid)

    def init_producer_id(self, connection: ServerConnection, request: InitProducerId, body: memoryview) -> None:
        if request.transactional_id is not None:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"transactional id {request.transactional_id!r}: its producer ids come from BeginTransaction",
            )
        reply_later(self._context, connection, request, self._init_producer_id(request))

    async def _init_producer_id(self, request: InitProducerId) -> Reply:
        return InitProducerIdReply(request.cid, await self._registry.next_producer_id(), 0)


def _checked_schema(request: CreateTopic) -> tuple[bytes, tuple[str, ...], str | None]:
    if not request.schema:
        if request.key_columns or request.event_time is not None:
            raise BrokerError(ErrorCode.INVALID_REQUEST, "key columns and an event-time column require a schema")
        return schema_message(DEFAULT_SCHEMA), ("key",), "timestamp"
    schema = parse_schema(request.schema)
    schema_message(schema)  # raises an error for types that no topic may have
    names = schema.names
    check_case((), names)
    known = frozenset(names)
    missing = [name for name in request.key_columns if name not in known]
    if missing:
        detail = f"key columns {missing[:20]} not found among the columns {names[:100]}"
        raise BrokerError(ErrorCode.SCHEMA_MISMATCH, detail)
    if request.event_time is not None:
        if request.event_time not in names:
            raise BrokerError(
                ErrorCode.SCHEMA_MISMATCH, f"event-time column {request.event_time!r} is not one of the columns {names}"
            )
        found = schema.field(request.event_time).type
        if not pa.types.is_timestamp(found):
            raise BrokerError(
                ErrorCode.SCHEMA_MISMATCH,
                f"event-time column {request.event_time!r}: expected a timestamp, found {found}",
            )
    return request.schema, request.key_columns, request.event_time
