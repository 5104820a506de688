"""Tests of readers and transactions: readers skip open and aborted transactions unless they request them."""

from __future__ import annotations

import time

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer import fetched_batches
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.errors import ClientTimeout
from sparklog.client.producer.producer import Producer
from sparklog.errors import ConfigError
from sparklog.model import TopicPartition
from sparklog.record import codec
from sparklog.record.header import BatchHeader
from tests.client.fake_cluster import FakeCluster
from tests.client.transacting import seen


@pytest.mark.alone
def test_readers_skip_aborted_records_without_decoding_them(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="x") as producer:
        for number in range(6):
            producer.begin()
            producer.send("t", b"%d" % number).result(30)
            producer.commit() if number % 3 == 0 else producer.abort()
    decoded: list[int] = []
    decode = codec.decode_batch

    def counting(header: BatchHeader, *rest: object) -> object:
        decoded.append(header.base_offset)
        return decode(header, *rest)

    monkeypatch.setattr(fetched_batches, "decode_batch", counting)
    tp = TopicPartition("t", 0)
    with PartitionReader(fake.bootstrap, tp, 0, 12) as reader:
        assert [batch.column("value").to_pylist() for _, batch in reader] == [[b"0"], [b"3"]]
    assert decoded == [0, 6]
    with Consumer(fake.bootstrap, "t", start={tp: 8}) as consumer:
        assert consumer.poll(0.2) == []
        assert consumer.position(tp) == 12
    assert decoded == [0, 6]
    with Consumer(fake.bootstrap, "t", start={tp: 8}) as consumer:
        began = time.monotonic()
        assert consumer.to_table().num_rows == 0
        assert time.monotonic() - began < 0.8  # the poll does not wait for records if there are only markers
    with Consumer(fake.bootstrap, "t", isolation="read_uncommitted") as consumer:
        assert consumer.to_table().num_rows == 6


def test_readers_stop_at_the_first_open_transaction(fake: FakeCluster) -> None:
    fake.create("t")
    tp = TopicPartition("t", 0)
    with (
        Producer(fake.bootstrap, transactional_id="x") as producer,
        Producer(fake.bootstrap) as plain,
        Admin(fake.bootstrap) as admin,
    ):
        plain.send("t", b"before").result(30)
        producer.begin()
        producer.send("t", b"open").result(30)
        plain.send("t", b"after").result(30)
        assert seen(fake, "t") == [b"before"]
        assert admin.list_offsets([tp]) == {tp: 1}
        assert admin.list_offsets([tp], isolation="read_uncommitted") == {tp: 3}
        # A position above the last stable offset, such as a group's committed one, is not out of range.
        with Consumer(fake.bootstrap, "t", start={tp: 2}) as consumer:
            assert consumer.to_table().num_rows == 0
            assert consumer.position(tp) == 2
        with (
            PartitionReader(fake.bootstrap, tp, 0, 3, timeout_s=0.8) as reader,
            pytest.raises(ClientTimeout, match="last stable offset 1"),
        ):
            list(reader)
        producer.commit()
        assert seen(fake, "t") == [b"before", b"open", b"after"]


def test_isolation_has_two_levels(fake: FakeCluster) -> None:
    fake.create("t")
    with pytest.raises(ConfigError, match="isolation='dirty'"):
        Consumer(fake.bootstrap, "t", isolation="dirty")  # type: ignore[arg-type]
