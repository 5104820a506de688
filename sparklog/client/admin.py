"""Topics, brokers and offsets of a cluster: asking about them and changing them.

Every call is retried while the error says that this may help, and ends with a typed error within its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa

from sparklog.client.ddl import parse_columns
from sparklog.client.descriptions import (
    BrokerDescription,
    ClusterDescription,
    TopicDescription,
    describe_broker,
    describe_cluster,
    describe_topic,
)
from sparklog.client.link import ClusterLink
from sparklog.client.offsets import OffsetQuery, list_offsets
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition, check_topic_name
from sparklog.protocol.messages import (
    Ack,
    CreateTopic,
    CreateTopicReply,
    DeleteTopic,
    DescribeBroker,
    DescribeBrokerReply,
    Metadata,
    MetadataReply,
)
from sparklog.record.schema import schema_message

#: In CreateTopic: let the broker's settings decide.
_BROKER_DEFAULT = -1


class Admin:
    """A client for administration. Use from one thread at a time; close it, or use it in a ``with`` block.

    >>> with Admin("localhost:9092") as admin:                                              # doctest: +SKIP
    ...     admin.create_topic("flights", partitions=6, schema="carrier string, dep_delay double", key="carrier")
    """

    def __init__(
        self, bootstrap: str | Iterable[str], *, timeout_s: float = 30.0, client_id: str = "sparklog-admin"
    ) -> None:
        """``timeout_s`` bounds every call, retries included. Nothing is connected before the first call."""
        self._link = ClusterLink(bootstrap, client_id=client_id, timeout_s=timeout_s)
        self._timeout_s = timeout_s

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- topics ---

    def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replication_factor: int | None = None,
        schema: pa.Schema | str | Any = None,
        key: str | Sequence[str] | None = None,
        event_time: str | None = None,
        config: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> TopicDescription:
        """Create a topic and wait until its partitions have leaders.

        Args:
            partitions: left out, the brokers' ``num.partitions``.
            replication_factor: left out, the brokers' ``default.replication.factor``.
            schema: a pyarrow schema, a Spark ``StructType``, or text like ``"carrier string, delay double"``.
                Left out: Kafka's columns key, value, headers, timestamp.
            key: column or columns that decide the partition of a typed topic's records.
            event_time: timestamp column that time queries go by.
            config: topic settings by their Kafka names; values are written as text.

        Raises:
            BrokerError: TOPIC_ALREADY_EXISTS, INVALID_TOPIC_EXCEPTION, INVALID_PARTITIONS,
                INVALID_REPLICATION_FACTOR, INVALID_CONFIG, SCHEMA_MISMATCH.
            ConfigError: ``schema`` is text that is not understood.
            ClientTimeout: not done in time; the topic may come into being later.
        """
        reason = check_topic_name(name)
        if reason is not None:
            raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        request = CreateTopic(
            0,
            name,
            _BROKER_DEFAULT if partitions is None else partitions,
            _BROKER_DEFAULT if replication_factor is None else replication_factor,
            self._server_timeout_ms(timeout_s),
            schema=b"" if schema is None else schema_message(to_arrow_schema(schema)),
            key_columns=(key,) if isinstance(key, str) else tuple(key or ()),
            event_time=event_time,
            config={str(setting): _as_text(value) for setting, value in (config or {}).items()},
        )
        uncertain = False

        def attempt() -> str:
            nonlocal uncertain
            try:
                return self._link.ask_any(request, CreateTopicReply).warning
            except BrokerError as error:
                if error.code == ErrorCode.TOPIC_ALREADY_EXISTS and uncertain:
                    return ""  # made by the attempt whose answer was lost
                uncertain = uncertain or error.code in {ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT}
                raise

        warning = self._link.retrying(f"creating topic {name!r}", attempt, timeout_s=timeout_s)
        return describe_topic(self._link.topic(name, refresh=True), warning=warning)

    def delete_topic(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a topic and its records.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION.
            ClientTimeout: not done in time; it may be deleted later.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        request = DeleteTopic(0, name, self._server_timeout_ms(timeout_s))
        uncertain = False

        def attempt() -> None:
            nonlocal uncertain
            try:
                self._link.ask_any(request, Ack)
            except BrokerError as error:
                if error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and uncertain:
                    return
                uncertain = uncertain or error.code in {ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT}
                raise

        self._link.retrying(f"deleting topic {name!r}", attempt, timeout_s=timeout_s)
        self._link.metadata.forget(name)

    def list_topics(self) -> list[str]:
        """The names of all topics, in order."""
        return sorted(topic.name for topic in self._metadata(None, schemas=False).topics if not topic.code)

    def describe_topic(self, name: str) -> TopicDescription:
        """Raises BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION."""
        return describe_topic(self._link.topic(name, refresh=True))

    def describe_topics(self, names: Iterable[str] | None = None) -> list[TopicDescription]:
        """The topics named, in that order; without names all there are. Raises as ``describe_topic``."""
        if names is not None:
            return [self.describe_topic(name) for name in names]
        topics = [topic for topic in self._metadata(None).topics if not topic.code]
        return [describe_topic(topic) for topic in sorted(topics, key=lambda topic: topic.name)]

    # --- the cluster ---

    def describe_cluster(self) -> ClusterDescription:
        """The cluster's id and its live brokers."""
        return describe_cluster(self._metadata((), schemas=False))

    def describe_brokers(self) -> list[BrokerDescription]:
        """What every live broker says about itself; one that does not answer is listed with its error."""
        return [self._describe_broker(address) for address in self.describe_cluster().brokers]

    def list_offsets(
        self,
        queries: Mapping[TopicPartition, OffsetQuery] | Iterable[TopicPartition],
        *,
        at: OffsetQuery = "latest",
        isolation: int = 0,
    ) -> dict[TopicPartition, int]:
        """Offsets of partitions: ``"earliest"``, ``"latest"`` (the next offset a consumer will see), or a time
        (datetime, or microseconds since the epoch): the first record at or after it lies at or after the offset;
        where there is none, the latest.

        ``queries`` names a question for each partition, or only partitions, which are then all asked ``at``.
        """
        asked = dict(queries) if isinstance(queries, Mapping) else dict.fromkeys(queries, at)
        by_partition = {TopicPartition(*tp): query for tp, query in asked.items()}
        return list_offsets(self._link, by_partition, isolation=isolation)

    def _server_timeout_ms(self, timeout_s: float) -> int:
        """What a broker may take, so that its answer still comes within ours."""
        return max(1, int(min(timeout_s, self._link.request_timeout_s) * 800))

    def _metadata(self, topics: tuple[str, ...] | None, *, schemas: bool = True) -> MetadataReply:
        def attempt() -> MetadataReply:
            reply = self._link.ask_any(Metadata(0, topics, schemas), MetadataReply)
            if schemas:
                self._link.metadata.update(reply)
            return reply

        return self._link.retrying("metadata", attempt)

    def _describe_broker(self, address: Any) -> BrokerDescription:
        if address.broker_id not in self._link.metadata.brokers:
            self._link.retrying("metadata", self._link.refresh)
        try:
            reply = self._link.ask_broker(address.broker_id, DescribeBroker(0), DescribeBrokerReply)
        except BrokerError as error:
            return BrokerDescription(address, error=str(error))
        return describe_broker(address, reply)


def to_arrow_schema(schema: pa.Schema | str | Any) -> pa.Schema:
    """A pyarrow schema out of one, out of text, or out of a Spark ``StructType`` (times become us, UTC)."""
    if isinstance(schema, pa.Schema):
        return schema
    if isinstance(schema, str):
        return parse_columns(schema)
    if hasattr(schema, "fieldNames") and hasattr(schema, "jsonValue"):
        from pyspark.sql.pandas.types import to_arrow_schema as spark_to_arrow  # heavy, and only Spark users need it

        return spark_to_arrow(schema, timezone="UTC")
    raise TypeError(f"schema: {type(schema).__name__} found; expected pyarrow.Schema, StructType or text")


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
