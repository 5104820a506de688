"""The facts about topics that the data APIs of Kafka clients need: names, ids, access, format and leaders."""

from __future__ import annotations

import pyarrow as pa

from sparklog.broker.context import BrokerContext
from sparklog.broker.internal_topics import refuse_internal
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.kafka.transaction_codes import check_transactional_id
from sparklog.broker.replication.partition import AppendRules, Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.records.json_rows import JsonTopic
from sparklog.kafka.wire import ZERO_UUID
from sparklog.model import INTERNAL_PREFIX, NO_EPOCH, NO_LEADER, BrokerEndpoint, TopicPartition
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.security.acls import Operation, ResourceType


class DataTopics:
    """The topics of the cluster as the data APIs of Kafka clients see them.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, context: BrokerContext, partitions: Partitions, permissions: Permissions) -> None:
        self._context = context
        self._partitions = partitions
        self._permissions = permissions

    def name(self, name: str, topic_id: bytes) -> str:
        """Return the name of a topic that a request gives by its name or by its id.

        Raises:
            BrokerError: UNKNOWN_TOPIC_ID.
        """
        if name or topic_id == ZERO_UUID:
            return name
        found = self._context.cache.name_of(topic_id.hex())
        if found is None:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_ID, f"this broker knows no topic with the id {topic_id.hex()}")
        return found

    def require_access(self, call: KafkaCall, operation: Operation, topic: str, *, api: str) -> None:
        """Check that the client may do the operation on the topic. ``api`` names the request in the audit log.

        Raises:
            BrokerError: TOPIC_AUTHORIZATION_FAILED; BROKER_NOT_AVAILABLE if the broker has not read the ACLs yet.
        """
        self._permissions.require(call, api, operation, ResourceType.TOPIC, topic)

    def require_transactional_id(self, call: KafkaCall, name: str, *, api: str) -> None:
        """Check that the client may write with the transactional id. See ``require_access``.

        Raises:
            BrokerError: INVALID_REQUEST, TRANSACTIONAL_ID_AUTHORIZATION_FAILED, BROKER_NOT_AVAILABLE.
        """
        if name:  # An empty id is allowed with batches outside transactions.
            check_transactional_id(name)
        self._permissions.require(call, api, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, name)

    def require(self, topic: str, partition: int, topic_id: bytes = ZERO_UUID) -> Partition:
        """Return the hosted replica of a partition. See ``Partitions.require`` for the errors."""
        return self._partitions.require((topic, partition), "" if topic_id == ZERO_UUID else topic_id.hex())

    def hosted(self, tp: TopicPartition, topic_id: str) -> Partition:
        """Return the hosted replica of a partition of the topic with this id. See ``Partitions.require``."""
        return self._partitions.require(tp, topic_id)

    def leader(self, tp: TopicPartition, listener: str) -> tuple[int, int, BrokerEndpoint | None]:
        """Return the id and epoch of the partition's leader, and the leader's address at the listener.

        If this broker does not know the leader, the result is (-1, -1, None).
        """
        known = self._context.cache.partition(tp)
        leader, epoch = (known.state.leader, known.state.leader_epoch) if known else (NO_LEADER, NO_EPOCH)
        hosted = self._partitions.get(tp)
        if hosted is not None and hosted.replica.leader_epoch > epoch:
            leader, epoch = hosted.replica.leader, hosted.replica.leader_epoch
        if leader == NO_LEADER:
            return NO_LEADER, NO_EPOCH, None
        return leader, epoch, self._context.cache.shown(listener).get(leader)


def refuse_internal_topic(topic: str, what: str) -> None:
    """Raise BrokerError if the topic is internal. ``what`` is the end of the error message, such as "not read"."""
    if topic.startswith(INTERNAL_PREFIX):
        refuse_internal(topic, what)


def json_topic(rules: AppendRules, schema: pa.Schema) -> JsonTopic:
    """Return the converter between the topic's rows and the records of Kafka clients.

    ``schema`` is the schema of the rows, which is one of the topic's schemas.
    """
    return JsonTopic(schema, rules.key_columns, rules.event_time)


def has_kafka_columns(schema: pa.Schema) -> bool:
    """Return whether a topic begins with the columns of Kafka's records, and all its other columns are nullable.

    Kafka clients write nulls to the other columns, and do not read them.
    """
    if schema is DEFAULT_SCHEMA:
        return True
    count = len(DEFAULT_SCHEMA)
    return (
        len(schema) >= count
        and all(schema.field(index).equals(DEFAULT_SCHEMA.field(index)) for index in range(count))
        and all(schema.field(index).nullable for index in range(count, len(schema)))
    )


def require_kafka_columns(topic: str, rules: AppendRules) -> None:
    """Raise BrokerError INVALID_TOPIC_EXCEPTION if Kafka clients cannot use a topic with these rules."""
    if not rules.kafka_json and not has_kafka_columns(rules.schema):
        detail = (
            f"topic {topic!r} has the columns {', '.join(rules.schema.names[:20])}: Kafka clients can use it only with "
            "the topic setting kafka.value.format=json"
        )
        raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, detail)
