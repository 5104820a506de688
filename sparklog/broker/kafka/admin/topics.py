"""CreateTopics, DeleteTopics and CreatePartitions requests of Kafka clients.

A topic that a Kafka client creates has the default schema: key, value, headers and timestamp. One request may name many
topics. Each of them is created, deleted or extended separately, a few at the same time, and gets its own error.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from sparklog.broker.kafka.admin.config_names import settings_to_set
from sparklog.broker.kafka.admin.describe_configs import TopicConfigs
from sparklog.broker.kafka.admin.item_errors import FAILURES, SUCCESS, item_error
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.lifecycle.broker import Broker
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.requests.add_partitions import CreatePartitionsRequests
from sparklog.broker.requests.admin import TopicRequests
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.admin import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from sparklog.kafka.wire.fields import ZERO_UUID
from sparklog.model import TopicRecord
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.messages import CreatePartitions, CreateTopic, CreateTopicReply, DeleteTopic
from sparklog.security.acls import Operation, ResourceType

_T = TypeVar("_T")
_R = TypeVar("_R")
#: The number of topics of one request that are created, deleted or extended at the same time.
_AT_ONCE = 16
_TOPIC = ResourceType.TOPIC


class _Deadline:
    """The end of a request's timeout, which all its topics share."""

    def __init__(self, timeout_ms: int) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end_s = self._clock() + timeout_ms / 1000

    def left_ms(self) -> int:
        """Return the remaining time in milliseconds, but at least 1.

        In sparklog's requests, 0 means the default timeout.
        """
        return max(1, int((self._end_s - self._clock()) * 1000))


class TopicHandlers:
    """The handlers of CreateTopics, DeleteTopics and CreatePartitions."""

    def __init__(self, broker: Broker, permissions: Permissions, topic_configs: TopicConfigs) -> None:
        self._cache = broker.context.cache
        self._topic_configs = topic_configs
        self._topics = TopicRequests(broker.context, broker.registry)
        self._partitions = CreatePartitionsRequests(broker.context, broker.registry)
        self._permissions = permissions

    # --- CreateTopics ---

    async def create(self, call: KafkaCall, request: CreateTopicsRequest) -> CreateTopicsResponse:
        named = Counter(topic.name for topic in request.topics)
        deadline = _Deadline(request.timeout_ms)

        async def create_one(topic: CreatableTopic) -> CreatableTopicResult:
            try:
                if named[topic.name] > 1:
                    raise BrokerError(ErrorCode.INVALID_REQUEST, f"Topic {topic.name!r} is named more than once.")
                native = _create_topic(topic, deadline.left_ms())
                if request.validate_only:
                    self._permissions.require_rule(call, native)
                    record, _ = await self._topics.planned(native)
                    return self._created(call, record.name, ZERO_UUID, record)
                reply = await call.native(native)
                assert isinstance(reply, CreateTopicReply)
                return self._created(call, topic.name, bytes.fromhex(reply.topic_id))
            except FAILURES as error:
                failure = item_error(error)
                return CreatableTopicResult(
                    name=topic.name, error_code=failure.code, error_message=failure.message, configs=None
                )

        unique = {topic.name: topic for topic in request.topics}.values()
        return CreateTopicsResponse(topics=await _a_few_at_once(call, create_one, unique))

    def _created(
        self, call: KafkaCall, name: str, topic_id: bytes, record: TopicRecord | None = None
    ) -> CreatableTopicResult:
        """Return the result for a topic that was created, or that would be created with ``record``.

        Its partitions and settings are omitted if the client may not describe the topic's settings.
        """
        if not self._permissions.allows(call, Operation.DESCRIBE_CONFIGS, _TOPIC, name):
            return CreatableTopicResult(
                name=name,
                topic_id=topic_id,
                error_message=None,
                topic_config_error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
                configs=None,
            )
        if record is not None:
            partitions, factor, own = len(record.assignment), len(record.assignment[0]), record.config
        else:
            topic = self._cache.topic(name)
            if topic is None:  # the topic was deleted right after its creation
                return CreatableTopicResult(name=name, topic_id=topic_id, error_message=None, configs=[])
            partitions, factor, own = len(topic.partitions), len(topic.partitions[0].replicas), topic.change.config
        return CreatableTopicResult(
            name=name,
            topic_id=topic_id,
            error_message=None,
            num_partitions=partitions,
            replication_factor=factor,
            configs=[
                CreatableTopicConfigs(
                    name=entry.name, value=entry.value, read_only=entry.read_only, config_source=entry.source
                )
                for entry in self._topic_configs.of(own)
            ],
        )

    # --- DeleteTopics ---

    async def delete(self, call: KafkaCall, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
        wanted = [*request.topics, *(DeleteTopicState(name=name) for name in request.topic_names)]
        named = Counter((topic.name, topic.topic_id) for topic in wanted)
        deadline = _Deadline(request.timeout_ms)

        async def delete_one(topic: DeleteTopicState) -> DeletableTopicResult:
            name, topic_id = topic.name, topic.topic_id
            try:
                if (name is None) == (topic_id == ZERO_UUID):
                    raise BrokerError(ErrorCode.INVALID_REQUEST, "A topic is named either by its name or by its id.")
                if named[name, topic_id] > 1:
                    raise BrokerError(ErrorCode.INVALID_REQUEST, "The topic is named more than once.")
                if name is None:
                    name = self._name_of(call, topic_id)
                else:
                    topic_id = _id_of(self._cache, name)
                await call.native(DeleteTopic(0, name, deadline.left_ms()))
                error = SUCCESS
            except FAILURES as failure:
                error = item_error(failure)
                if topic.name is not None:
                    topic_id = ZERO_UUID
            return DeletableTopicResult(
                name=name, topic_id=topic_id, error_code=error.code, error_message=error.message
            )

        unique = {(topic.name, topic.topic_id): topic for topic in wanted}.values()
        return DeleteTopicsResponse(responses=await _a_few_at_once(call, delete_one, unique))

    def _name_of(self, call: KafkaCall, topic_id: bytes) -> str:
        """Return the name of the topic with this id.

        Raises:
            BrokerError: UNKNOWN_TOPIC_ID, the topic does not exist, or the client may not describe it.
        """
        name = self._cache.name_of(topic_id.hex())
        if name is None or not self._permissions.allows(call, Operation.DESCRIBE, _TOPIC, name):
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_ID, f"this broker does not know topic id {topic_id.hex()}")
        return name

    # --- CreatePartitions ---

    async def create_partitions(self, call: KafkaCall, request: CreatePartitionsRequest) -> CreatePartitionsResponse:
        named = Counter(topic.name for topic in request.topics)
        deadline = _Deadline(request.timeout_ms)

        async def extend_one(topic: CreatePartitionsTopic) -> CreatePartitionsTopicResult:
            try:
                if named[topic.name] > 1:
                    raise BrokerError(ErrorCode.INVALID_REQUEST, f"Topic {topic.name!r} is named more than once.")
                replicas = [assignment.broker_ids for assignment in topic.assignments or ()]
                native = CreatePartitions(0, topic.name, topic.count, deadline.left_ms(), _checked_assignment(replicas))
                if request.validate_only:
                    self._permissions.require_rule(call, native)
                    await self._partitions.check(native)
                else:
                    await call.native(native)
                error = SUCCESS
            except FAILURES as failure:
                error = item_error(failure)
            return CreatePartitionsTopicResult(name=topic.name, error_code=error.code, error_message=error.message)

        unique = {topic.name: topic for topic in request.topics}.values()
        return CreatePartitionsResponse(results=await _a_few_at_once(call, extend_one, unique))


