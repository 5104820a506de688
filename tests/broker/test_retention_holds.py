"""A test of the groups' offsets that retention waits for."""

from __future__ import annotations

import pytest

from sparklog.broker.groups.retention_holds import read_to
from sparklog.model import TopicPartition
from sparklog.protocol.messages import GroupOffset

TP = TopicPartition("t", 0)
KNOWN = {
    "fast": {TP: GroupOffset("t", 0, 90, "id")},
    "slow": {TP: GroupOffset("t", 0, 40, "id")},
    "of a deleted topic": {TP: GroupOffset("t", 0, 95, "an earlier id")},
    "elsewhere": {TopicPartition("t", 1): GroupOffset("t", 1, 80, "id")},
}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (["fast"], 90),
        (["fast", "slow"], 40),
        (["fast", "could not be asked"], 0),
        (["fast", "of a deleted topic"], 0),
        (["fast", "elsewhere"], 0),
    ],
)
def test_retention_waits_for_the_slowest_and_for_unknown_groups(groups: list[str], expected: int) -> None:
    assert read_to(TP, "id", groups, KNOWN) == expected
