"""The creation, change and deletion of topics, and the deletion of records. Requests are repeated until they succeed.

A request whose response was lost is sent again. If the second request is refused because the first one succeeded, the
call succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from sparklog.client.admin.ddl import parse_columns
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.leader_requests import ask_leaders
from sparklog.client.cluster.metadata import Leader
from sparklog.errors import BrokerError, ErrorCode
from sparklog.extras import is_spark, spark_missing
from sparklog.model import TopicPartition, check_topic_name
from sparklog.protocol.messages import (
    Ack,
    AddColumns,
    AlterTopic,
    CreatePartitions,
    CreateTopic,
    CreateTopicReply,
    DeletedRecords,
    DeleteRecords,
    DeleteRecordsPartition,
    DeleteRecordsReply,
    DeleteTopic,
    Metadata,
    TopicMetadata,
)
from sparklog.record.schema import parse_schema, schema_message

T = TypeVar("T")

#: The value in a CreateTopic request that selects the broker's default.
_BROKER_DEFAULT = -1
#: The offset of a delete request that stands for the partition's high watermark.
_HIGH_WATERMARK = -1
#: Errors after which it is unknown whether the request took effect.
_ANSWER_LOST = {ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT}


def create_topic(
    cluster: BlockingCluster,
    name: str,
    *,
    partitions: int | None,
    replication_factor: int | None,
    schema: pa.Schema | str | Any,
    key: str | Sequence[str] | None,
    event_time: str | None,
    config: Mapping[str, Any] | None,
    timeout_s: float,
) -> str:
    """Create a topic, and wait until its partitions have leaders.

    Return a warning if replicas of one partition share a host, or else "".

    See ``Admin.create_topic`` for the arguments and errors.
    """
    reason = check_topic_name(name)
    if reason is not None:
        raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
    request = CreateTopic(
        0,
        name,
        _BROKER_DEFAULT if partitions is None else partitions,
        _BROKER_DEFAULT if replication_factor is None else replication_factor,
        cluster.broker_timeout_ms(timeout_s),
        schema=b"" if schema is None else schema_message(to_arrow_schema(schema)),
        key_columns=(key,) if isinstance(key, str) else tuple(key or ()),
        event_time=event_time,
        config={str(setting): _as_text(value) for setting, value in (config or {}).items()},
    )
    reply = _carry_out(
        cluster,
        f"creating topic {name!r}",
        lambda: cluster.ask_any(request, CreateTopicReply),
        done=lambda error: error.code == ErrorCode.TOPIC_ALREADY_EXISTS,
        timeout_s=timeout_s,
    )
    return reply.warning if reply is not None else ""


def delete_topic(cluster: BlockingCluster, name: str, *, timeout_s: float) -> None:
    """Delete a topic. See ``Admin.delete_topic`` for the errors."""
    request = DeleteTopic(0, name, cluster.broker_timeout_ms(timeout_s))
    _carry_out(
        cluster,
        f"deleting topic {name!r}",
        lambda: cluster.ask_any(request, Ack),
        done=lambda error: error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        timeout_s=timeout_s,
    )
    cluster.metadata.drop(name)


def delete_records(
    cluster: BlockingCluster, before: Mapping[TopicPartition, int | None], *, timeout_s: float
) -> dict[TopicPartition, int]:
    """Delete records. Arguments and errors are those of ``Admin.delete_records``.

    A repeated request deletes no more records. The exception is the offset None, which means the current end of the
    log.
    """

    def ask(broker_id: int, leaders: Mapping[TopicPartition, Leader]) -> Sequence[DeletedRecords]:
        ends = {tp: _HIGH_WATERMARK if (offset := before[tp]) is None else offset for tp in leaders}
        wanted = [DeleteRecordsPartition(tp.topic, tp.partition, ends[tp], leaders[tp].epoch) for tp in leaders]
        return cluster.ask_broker(broker_id, DeleteRecords(0, tuple(wanted)), DeleteRecordsReply).results

    done = ask_leaders(cluster, "delete records", before, ask, timeout_s=timeout_s)
    return {tp: done[tp].log_start_offset for tp in before}


def create_partitions(
    cluster: BlockingCluster, name: str, partitions: int, *, assignment: Sequence[Sequence[int]], timeout_s: float
) -> str:
    """Add partitions, and wait until they have leaders. Return a warning if replicas share a host, or else "".

    See ``Admin.create_partitions`` for the arguments and errors.
    """
    replicas = tuple(tuple(brokers) for brokers in assignment)
    request = CreatePartitions(0, name, partitions, cluster.broker_timeout_ms(timeout_s), replicas)

    def has_count_already(error: BrokerError) -> bool:
        if error.code != ErrorCode.INVALID_PARTITIONS:
            return False
        return len(cluster.topic(name, refresh=True).partitions) == partitions

    reply = _carry_out(
        cluster,
        f"partitions for topic {name!r}",
        lambda: cluster.ask_any(request, CreateTopicReply),
        done=has_count_already,
        timeout_s=timeout_s,
    )
    return reply.warning if reply is not None else ""


def add_columns(
    cluster: BlockingCluster, name: str, columns: pa.Schema | str | Any, *, timeout_s: float
) -> TopicMetadata:
    """Add columns, and wait until every reachable broker knows them. Return the topic.

    See ``Admin.add_columns`` for the arguments and errors.
    """
    wanted = to_arrow_schema(columns)
    request = AddColumns(0, name, schema_message(wanted), cluster.broker_timeout_ms(timeout_s))
    cluster.retrying(f"columns for topic {name!r}", lambda: cluster.ask_any(request, Ack), timeout_s=timeout_s)
    found = cluster.topic(name, refresh=True)
    for broker_id in list(cluster.metadata.brokers):
        found = _described_by(cluster, broker_id, name, columns=set(wanted.names), timeout_s=timeout_s) or found
    return found


def alter_topic(
    cluster: BlockingCluster, name: str, config: Mapping[str, Any], *, unset: Iterable[str], timeout_s: float
) -> None:
    """Change a topic's settings. See ``Admin.alter_topic`` for the arguments and errors."""
    settings = {str(setting): _as_text(value) for setting, value in config.items()}
    request = AlterTopic(0, name, settings, tuple(unset), cluster.broker_timeout_ms(timeout_s))
    cluster.retrying(f"settings of topic {name!r}", lambda: cluster.ask_any(request, Ack), timeout_s=timeout_s)


