"""Tests of the health of a cluster, according to its brokers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparklog.client.admin.cluster_health import ClusterSnapshot, problems_of
from sparklog.model import TopicPartition
from sparklog.protocol.messages import MetadataReply, PartitionMetadata, ReplicaDescription, TopicMetadata

TP = TopicPartition("t", 0)


def metadata(*, leader: int = 0, epoch: int = 3, isr: tuple[int, ...] = (0, 1), controller: int = 5) -> MetadataReply:
    part = PartitionMetadata(0, leader, epoch, (0, 1), isr)
    return MetadataReply(0, "c", controller, (), (TopicMetadata(0, "t", "id", (part,)),))


def replica(role: str, *, epoch: int = 3, end: int = 10, high_watermark: int = 10) -> ReplicaDescription:
    return ReplicaDescription("t", 0, role, epoch, 0, high_watermark, end, 100, "/d")


def whole() -> ClusterSnapshot:
    return ClusterSnapshot(
        {0: metadata(), 1: metadata()},
        {(TP, 0): replica("leader"), (TP, 1): replica("follower")},
    )


def test_a_healthy_cluster_has_no_problems() -> None:
    assert problems_of(whole(), whole()) == []


def lagging(look: ClusterSnapshot) -> None:
    look.replicas[TP, 1] = replica("follower", end=9)


def started_anew(look: ClusterSnapshot) -> None:
    look.replicas[TP, 1] = replica("offline", epoch=-1)


def without_its_logs(look: ClusterSnapshot) -> None:
    del look.replicas[TP, 1]


def an_epoch_behind(look: ClusterSnapshot) -> None:
    look.replicas[TP, 1] = replica("follower", epoch=2)


def out_of_the_isr(look: ClusterSnapshot) -> None:
    look.metadata[0] = metadata(epoch=4, isr=(0,))


def leaderless(look: ClusterSnapshot) -> None:
    look.metadata[0] = look.metadata[1] = metadata(leader=-1, epoch=4)


def with_an_older_controller(look: ClusterSnapshot) -> None:
    look.metadata[1] = metadata(controller=4)


def that_has_not_heard(look: ClusterSnapshot) -> None:
    look.metadata[1] = metadata(epoch=2)


def that_is_missing(look: ClusterSnapshot) -> None:
    look.problems.append("broker 2 is not registered")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lagging, "lacks 1 committed"),
        (started_anew, "broker 1 does not follow in leader epoch 3"),
        (without_its_logs, "broker 1 does not follow"),
        (an_epoch_behind, "broker 1 does not follow"),
        (out_of_the_isr, "replicas [1] are not in sync"),
        (leaderless, "has no leader"),
        (with_an_older_controller, "broker 1 does not know controller 5"),
        (that_has_not_heard, "broker 1 does not know the leader of t-0"),
        (that_is_missing, "not registered"),
    ],
)
def test_a_health_problem_is_named(spoil: Callable[[ClusterSnapshot], None], words: str) -> None:
    look = whole()
    spoil(look)
    assert any(words in problem for problem in problems_of(look, whole()))


def test_a_follower_is_compared_with_the_previous_high_watermark() -> None:
    look = whole()
    look.replicas[TP, 0] = replica("leader", end=500, high_watermark=500)
    assert problems_of(look, whole()) == []
    assert problems_of(whole(), look) != []
