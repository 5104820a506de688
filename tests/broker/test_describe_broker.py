"""A test of a broker's description that takes several turns of the loop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sparklog.broker.requests.describe import DescribeBrokerRequests
from sparklog.model import NO_EPOCH, TopicPartition
from sparklog.protocol.messages import DescribeBrokerReply
from tests.broker.support import broker_context


class Replicas(list[Any]):
    """Hosted replicas, and logs without a replica."""

    directory = SimpleNamespace(producer_ids=0)

    def __init__(self, logs: list[Any]) -> None:
        super().__init__()
        self.logs = logs

    def unclaimed_logs(self) -> list[Any]:
        return list(self.logs)


def test_log_ends_belong_to_the_described_incarnation(tmp_path: Path) -> None:
    """A controller elects a leader by the log ends of an incarnation that it knows. Here the broker registers again
    and claims a log between two parts of its description."""
    context = broker_context()
    context.incarnation = 4
    log = SimpleNamespace(
        tp=TopicPartition("t", 0),
        log_start_offset=0,
        high_watermark=0,
        log_end_offset=9,
        size_bytes=0,
        directory=tmp_path,
        last_epoch=NO_EPOCH,
    )
    logs = [log, SimpleNamespace(**{**vars(log), "tp": TopicPartition("t", 1)})]
    always = cast(Any, SimpleNamespace(over=lambda: True))
    requests = DescribeBrokerRequests(context, cast(Any, Replicas(logs)), always)
    steps = requests._describe_broker(cast(Any, SimpleNamespace(server_queue=(0, 0), certificates_expire_in_s=None)), 7)
    next(steps)
    next(steps)
    context.incarnation = 5
    logs.clear()
    try:
        while True:
            next(steps)
    except StopIteration as ended:
        reply = ended.value
    assert isinstance(reply, DescribeBrokerReply)
    assert reply.incarnation == 4
    assert [(found.partition, found.log_end_offset) for found in reply.replicas] == [(0, 9), (1, 9)]