def _described_by(
    cluster: BlockingCluster, broker_id: int, name: str, *, columns: set[str], timeout_s: float
) -> TopicMetadata | None:
    """Wait until one broker knows ``columns``, and return its description of the topic.

    Return None if the broker is unreachable.
    """

    def attempt() -> TopicMetadata | None:
        try:
            reply = cluster.ask_metadata(Metadata(0, (name,)), broker_id)
        except BrokerError:
            return None
        topic = reply.topics[0]
        if topic.code or columns - set(parse_schema(topic.schemas[-1].message).names):
            raise BrokerError(
                ErrorCode.SCHEMA_OUTDATED, f"broker {broker_id} does not know columns {sorted(columns)} yet"
            )
        return topic

    return cluster.retrying(f"columns of topic {name!r}", attempt, timeout_s=timeout_s)


def _carry_out(
    cluster: BlockingCluster,
    what: str,
    attempt: Callable[[], T],
    *,
    done: Callable[[BrokerError], bool],
    timeout_s: float,
) -> T | None:
    """Send a request, with retries as in ``BlockingCluster.retrying``.

    Return None if ``done`` recognizes from the error that an earlier attempt, whose response was lost, has succeeded.
    """
    uncertain = False

    def again() -> T | None:
        nonlocal uncertain
        try:
            return attempt()
        except BrokerError as error:
            if uncertain and done(error):
                return None
            uncertain = uncertain or error.code in _ANSWER_LOST
            raise

    return cluster.retrying(what, again, timeout_s=timeout_s)


def to_arrow_schema(schema: pa.Schema | str | Any) -> pa.Schema:
    """Convert text or a Spark ``StructType`` to a pyarrow schema; return a pyarrow schema unchanged.

    Timestamps of a ``StructType`` become microseconds in UTC.

    Raises:
        ConfigError: the text is invalid, or Spark is not installed and cannot convert a StructType.
        TypeError: ``schema`` has any other type.
    """
    if isinstance(schema, pa.Schema):
        return schema
    if isinstance(schema, str):
        return parse_columns(schema)
    if hasattr(schema, "fieldNames") and hasattr(schema, "jsonValue"):
        try:
            # Imported here, because the import is slow and only users of Spark need it.
            from pyspark.sql.pandas.types import to_arrow_schema as spark_to_arrow
        except ModuleNotFoundError as missing:
            if not is_spark(missing):
                raise
            raise spark_missing("a StructType as a schema") from None
        return spark_to_arrow(schema, timezone="UTC")
    raise TypeError(f"schema: {type(schema).__name__} found; expected pyarrow.Schema, StructType or text")


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
