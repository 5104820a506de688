"""The request for the committed offsets of groups: OffsetFetch.

Versions before 8 name one group, and later versions have a list of groups. The handler converts a request of an earlier
version to a list of one group, and converts the response back to the earlier version.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Set

from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import REFUSALS
from sparklog.broker.kafka.groups.group_access import GroupAccess, check_count, group_code
from sparklog.broker.lifecycle.broker import Broker
from sparklog.errors import ErrorCode
from sparklog.kafka.wire.offsets import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from sparklog.protocol.fields import MAX_PLAIN
from sparklog.protocol.messages import GroupOffset
from sparklog.security.acls import Operation, ResourceType

#: The first version with several groups, and the first one with an error code for a whole group.
_SEVERAL, _GROUP_ERRORS = 8, 2

_Places = dict[str, list[int]]


class FetchedOffsetsHandler:
    """The handler of OffsetFetch requests."""

    def __init__(self, broker: Broker, access: GroupAccess) -> None:
        self._slices = broker.slices
        self._access = access

    async def fetch(self, call: KafkaCall, request: OffsetFetchRequest) -> OffsetFetchResponse:
        """Return committed offsets. A partition without a committed offset has the offset -1."""
        groups = request.groups
        if call.version < _SEVERAL:
            topics = None
            if request.topics is not None:
                topics = [
                    OffsetFetchRequestTopics(name=topic.name, partition_indexes=topic.partition_indexes)
                    for topic in request.topics
                ]
            groups = [OffsetFetchRequestGroup(group_id=request.group_id, topics=topics)]
        asked = [topic for group in groups for topic in group.topics or ()]
        check_count([*groups, *asked], (len(topic.partition_indexes) for topic in asked), MAX_PLAIN)
        found: list[OffsetFetchResponseGroup] = []
        named: set[str] = set()
        for group in groups:
            await call.pause()
            if group.group_id in named:  # a group may have very many offsets
                found.append(_failed(group, ErrorCode.INVALID_REQUEST))
                continue
            named.add(group.group_id)
            found.append(await self._of_group(call, group, stable=request.require_stable))
        return OffsetFetchResponse(groups=found) if call.version >= _SEVERAL else _of_one_group(call.version, found[0])

    async def _of_group(
        self, call: KafkaCall, request: OffsetFetchRequestGroup, *, stable: bool
    ) -> OffsetFetchResponseGroup:
        try:
            self._access.require(call, "OffsetFetch", Operation.DESCRIBE, request.group_id)
            self._access.host(request.group_id).groups.check_fetch(
                request.group_id, request.member_id or "", request.member_epoch
            )
            return await self._slices.result(self._offsets(call, request, stable=stable))
        except REFUSALS as error:
            return _failed(request, group_code(error))

    def _offsets(
        self, call: KafkaCall, request: OffsetFetchRequestGroup, *, stable: bool
    ) -> Generator[None, None, OffsetFetchResponseGroup]:
        host = self._access.host(request.group_id)
        places: _Places = {}
        wanted: list[tuple[str, int]] | None = None
        if request.topics is not None:
            wanted = [(topic.name, number) for topic in request.topics for number in topic.partition_indexes]
            places = {topic.name: list(topic.partition_indexes) for topic in request.topics}
        known = host.groups.offsets(request.group_id, wanted)
        for topic, number in sorted(known) if wanted is None else ():
            places.setdefault(topic, []).append(number)
        held: Set[tuple[str, int]] = frozenset()
        if stable and (holds := host.groups.holds(request.group_id, "", known if wanted is None else wanted)):
            host.check_holds(request.group_id, holds)
            held = host.groups.held(request.group_id, "", known if wanted is None else wanted)
        found: list[OffsetFetchResponseTopics] = []
        for topic, numbers in places.items():
            allowed = self._access.permissions.allows(call, Operation.DESCRIBE, ResourceType.TOPIC, topic)
            if not allowed and wanted is None:
                continue
            partitions = []
            for number in numbers:
                if self._slices.over():
                    yield
                if not allowed:
                    partitions.append(_no_offset(number, ErrorCode.TOPIC_AUTHORIZATION_FAILED))
                elif (topic, number) in held:
                    partitions.append(_no_offset(number, ErrorCode.UNSTABLE_OFFSET_COMMIT))
                else:
                    partitions.append(_partition(number, known, (topic, number)))
            found.append(OffsetFetchResponseTopics(name=topic, partitions=partitions))
        return OffsetFetchResponseGroup(group_id=request.group_id, topics=found)


def _partition(
    number: int, known: Mapping[tuple[str, int], GroupOffset], place: tuple[str, int]
) -> OffsetFetchResponsePartitions:
    offset = known.get(place)
    if offset is None:
        return _no_offset(number, ErrorCode.NONE)
    return OffsetFetchResponsePartitions(
        partition_index=number,
        committed_offset=offset.offset,
        committed_leader_epoch=offset.leader_epoch,
        metadata=offset.metadata,
    )


def _no_offset(number: int, code: int) -> OffsetFetchResponsePartitions:
    return OffsetFetchResponsePartitions(partition_index=number, committed_offset=-1, metadata="", error_code=int(code))


def _failed(request: OffsetFetchRequestGroup, code: int) -> OffsetFetchResponseGroup:
    """Return the response for a group whose request has failed. Its partitions have the error too."""
    topics = [
        OffsetFetchResponseTopics(
            name=topic.name, partitions=[_no_offset(number, code) for number in topic.partition_indexes]
        )
        for topic in request.topics or ()
    ]
    return OffsetFetchResponseGroup(group_id=request.group_id, topics=topics, error_code=code)


def _of_one_group(version: int, found: OffsetFetchResponseGroup) -> OffsetFetchResponse:
    def partitions(of: Iterable[OffsetFetchResponsePartitions]) -> list[OffsetFetchResponsePartition]:
        return [
            OffsetFetchResponsePartition(
                partition_index=one.partition_index,
                committed_offset=one.committed_offset,
                committed_leader_epoch=one.committed_leader_epoch,
                metadata=one.metadata,
                error_code=one.error_code,
            )
            for one in of
        ]

    topics = [
        OffsetFetchResponseTopic(name=topic.name, partitions=partitions(topic.partitions)) for topic in found.topics
    ]
    if found.error_code and version >= _GROUP_ERRORS:
        return OffsetFetchResponse(error_code=found.error_code)
    return OffsetFetchResponse(topics=topics)
