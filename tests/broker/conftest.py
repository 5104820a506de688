"""One real cluster for all tests of the broker. Each test leaves it healthy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparklog.testing.process_cluster import ProcessCluster

SETTINGS = {
    "log.checkpoint.interval.ms": "500",
    "log.retention.check.interval.ms": "200",
    "log.cleaner.backoff.ms": "200",
    "socket.request.max.bytes": "1048576",
    "fetch.max.bytes": "524288",
    "max.connections": "200",
    "transaction.hanging.after.ms": "2000",
}


@pytest.fixture(scope="package")
def running_cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: ProcessCluster) -> ProcessCluster:
    """Start all three brokers, whatever an earlier failed test has left."""
    running_cluster.start_controller()
    running_cluster.start_brokers()
    return running_cluster
