"""DescribeTopicPartitions requests of Kafka clients: the partitions of topics, in pages. Source: KIP-966."""

from __future__ import annotations

from collections.abc import AsyncIterator
from heapq import merge

from sparklog.broker.kafka.acl_codes import OPERATIONS_NOT_ASKED
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.lifecycle.broker import Broker
from sparklog.broker.metadata_cache import CachedTopic
from sparklog.errors import ErrorCode
from sparklog.kafka.wire.metadata import (
    Cursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from sparklog.model import check_topic_name, is_internal
from sparklog.protocol.messages import PartitionDecision
from sparklog.security.acls import Operation, ResourceType

#: The maximum number of partitions in one page, as in Kafka (``max.request.partition.size.limit``). A page also has at
#: most this number of topics that cannot be described.
MOST_PARTITIONS = 2000
#: The number of names that are sorted between two pauses. This takes about 5 ms.
_SORTED_AT_ONCE = 10_000
_TOPIC = ResourceType.TOPIC


class DescribeTopicsHandler:
    """The handler of DescribeTopicPartitions."""

    def __init__(self, broker: Broker, permissions: Permissions) -> None:
        self._cache = broker.context.cache
        self._permissions = permissions

    async def handle(self, call: KafkaCall, request: DescribeTopicPartitionsRequest) -> DescribeTopicPartitionsResponse:
        left = max(1, min(request.response_partition_limit, MOST_PARTITIONS))
        refusals_left = MOST_PARTITIONS
        topics: list[DescribeTopicPartitionsResponseTopic] = []
        async for name, first in self._wanted(call, request):
            topic = self._cache.topic(name)
            refusal = self._refusal(call, name, topic)
            if topic is None or refusal:
                refusals_left -= 1
            if refusals_left < 0 or (left == 0 and not refusal):
                following = Cursor(topic_name=name, partition_index=first)
                return DescribeTopicPartitionsResponse(topics=topics, next_cursor=following)
            if topic is None or refusal:
                topics.append(self._refused(call, name, refusal))
                continue
            numbers = sorted(number for number in topic.partitions if number >= first)
            topics.append(self._described(call, name, topic, numbers[:left]))
            if len(numbers) > left:
                following = Cursor(topic_name=name, partition_index=numbers[left])
                return DescribeTopicPartitionsResponse(topics=topics, next_cursor=following)
            left -= len(numbers)
        return DescribeTopicPartitionsResponse(topics=topics)

    async def _wanted(self, call: KafkaCall, request: DescribeTopicPartitionsRequest) -> AsyncIterator[tuple[str, int]]:
        """Return the topics from the cursor on, in order, each with its first wanted partition.

        If the request names no topics, these are all topics that the client may describe.
        """
        named = {topic.name for topic in request.topics}
        cursor = request.cursor
        names, runs = list(named or self._cache.topics()), []
        for first in range(0, len(names), _SORTED_AT_ONCE):
            await call.pause()
            runs.append(sorted(names[first : first + _SORTED_AT_ONCE]))
        for name in merge(*runs):
            await call.pause()
            if cursor is not None and name < cursor.topic_name:
                continue
            is_hidden = is_internal(name) or not self._permissions.allows(call, Operation.DESCRIBE, _TOPIC, name)
            if named or not is_hidden:
                at_cursor = cursor is not None and name == cursor.topic_name
                yield name, max(0, cursor.partition_index) if cursor is not None and at_cursor else 0

    def _refusal(self, call: KafkaCall, name: str, topic: CachedTopic | None) -> int:
        """Return the error code of a topic that cannot be described, or 0."""
        if not self._permissions.allows(call, Operation.DESCRIBE, _TOPIC, name):
            return ErrorCode.TOPIC_AUTHORIZATION_FAILED
        if topic is not None:
            return ErrorCode.NONE
        return ErrorCode.INVALID_TOPIC_EXCEPTION if check_topic_name(name) else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def _refused(self, call: KafkaCall, name: str, code: int) -> DescribeTopicPartitionsResponseTopic:
        is_visible = code != ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return DescribeTopicPartitionsResponseTopic(
            error_code=code,
            name=name,
            is_internal=is_internal(name),
            topic_authorized_operations=self._permissions.operations(call, _TOPIC, name)
            if is_visible
            else OPERATIONS_NOT_ASKED,
        )

    def _described(
        self, call: KafkaCall, name: str, topic: CachedTopic, numbers: list[int]
    ) -> DescribeTopicPartitionsResponseTopic:
        return DescribeTopicPartitionsResponseTopic(
            name=name,
            topic_id=bytes.fromhex(topic.change.topic_id),
            is_internal=is_internal(name),
            partitions=[self._partition(number, topic.partitions[number]) for number in numbers],
            topic_authorized_operations=self._permissions.operations(call, _TOPIC, name),
        )

    def _partition(self, number: int, known: PartitionDecision) -> DescribeTopicPartitionsResponsePartition:
        live = self._cache.incarnations
        leader = known.state.leader if known.state.leader in live else -1
        return DescribeTopicPartitionsResponsePartition(
            error_code=ErrorCode.NONE if leader >= 0 else ErrorCode.LEADER_NOT_AVAILABLE,
            partition_index=number,
            leader_id=leader,
            leader_epoch=known.state.leader_epoch,
            replica_nodes=list(known.replicas),
            isr_nodes=list(known.state.isr),
            eligible_leader_replicas=[],
            last_known_elr=[],
            offline_replicas=[replica for replica in known.replicas if replica not in live],
        )
