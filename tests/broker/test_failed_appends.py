"""Tests of a disk that fails during a produce: the responses, the requests that proceed, and the memory of waiting
ones."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable
from typing import cast

from sparklog.broker.replication.partition import Answer, AppendRules, Partition, PartitionHost, PendingProduce
from sparklog.errors import ErrorCode
from sparklog.model import LeaderAndIsr, TopicSchema
from sparklog.record.codec import encode_batch
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from sparklog.replica.events import Decided
from sparklog.replica.replica import Replica
from sparklog.testing.sim_disk import SimDisk
from tests.broker.support import rows
from tests.storage.batches import TOPIC_ID, TP, config, open_directory


class _Alone:
    """The host of a partition with a broker of its own."""

    def now_ms(self) -> int:
        return 1

    def log_failed(self, partition: Partition, error: Exception) -> None:
        partition.fail(error)

    def __getattr__(self, order: str) -> Callable[..., None]:
        return lambda *_: None


def _leading(disk: SimDisk, isr: tuple[int, ...] = (1,)) -> Partition:
    """Return one of two replicas. Its log has one batch, which is not in memory."""
    schemas = (TopicSchema(0, schema_message(DEFAULT_SCHEMA)),)
    log = open_directory(disk=disk, hot_bytes=0).create(TP, TOPIC_ID, schemas=schemas, config=config())
    replica = Replica(1, log)
    rules = AppendRules(DEFAULT_SCHEMA, 0, 1 << 20, "timestamp")
    partition = Partition(TP, TOPIC_ID, log=log, replica=replica, rules=rules, host=cast(PartitionHost, _Alone()))
    partition.step(Decided(LeaderAndIsr(1, 1, isr, 1), 1, (1, 2), {1: 1, 2: 1}, min_isr=1))
    answers: list[Answer] = []
    _produce(partition, answers.append)
    assert [answer.code for answer in answers] == [ErrorCode.NONE]
    return partition


def _produce(partition: Partition, answered: Callable[[Answer], None], acks: int = 1) -> None:
    batch = encode_batch(rows(1), schema_id=0, compression=None, event_time="timestamp")
    pending = PendingProduce([(batch.header, memoryview(batch.body))], answered)
    partition.produce(pending, acks=acks, deadline_ms=2**60)


def test_an_append_that_a_response_admits_finds_the_replica_offline() -> None:
    """A response frees space, and the next request proceeds in the same turn: to a disk that has just failed."""
    disk = SimDisk()
    partition = _leading(disk)
    answers: list[Answer] = []
    offline: list[str | None] = []

    def answered(answer: Answer) -> None:
        answers.append(answer)
        offline.append(partition.offline)
        _produce(partition, answers.append)

    disk.fail_next("write", errno.EIO)
    _produce(partition, answered)
    assert [answer.code for answer in answers] == [ErrorCode.KAFKA_STORAGE_ERROR] * 2
    assert all(answer.base_offset == -1 and "Input/output error" in answer.detail for answer in answers)
    assert len(offline) == 1 and offline[0] is not None
    assert partition.log.log_end_offset == 1 and not partition._pending


def test_a_produce_that_waits_for_commit_keeps_no_records_in_memory() -> None:
    """The bytes in flight of a connection are bounded, and no longer count when the connection is closed."""
    partition = _leading(SimDisk(), isr=(1, 2))
    answers: list[Answer] = []
    header, encoded = encode_batch(rows(1), schema_id=0, compression=None, event_time="timestamp")
    body = memoryview(bytes(encoded))
    kept = weakref.ref(body)
    partition.produce(PendingProduce([(header, body)], answers.append), acks=-1, deadline_ms=2**60)
    del body
    assert partition.log.log_end_offset == 2 and len(partition._pending) == 1 and not answers
    assert kept() is None
