"""Tests of errors that a fetcher raises after the records of other partitions."""

from __future__ import annotations

import pytest

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.consumer.fetcher import Fetcher
from sparklog.client.consumer.partition_cursor import PartitionCursor
from sparklog.client.errors import LogTruncated
from tests.client.reading import TP


@pytest.fixture
def fetcher() -> Fetcher:
    """Return a fetcher with a paused partition, in which a truncation below offset 10 was found."""
    found = Fetcher(BlockingCluster("127.0.0.1:1"), max_bytes=1024, isolation=0, columns=lambda _: None)
    found.cursors[TP] = PartitionCursor(TP, "id1", 10, last_epoch=5)
    found.paused.add(TP)
    found.defer(LogTruncated(TP, 10, (3, 5)))
    return found


def test_a_deferred_truncation_is_raised(fetcher: Fetcher) -> None:
    with pytest.raises(LogTruncated, match="read up to offset 10, the log diverges at offset 5"):
        fetcher.advance(0)
    assert not fetcher.advance(0)


def test_a_deferred_truncation_does_not_move_a_position_after_a_seek(fetcher: Fetcher) -> None:
    fetcher.cursors[TP].move(2)
    assert not fetcher.advance(0)


def test_a_deferred_truncation_of_a_revoked_partition_is_dropped(fetcher: Fetcher) -> None:
    del fetcher.cursors[TP]
    assert not fetcher.advance(0)
