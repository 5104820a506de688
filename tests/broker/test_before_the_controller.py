"""A test of a broker that has started and has no update from a controller yet."""

from __future__ import annotations

import threading

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import CreateTopic, CreateTopicReply
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.topics import PATIENCE_S

pytestmark = pytest.mark.integration


def test_a_freshly_started_broker_creates_a_topic(cluster: ProcessCluster) -> None:
    """The broker waits for the controller. It does not refuse every replication factor because it knows no live
    broker."""
    cluster.stop_controller()
    cluster.stop_broker(0)
    cluster.start_broker(0)
    with cluster.connect(0) as connection:
        with pytest.raises(BrokerError) as refused:
            connection.request(CreateTopic(0, "too-early", 1, 3, 100))
        assert refused.value.code == ErrorCode.BROKER_NOT_AVAILABLE
        starting = threading.Thread(target=cluster.start_controller)
        starting.start()
        try:
            reply, _ = connection.request(CreateTopic(0, "early", 1, 1, int(PATIENCE_S * 1000)))
        finally:
            starting.join()
        assert isinstance(reply, CreateTopicReply)
    cluster.wait_ready()
