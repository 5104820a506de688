"""CreateTopic, DeleteTopic and InitProducerId requests.

Any broker accepts them, checks them and writes them to ZooKeeper; the controller carries them out. A handler that waits
for ZooKeeper and for the controller's update runs as a task. It responds when the update shows the result or its time
is up.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial

import msgspec
import pyarrow as pa

from sparklog.broker.internal_topics import refuse_internal
from sparklog.broker.lifecycle.broker_load import load
from sparklog.broker.requests.alter_topic import check_config
from sparklog.broker.requests.delayed_replies import reply_later, wait_for_leaders, wait_for_metadata
from sparklog.broker.state import BrokerState
from sparklog.controller.placement import FEW_PARTITIONS, Placement, check_assignment, check_new, place
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicRecord, TopicSchema, check_topic_name
from sparklog.net.server import ServerConnection
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


def handle_create_topic(
    broker: BrokerState, connection: ServerConnection, request: CreateTopic, body: memoryview
) -> None:
    reply_later(broker, connection, request, _create_topic(broker, request))


def handle_delete_topic(
    broker: BrokerState, connection: ServerConnection, request: DeleteTopic, body: memoryview
) -> None:
    reply_later(broker, connection, request, _delete_topic(broker, request))


def handle_init_producer_id(
    broker: BrokerState, connection: ServerConnection, request: InitProducerId, body: memoryview
) -> None:
    if request.transactional_id is not None:
        raise BrokerError(
            ErrorCode.INVALID_REQUEST,
            f"transactional id {request.transactional_id!r}: its producer ids come from BeginTransaction",
        )
    reply_later(broker, connection, request, _init_producer_id(broker, request))


# --- topics -----------------------------------------------------------------------------------------------------


async def _create_topic(broker: BrokerState, request: CreateTopic) -> Reply:
    # A broker that has just started knows no live broker, not even itself, until its first update from the controller.
    if not await wait_for_metadata(broker, lambda: bool(broker.cache.brokers), request.timeout_ms):
        raise BrokerError(
            ErrorCode.BROKER_NOT_AVAILABLE,
            f"broker {broker.broker_id} cannot place topic {request.name!r}: it has no metadata from a controller",
        )
    unplaced = _checked_topic(broker, request)
    placement = await _placement(broker, request)
    record = msgspec.structs.replace(unplaced, assignment=placement.assignment)
    await broker.registry.create_topic(record)
    _log.info("topic %s (%s) created with %d partitions", record.name, record.topic_id, len(record.assignment))

    if not await wait_for_leaders(broker, record, request.timeout_ms):
        raise BrokerError(
            ErrorCode.REQUEST_TIMED_OUT, f"topic {record.name!r} was created, but some partitions have no leader yet"
        )
    return CreateTopicReply(request.cid, record.topic_id, placement.warning)


def _checked_topic(broker: BrokerState, request: CreateTopic) -> TopicRecord:
    """Return the topic's record, without its replicas."""
    bad_name = check_topic_name(request.name)
    if bad_name:
        raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, bad_name)
    refuse_internal(request.name, "not created")
    if broker.cache.topic(request.name) is not None:
        raise BrokerError(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {request.name!r} exists")
    schema, key_columns, event_time = _checked_schema(request)
    check_config(broker, request.name, request.config, key_columns)
    return TopicRecord(
        name=request.name,
        topic_id=uuid.uuid4().hex,
        assignment=(),
        schemas=(TopicSchema(0, schema),),
        key_columns=key_columns,
        event_time=event_time,
        config=dict(request.config),
    )


def _checked_schema(request: CreateTopic) -> tuple[bytes, tuple[str, ...], str | None]:
    if not request.schema:
        if request.key_columns or request.event_time is not None:
            raise BrokerError(ErrorCode.INVALID_REQUEST, "key columns and an event-time column require a schema")
        return schema_message(DEFAULT_SCHEMA), ("key",), "timestamp"
    schema = parse_schema(request.schema)
    schema_message(schema)  # refuses types that no topic may have
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


async def _placement(broker: BrokerState, request: CreateTopic) -> Placement:
    live = broker.cache.brokers
    if request.assignment:
        return check_assignment(request.assignment, live)
    partitions = request.partitions if request.partitions != -1 else broker.config.num_partitions
    check_new(partitions)
    factor = request.replication_factor
    if factor == -1:
        factor = broker.config.default_replication_factor
    found = partial(place, live, partitions=partitions, replication_factor=factor, load=load(broker))
    # Over a hundred brokers 10,000 partitions take half a second.
    return found() if partitions <= FEW_PARTITIONS else await asyncio.get_running_loop().run_in_executor(None, found)


async def _delete_topic(broker: BrokerState, request: DeleteTopic) -> Reply:
    refuse_internal(request.name, "not deleted")
    topic = broker.cache.topic(request.name)
    if topic is None:
        raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"this broker does not know topic {request.name!r}")
    topic_id = topic.change.topic_id
    await broker.registry.request_delete(request.name, topic_id)

    def gone() -> bool:
        known = broker.cache.topic(request.name)
        return known is None or known.change.topic_id != topic_id

    if not await wait_for_metadata(broker, gone, request.timeout_ms):
        raise BrokerError(
            ErrorCode.REQUEST_TIMED_OUT, f"deletion of topic {request.name!r} was requested, but is not complete yet"
        )
    return Ack(request.cid)


async def _init_producer_id(broker: BrokerState, request: InitProducerId) -> Reply:
    return InitProducerIdReply(request.cid, await broker.registry.next_producer_id(), 0)
