"""Topics that a write goes to: looked up, and where the options say so made, or given the columns they lack.

Tasks of one write may do this at the same time, and so may other writers: what somebody else has made meanwhile counts
as made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import StructType

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.spark.options import CLIENT_ID
from sparklog.spark.routes import data_columns, plan_route
from sparklog.spark.schema import TopicShape, arrow_schema
from sparklog.spark.topic_route import TopicRoute
from sparklog.spark.topics import topic_shape
from sparklog.spark.write_options import NewTopic, WriteOptions

if TYPE_CHECKING:
    from sparklog.client.admin import Admin
    from sparklog.client.descriptions import TopicDescription

_NO_COLUMNS = TopicShape(pa.schema([]))
_DEFAULT_SHAPE = TopicShape(DEFAULT_SCHEMA, "timestamp")


def look_up_route(topic: str, columns: StructType, options: WriteOptions) -> TopicRoute:
    """As ``settle_route``, asking the cluster that the options name."""
    from sparklog.client.admin import Admin

    with Admin(options.bootstrap, client_id=CLIENT_ID) as admin:
        return settle_route(admin, topic, columns, options)


def settle_route(admin: Admin, topic: str, columns: StructType, options: WriteOptions) -> TopicRoute:
    """How a DataFrame of ``columns`` gets into ``topic``, which is there with fitting columns when this returns.

    Raises:
        BrokerError: UNKNOWN_TOPIC_OR_PARTITION without ``createTopic``; SCHEMA_MISMATCH with what differs.
        ConfigError: the topic is there, with other key columns than asked for.
    """
    found = _found(admin, topic, columns, options)
    if options.key_columns is not None and options.key_columns != tuple(found.key):
        raise ConfigError(
            f"option keyColumns={','.join(options.key_columns)!r}: topic {topic} is there, its key columns are "
            f"{', '.join(found.key) or 'none'}"
        )
    shape = topic_shape(found)
    if options.merge_schema and not shape.is_default:
        lacking = [column for column in data_columns(shape, columns).fields if column.name not in shape.schema.names]
        if lacking:
            # They may hold nulls, whatever the DataFrame promises: the rows that are there have no values.
            added = [field.with_nullable(True) for field in arrow_schema(StructType(lacking))]
            extended = replace(shape, schema=pa.schema([*shape.schema, *added]))
            route = plan_route(topic, extended, columns)  # before anything is changed
            admin.add_columns(topic, pa.schema(added))
            return replace(route, topic_id=found.topic_id)
    return replace(plan_route(topic, shape, columns), topic_id=found.topic_id)


def _found(admin: Admin, topic: str, columns: StructType, options: WriteOptions) -> TopicDescription:
    # Not by asking for it: a topic that may just have been made is waited for.
    if options.new_topic is not None and topic not in admin.list_topics():
        with _somebody_was_faster():
            return _made(admin, topic, columns, options.new_topic, keys=options.key_columns or ())
    try:
        return admin.describe_topic(topic)
    except BrokerError as error:
        if error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            raise BrokerError(error.code, f"{error.detail}; createTopic=true makes it") from error
        raise


@contextmanager
def _somebody_was_faster() -> Iterator[None]:
    try:
        yield
    except BrokerError as error:
        if error.code != ErrorCode.TOPIC_ALREADY_EXISTS:
            raise


def _made(admin: Admin, topic: str, columns: StructType, new: NewTopic, *, keys: tuple[str, ...]) -> TopicDescription:
    """Kafka's columns for a DataFrame of those, else the DataFrame's own, nullable as Spark makes tables: what is
    computed without nulls today may have some tomorrow."""
    kafka_like = _is_kafka_like(topic, columns) and keys in {(), ("key",)}
    own = data_columns(_NO_COLUMNS, columns)
    return admin.create_topic(
        topic,
        partitions=new.partitions,
        replication_factor=new.replication_factor,
        schema=None if kafka_like else pa.schema([field.with_nullable(True) for field in arrow_schema(own)]),
        key=None if kafka_like else keys,
    )


def _is_kafka_like(topic: str, columns: StructType) -> bool:
    try:
        plan_route(topic, _DEFAULT_SHAPE, columns)
    except BrokerError:
        return False
    return True
