"""The requests that change the committed offsets of groups: OffsetCommit and OffsetDelete."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import REFUSALS, KafkaCode, KafkaError
from sparklog.broker.kafka.groups.group_access import GroupAccess, check_count, group_code
from sparklog.broker.lifecycle.broker import Broker
from sparklog.coordinator.effects import OffsetsDeleted
from sparklog.coordinator.group_events import CommitRequested, OffsetsDeleteRequested
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.offsets import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)
from sparklog.kafka.wire.transactions import TxnOffsetCommitRequest, TxnOffsetCommitRequestPartition
from sparklog.model import TopicPartition
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.messages import GroupOffset
from sparklog.security.acls import Operation, ResourceType

#: The maximum size of the metadata of one offset. Source: Kafka, offset.metadata.max.bytes.
_METADATA_BYTES = 4096


class CheckedOffsets(NamedTuple):
    """The offsets of a request that may be committed, and the error code of each refused offset, by partition."""

    offsets: tuple[GroupOffset, ...]
    refused: dict[tuple[str, int], int]


class CommittedOffsetsHandlers:
    """The handlers of the requests that change the committed offsets of groups."""

    def __init__(self, broker: Broker, access: GroupAccess) -> None:
        self._cache = broker.context.cache
        self._slices = broker.slices
        self._access = access

    async def commit(self, call: KafkaCall, request: OffsetCommitRequest) -> OffsetCommitResponse:
        """Commit offsets for a member, or for any client while the group has no members."""
        check_count(request.topics, (len(topic.partitions) for topic in request.topics), MAX_ENTRIES)
        refused: dict[tuple[str, int], int] = {}
        try:
            self._access.require(call, "OffsetCommit", Operation.READ, request.group_id)
            self._access.host(request.group_id)
            offsets, refused = await self._slices.result(self.checked(call, request))
            if offsets or not refused:
                await self._access.ask(
                    request.group_id,
                    lambda ticket: CommitRequested(
                        ticket,
                        request.group_id,
                        offsets,
                        None,
                        request.member_id,
                        request.generation_id_or_member_epoch,
                        request.group_instance_id or "",
                    ),
                )
        except REFUSALS as error:
            code = commit_code(error)
            return _committed(request, lambda topic, number: refused.get((topic, number), code))
        return _committed(request, lambda topic, number: refused.get((topic, number), 0))

    def checked(
        self, call: KafkaCall, request: OffsetCommitRequest | TxnOffsetCommitRequest
    ) -> Generator[None, None, CheckedOffsets]:
        """Check the offsets in the request. Return the valid offsets, and the error code of each refused offset.

        Yield between slices.
        """
        offsets: list[GroupOffset] = []
        refused: dict[tuple[str, int], int] = {}
        for topic in request.topics:
            if self._slices.over():
                yield
            allowed = self._access.permissions.allows(call, Operation.READ, ResourceType.TOPIC, topic.name)
            for partition in topic.partitions:
                if self._slices.over():
                    yield
                code = self._refusal(topic.name, partition) if allowed else ErrorCode.TOPIC_AUTHORIZATION_FAILED
                if code:
                    refused[topic.name, partition.partition_index] = int(code)
                    continue
                known = self._cache.topic(topic.name)
                offsets.append(
                    GroupOffset(
                        topic.name,
                        partition.partition_index,
                        partition.committed_offset,
                        known.change.topic_id if known is not None else "",
                        partition.committed_leader_epoch,
                        partition.committed_metadata or "",
                    )
                )
        return CheckedOffsets(tuple(offsets), refused)

    def _refusal(self, topic: str, partition: OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition) -> int:
        """Return the error code of an offset that cannot be committed, or 0."""
        if self._cache.partition(TopicPartition(topic, partition.partition_index)) is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if len((partition.committed_metadata or "").encode()) > _METADATA_BYTES:
            return KafkaCode.OFFSET_METADATA_TOO_LARGE
        return ErrorCode.INVALID_REQUEST if partition.committed_offset < 0 else ErrorCode.NONE

    async def delete(self, call: KafkaCall, request: OffsetDeleteRequest) -> OffsetDeleteResponse:
        """Delete offsets of a group, except those of topics to which its members subscribe."""
        check_count(request.topics, (len(topic.partitions) for topic in request.topics), MAX_ENTRIES)
        refused: dict[str, int] = {}
        for topic in request.topics:
            if not self._access.permissions.allows(call, Operation.READ, ResourceType.TOPIC, topic.name):
                refused[topic.name] = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        partitions = tuple(
            (topic.name, partition.partition_index)
            for topic in request.topics
            if topic.name not in refused
            for partition in topic.partitions
        )
        try:
            self._access.require(call, "OffsetDelete", Operation.DELETE, request.group_id)
            outcome = await self._access.ask(
                request.group_id, lambda ticket: OffsetsDeleteRequested(ticket, request.group_id, partitions)
            )
        except REFUSALS as error:
            return OffsetDeleteResponse(error_code=group_code(error))
        assert isinstance(outcome, OffsetsDeleted)
        refused.update(dict.fromkeys(outcome.subscribed, KafkaCode.GROUP_SUBSCRIBED_TO_TOPIC))
        return OffsetDeleteResponse(
            topics=[
                OffsetDeleteResponseTopic(
                    name=topic.name,
                    partitions=[
                        OffsetDeleteResponsePartition(
                            partition_index=partition.partition_index,
                            error_code=int(refused.get(topic.name, ErrorCode.NONE)),
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )


def commit_code(error: BrokerError | KafkaError) -> int:
    """Return Kafka's error code for a failed commit."""
    if error.code == ErrorCode.NON_EMPTY_GROUP:  # The client is not a member, and the group has members.
        return int(ErrorCode.UNKNOWN_MEMBER_ID)
    return group_code(error)


def _committed(request: OffsetCommitRequest, code_of: Callable[[str, int], int]) -> OffsetCommitResponse:
    return OffsetCommitResponse(
        topics=[
            OffsetCommitResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetCommitResponsePartition(
                        partition_index=partition.partition_index,
                        error_code=code_of(topic.name, partition.partition_index),
                    )
                    for partition in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )
