"""Tests of a topic's record with moves."""

from __future__ import annotations

import pytest

from sparklog.broker.requests.reassignments import ReassignmentDraft
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Reassignment, TopicRecord, TopicSchema
from sparklog.protocol.messages import ReplicaMove

RECORD = TopicRecord("t", "id", ((0, 1), (1, 2)), (TopicSchema(0, b""),))


def altered(record: TopicRecord, *moves: ReplicaMove, throttle_bytes: int = 0) -> TopicRecord:
    draft = ReassignmentDraft(record, live=range(5))
    for move in moves:
        draft.alter(move, throttle_bytes=throttle_bytes)
    return draft.record


def test_all_replicas_stay_until_the_target_is_in_sync() -> None:
    record = altered(RECORD, ReplicaMove("t", 0, (3, 1)), throttle_bytes=7)
    assert record.assignment == ((3, 1, 0), (1, 2))
    assert record.reassigning == {0: Reassignment((3, 1), (0, 1), 7)}
    assert record.replication_factor == 2
    assert altered(record, ReplicaMove("t", 0, (3, 1)), throttle_bytes=7) == record


def test_a_changed_move_remembers_its_original_replicas() -> None:
    record = altered(RECORD, ReplicaMove("t", 0, (3, 1)), ReplicaMove("t", 0, (4,)))
    assert record.assignment[0] == (4, 3, 1, 0)
    assert record.reassigning[0] == Reassignment((4,), (0, 1))


def test_a_cancel_returns_to_the_original_replicas() -> None:
    record = altered(RECORD, ReplicaMove("t", 0, (3, 4)), ReplicaMove("t", 0, None), throttle_bytes=7)
    assert record.assignment[0] == (0, 1, 3, 4)
    assert record.reassigning[0] == Reassignment((0, 1), (0, 1), 7)
    assert altered(record, ReplicaMove("t", 0, None)) == record


def test_only_a_changed_order_of_replicas_is_a_move() -> None:
    assert altered(RECORD, ReplicaMove("t", 0, (1, 0))).reassigning == {0: Reassignment((1, 0), (0, 1))}
    assert altered(RECORD, ReplicaMove("t", 0, (0, 1))) == RECORD


@pytest.mark.parametrize(
    ("move", "code"),
    [
        (ReplicaMove("t", 0, ()), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (ReplicaMove("t", 0, (1, 1)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (ReplicaMove("t", 0, (1, 5)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (ReplicaMove("t", 0, (-1,)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (ReplicaMove("t", 0, None), ErrorCode.NO_REASSIGNMENT_IN_PROGRESS),
        (ReplicaMove("t", 2, (0,)), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (ReplicaMove("t", -1, (0,)), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
def test_an_invalid_move_is_refused_and_changes_nothing(move: ReplicaMove, code: ErrorCode) -> None:
    draft = ReassignmentDraft(RECORD, live=range(5))
    with pytest.raises(BrokerError) as caught:
        draft.alter(move, throttle_bytes=0)
    assert caught.value.code == code
    assert draft.record == RECORD


def test_an_offline_replica_may_stay_a_replica() -> None:
    draft = ReassignmentDraft(RECORD, live=(1, 3))
    draft.alter(ReplicaMove("t", 0, (0, 3)), throttle_bytes=0)
    assert draft.record.assignment[0] == (0, 3, 1)
