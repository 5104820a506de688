"""Tests of the replica that a reader fetches from."""

from __future__ import annotations

from sparklog.client.cluster.replica_selector import nearest
from sparklog.model import BrokerEndpoint


def test_the_nearest_live_replica_is_chosen() -> None:
    def found(*in_sync: int, here: str = "", leader: int = 0) -> int:
        """Return brokers 0 to 4 on hosts a to e: a and b in rack 1, c and d in rack 2, e in none."""
        racks = ("1", "1", "2", "2", None)
        brokers = {number: BrokerEndpoint(number, "abcde"[number], 1, 1, rack) for number, rack in enumerate(racks)}
        return nearest(leader, in_sync, brokers, is_here=lambda host: host == here)

    assert found(0, 1, 2, here="a") == 0
    assert found(0, 1, 2, here="c") == 2, "a replica of this host must come first"
    assert found(0, 1, 2, here="d") == 2, "a replica of this rack must come before others"
    assert found(1, 0, here="b", leader=2) == 1
    assert found(0, 1, here="d") == found(0, 1, 2) == found(0, 7, here="e") == 0, "no replica is nearer than the leader"
    assert found(4, 3, here="e", leader=4) == 4
    assert found(0, 1, here="a", leader=7) == 7, "a broker that is not known to be alive must be looked up again"
