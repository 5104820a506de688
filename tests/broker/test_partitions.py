"""What a broker says of partitions it does not host."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparklog.broker.partitions import Partitions
from sparklog.broker.state import BrokerState
from sparklog.config import broker_config
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.storage.log_set import LogDirectory


def test_a_broker_that_was_told_nothing_yet_calls_no_topic_unknown(tmp_path: Path) -> None:
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=1)
    try:
        broker = BrokerState(
            1,
            "cluster",
            log_dir=str(tmp_path),
            config=broker_config({}),
            on_log_failed=lambda *_: None,
            restart=lambda: None,
        )
        partitions = Partitions(broker, directory)
        with pytest.raises(BrokerError) as caught:
            partitions.require(TopicPartition("t", 0))
        assert caught.value.code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        broker.cache.controller_epoch = 1
        with pytest.raises(BrokerError) as caught:
            partitions.require(TopicPartition("t", 0))
        assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    finally:
        directory.close()
