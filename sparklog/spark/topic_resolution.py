"""The lookup of the topics of a write. Depending on the options, it creates topics or adds missing columns.

Tasks of one write, and other writers, may do this at the same time. If another task or writer has created the topic or
column first, that topic or column is used. The code that creates topics is loaded only on demand, to keep the planning
of writes fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.types import StructType

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.messages import Metadata, TopicMetadata
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.spark.options import CLIENT_ID
from sparklog.spark.route import TopicRoute
from sparklog.spark.route_plan import data_columns, plan_route, with_topic_names
from sparklog.spark.schema import TopicShape, arrow_schema, topic_shape
from sparklog.spark.write_options import NewTopic, WriteOptions

_NO_COLUMNS = TopicShape(pa.schema([]))
_DEFAULT_SHAPE = TopicShape(DEFAULT_SCHEMA, "timestamp")


def look_up_route(topic: str, columns: StructType, options: WriteOptions) -> TopicRoute:
    """Connect to the cluster that the options name, and return the route that ``settle_route`` returns.

    Raises the same errors as ``settle_route``.
    """
    with BlockingCluster(options.bootstrap, client_id=CLIENT_ID, security=options.security) as link:
        return settle_route(link, topic, columns, options)


def settle_route(link: BlockingCluster, topic: str, columns: StructType, options: WriteOptions) -> TopicRoute:
    """Return the route of a DataFrame with ``columns`` into ``topic``.

    When this returns, the topic exists and has matching columns.

    Raises:
        BrokerError: UNKNOWN_TOPIC_OR_PARTITION if the topic does not exist and ``createTopic`` is not set;
            SCHEMA_MISMATCH with the columns that differ.
        ConfigError: the topic exists with other key columns than requested.
    """
    found = _found(link, topic, columns, options)
    if options.key_columns is not None and options.key_columns != found.key_columns:
        raise ConfigError(
            f"option keyColumns={','.join(options.key_columns)!r}: topic {topic} exists with the key columns "
            f"{', '.join(found.key_columns) or 'none'}"
        )
    shape = topic_shape(found)
    given = columns
    columns = with_topic_names(shape.schema.names, columns)
    if options.merge_schema and not shape.is_default:
        lacking = [column for column in data_columns(shape, columns).fields if column.name not in shape.schema.names]
        if lacking:
            from sparklog.client.admin import topics

            # New columns must be nullable, even if those of the DataFrame are not, because existing rows have no values
            # in them.
            added = [field.with_nullable(True) for field in arrow_schema(StructType(lacking))]
            extended = replace(shape, schema=pa.schema([*shape.schema, *added]))
            route = plan_route(topic, extended, columns)  # It raises an error before the topic is changed.
            topics.add_columns(link, topic, pa.schema(added), timeout_s=link.timeout_s)
            return _under_own_names(replace(route, topic_id=found.topic_id), given, columns)
    return _under_own_names(replace(plan_route(topic, shape, columns), topic_id=found.topic_id), given, columns)


def _under_own_names(route: TopicRoute, given: StructType, columns: StructType) -> TopicRoute:
    """Return ``route``, which was planned for ``columns``, for rows whose columns have the names ``given``."""
    own_of = dict(zip(columns.fieldNames(), given.fieldNames(), strict=True))
    payload = tuple(own_of[name] for name in route.payload)
    return route if payload == route.payload else replace(route, payload=payload, stored_as=route.payload)


def _found(link: BlockingCluster, topic: str, columns: StructType, options: WriteOptions) -> TopicMetadata:
    # Use the client's lookup, which waits for a topic that may just have been created.
    if options.new_topic is not None and not _is_there(link, topic):
        with _somebody_was_faster():
            return _made(link, topic, columns, options.new_topic, keys=options.key_columns or ())
    try:
        return link.topic(topic, refresh=True)
    except BrokerError as error:
        if error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            raise BrokerError(error.code, f"{error.detail}; createTopic=true creates it") from error
        raise


def _is_there(link: BlockingCluster, topic: str) -> bool:
    reply = link.retrying("metadata", lambda: link.ask_metadata(Metadata(0, None, schemas=False)))
    return any(found.name == topic and not found.code for found in reply.topics)


@contextmanager
def _somebody_was_faster() -> Iterator[None]:
    try:
        yield
    except BrokerError as error:
        if error.code != ErrorCode.TOPIC_ALREADY_EXISTS:
            raise


def _made(
    link: BlockingCluster, topic: str, columns: StructType, new: NewTopic, *, keys: tuple[str, ...]
) -> TopicMetadata:
    """Create the topic.

    For a DataFrame with the columns of Spark's Kafka source the topic has no schema. Otherwise it has the DataFrame's
    own columns, nullable as in Spark's tables, because later rows may have nulls.
    """
    from sparklog.client.admin import topics

    kafka_like = _is_kafka_like(topic, columns) and keys in {(), ("key",)}
    own = data_columns(_NO_COLUMNS, columns)
    topics.create_topic(
        link,
        topic,
        partitions=new.partitions,
        replication_factor=new.replication_factor,
        schema=None if kafka_like else pa.schema([field.with_nullable(True) for field in arrow_schema(own)]),
        key=None if kafka_like else keys,
        event_time=None,
        config=None,
        timeout_s=link.timeout_s,
    )
    return link.topic(topic, refresh=True)


def _is_kafka_like(topic: str, columns: StructType) -> bool:
    try:
        plan_route(topic, _DEFAULT_SHAPE, columns)
    except BrokerError:
        return False
    return True
