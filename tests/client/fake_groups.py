"""Consumer groups of the fake cluster: offsets, and descriptions that a test adds."""

from __future__ import annotations

from sparklog.errors import ErrorCode
from sparklog.protocol.messages import (
    Ack,
    CommitOffsets,
    CommitOffsetsReply,
    DeleteGroup,
    DescribedGroup,
    DescribeGroup,
    DescribeGroupReply,
    ErrorReply,
    FetchOffsets,
    FetchOffsetsReply,
    GroupOffset,
    ListGroups,
    ListGroupsReply,
    PartitionResult,
    Reply,
)

GroupRequest = ListGroups | DescribeGroup | CommitOffsets | DeleteGroup | FetchOffsets


class FakeGroups:
    """The groups, on the brokers' thread. Every broker responds for all of them."""

    def __init__(self) -> None:
        #: (group, topic, partition) to offset
        self.offsets: dict[tuple[str, str, int], int] = {}
        #: groups with members
        self.described: dict[str, DescribedGroup] = {}

    def answer(self, request: GroupRequest) -> Reply:
        cid = request.cid
        match request:
            case ListGroups():
                names = tuple({*self.described, *(group for group, _, _ in self.offsets)})
                return ListGroupsReply(cid, names, tuple(map(self._state, names)))
            case DescribeGroup():
                return DescribeGroupReply(cid, self.described.get(request.group))
            case CommitOffsets():
                self.offsets.update({(request.group, one.topic, one.partition): one.offset for one in request.offsets})
                results = tuple(PartitionResult(one.topic, one.partition, 0) for one in request.offsets)
                return CommitOffsetsReply(cid, results)
            case DeleteGroup():
                own = self._own(request.group)
                for key in own:
                    del self.offsets[key]
                missing = ErrorReply(cid, ErrorCode.GROUP_ID_NOT_FOUND, f"there is no group {request.group!r}")
                return Ack(cid) if own else missing
            case FetchOffsets():
                found = tuple(GroupOffset(*key[1:], self.offsets[key]) for key in self._own(request.group))
                return FetchOffsetsReply(cid, found)

    def _own(self, group: str) -> list[tuple[str, str, int]]:
        return [key for key in self.offsets if key[0] == group]

    def _state(self, name: str) -> tuple[str, int]:
        described = self.described.get(name)
        return (described.state, len(described.members)) if described is not None else ("empty", 0)
