"""Transactions on three real brokers, message by message: what a reader of committed records sees, whoever dies."""

from __future__ import annotations

import pytest

from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.topics import create_topic
from tests.broker.transactions import Client, read

pytestmark = pytest.mark.integration


def test_a_transaction_over_partitions_is_seen_whole_or_not_at_all(cluster: ProcessCluster) -> None:
    create_topic(cluster, "whole", partitions=3)
    client = Client(cluster, "whole-key")
    for turn, commit in enumerate((True, False, True)):
        client.begin()
        for number in range(3):
            client.write("whole", number, 2, f"{turn}-")
            assert read(cluster, "whole", number, isolation=1).last.last_stable_offset == 3 * turn  # type: ignore[union-attr]
        assert client.end(commit=commit).complete
    for number in range(3):
        committed = read(cluster, "whole", number, isolation=1)
        assert committed.values == [b"0-0", b"0-1", b"2-0", b"2-1"]
        assert len(committed.markers) == 3
        everything = read(cluster, "whole", number, isolation=0)
        assert everything.values == [b"0-0", b"0-1", b"1-0", b"1-1", b"2-0", b"2-1"]
