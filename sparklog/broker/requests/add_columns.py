"""AddColumns requests: more nullable columns for an existing topic.

The topic's metadata gets one more schema: the old columns, then the new ones. Producers must use the new schema from
then on. Older records have null in the new columns when they are read; stored data does not change.
"""

from __future__ import annotations

import logging

import msgspec
import pyarrow as pa

from sparklog.broker.context import BrokerContext
from sparklog.broker.internal_topics import refuse_internal
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.requests.delayed_replies import reply_later, wait_for_metadata
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicRecord, TopicSchema
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Ack, AddColumns, Reply
from sparklog.record.schema import DEFAULT_SCHEMA, check_case, check_extension, parse_schema, schema_message

_log = logging.getLogger(__name__)


class AddColumnsRequests:
    """The handler of AddColumns requests, which add nullable columns to an existing topic."""

    def __init__(self, context: BrokerContext, registry: ZkRegistration) -> None:
        self._context = context
        self._registry = registry

    def handle(self, connection: ServerConnection, request: AddColumns, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._add_columns(request))

    async def _add_columns(self, request: AddColumns) -> Reply:
        refuse_internal(request.topic, "not extended")
        columns = parse_schema(request.columns)
        record = await self._registry.change_topic(request.topic, lambda record: with_columns(record, columns))
        if record is None:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {request.topic!r} does not exist")
        _log.info("topic %s now has schema %d", record.name, record.latest_schema.schema_id)

        def is_updated() -> bool:
            topic = self._context.cache.topic(record.name)
            return topic is not None and (
                topic.change.topic_id != record.topic_id or len(topic.change.schemas) >= len(record.schemas)
            )

        if not await wait_for_metadata(self._context, is_updated, request.timeout_ms):
            raise BrokerError(
                ErrorCode.REQUEST_TIMED_OUT,
                f"topic {record.name!r} has the columns, but brokers do not know of them yet",
            )
        return Ack(request.cid)


def with_columns(record: TopicRecord, columns: pa.Schema) -> TopicRecord:
    """Return a copy of ``record`` that also has the columns in ``columns``.

    If ``record`` already has all these columns, as in a retry, return ``record`` itself.

    Raises:
        BrokerError: SCHEMA_MISMATCH if the topic has a column of the same name with another type, or a new column is
            not nullable. INVALID_REQUEST for a default topic, because readers recognize a default topic by its columns.
    """
    old = parse_schema(record.latest_schema.message)
    if old.equals(DEFAULT_SCHEMA):
        raise BrokerError(
            ErrorCode.INVALID_REQUEST,
            f"topic {record.name!r} has the columns of Kafka's records, which cannot be extended",
        )
    other = [
        f"column {field.name!r} is {old.field(field.name).type}, {field.type} found"
        for field in columns
        if field.name in old.names and old.field(field.name).type != field.type
    ]
    if other:
        raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"topic {record.name!r}: {'; '.join(other)}")
    added = [field for field in columns if field.name not in old.names]
    if not added:
        return record
    check_case(old.names, [field.name for field in added])
    new = pa.schema([*old, *added])
    check_extension(old, new)
    schema = TopicSchema(record.latest_schema.schema_id + 1, schema_message(new))
    return msgspec.structs.replace(record, schemas=(*record.schemas, schema))
