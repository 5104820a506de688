"""A test of the search for partitions that still need a stopping broker."""

from __future__ import annotations

from typing import cast

from sparklog.broker.lifecycle.controlled_shutdown import CachedAny
from sparklog.broker.replication.partition import Partition


def test_all_are_found_and_few_are_examined_again() -> None:
    partitions = [cast(Partition, number) for number in range(1000)]
    needing = set(partitions)
    looks: list[Partition] = []

    def needs(partition: Partition) -> bool:
        looks.append(partition)
        return partition in needing

    remaining = CachedAny(lambda: partitions, needs)
    assert remaining.any() and len(looks) == 1000
    while needing:
        assert remaining.any()
        needing.pop()
    assert len(looks) < 4000
    assert not remaining.any()
    needing.add(partitions[7])
    assert remaining.any() and remaining.count() == 1, "a partition that needs the broker again must be found as well"