async def _a_few_at_once(call: KafkaCall, work: Callable[[_T], Awaitable[_R]], items: Iterable[_T]) -> list[_R]:
    """Run ``work`` for each item, for ``_AT_ONCE`` of them at the same time. Return the results in order."""
    results: dict[int, _R] = {}
    waiting = enumerate(items)

    async def worker() -> None:
        for index, item in waiting:
            await call.pause()
            results[index] = await work(item)

    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))
    return [results[index] for index in range(len(results))]


def _create_topic(topic: CreatableTopic, timeout_ms: int) -> CreateTopic:
    """Return the request of sparklog that creates the topic. Raises BrokerError."""
    if topic.assignments and (topic.num_partitions != -1 or topic.replication_factor != -1):
        detail = "With assignments, the number of partitions and the replication factor must be -1."
        raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
    return CreateTopic(
        0,
        topic.name,
        topic.num_partitions,
        topic.replication_factor,
        timeout_ms,
        config=settings_to_set((config.name, config.value) for config in topic.configs),
        assignment=_checked_assignment(_in_order(topic.assignments)),
    )


def _in_order(assignments: Sequence[CreatableReplicaAssignment]) -> list[list[int]]:
    """Return the replicas of each partition, in the order of the partitions from 0 on.

    Raises BrokerError if a partition is missing.
    """
    replicas = {assignment.partition_index: assignment.broker_ids for assignment in assignments}
    if sorted(replicas) != list(range(len(assignments))):
        detail = "The assignments must name each partition from 0 on once."
        raise BrokerError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, detail)
    return [replicas[partition] for partition in range(len(replicas))]


def _checked_assignment(assignment: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Convert an assignment to that of sparklog's protocol. Raises BrokerError if it is too large for the request."""
    if len(assignment) > MAX_ENTRIES:
        detail = f"found replicas for {len(assignment)} partitions; expected at most {MAX_ENTRIES}"
        raise BrokerError(ErrorCode.INVALID_PARTITIONS, detail)
    return tuple(map(tuple, assignment))


def _id_of(cache: MetadataCache, name: str) -> bytes:
    topic = cache.topic(name)
    return bytes.fromhex(topic.change.topic_id) if topic is not None else ZERO_UUID
