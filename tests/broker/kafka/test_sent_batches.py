"""Tests of the cache of producers' batches: what matches, its limit, and changes of role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sparklog.broker.kafka.sent_batches import SentBatches
from sparklog.kafka.records.batch_view import BatchView, read_batches
from sparklog.model import TopicPartition
from tests.broker.kafka.test_fetched_records import fetch, stored

_VIEW = read_batches(memoryview(b"".join(fetch([stored(0, 3)]).buffers)))[0]


def partition(number: int = 0, *, topic_id: str = "id", stamped: bool = False) -> Any:
    """Return the part of a partition that the cache uses."""
    rules = SimpleNamespace(stamped_by_log=stamped)
    return SimpleNamespace(topic_id=topic_id, tp=TopicPartition("t", number), rules=rules)


def header(base_offset: int, body_crc: int) -> Any:
    return stored(base_offset, 3)[0]._replace(body_crc=body_crc)


def with_codec(codec: int) -> BatchView:
    return _VIEW._replace(attributes=codec)


def test_a_batch_is_found_by_its_place_and_checksum() -> None:
    sent = SentBatches(10_000)
    sent.add(partition(), 77, 10, _VIEW)
    assert sent.get(partition(), header(10, 77), zstd=True) == _VIEW.data
    for place, asked in (
        (partition(), header(11, 77)),
        (partition(), header(10, 78)),
        (partition(1), header(10, 77)),
        (partition(topic_id="of a recreated topic"), header(10, 77)),
        (partition(stamped=True), header(10, 77)),
    ):
        assert sent.get(place, asked, zstd=True) is None


def test_an_old_consumer_gets_no_zstd() -> None:
    sent = SentBatches(10_000)
    for codec in range(5):
        sent.add(partition(), 77, codec, with_codec(codec))
    for codec in range(5):
        assert (sent.get(partition(), header(codec, 77), zstd=False) is None) == (codec == 4)
        assert sent.get(partition(), header(codec, 77), zstd=True) is not None


def test_the_oldest_batches_leave_at_the_limit() -> None:
    sent = SentBatches(2000)
    for offset in range(20):
        sent.add(partition(offset % 2), 77, offset, _VIEW)
        assert sent.size_bytes <= 2000
    kept = [offset for offset in range(20) if sent.get(partition(offset % 2), header(offset, 77), zstd=True)]
    assert kept == list(range(kept[0], 20))
    assert 0 < len(kept) < 20
    none = SentBatches(0)
    none.add(partition(), 77, 0, _VIEW)
    assert none.get(partition(), header(0, 77), zstd=True) is None


def test_a_batch_does_not_keep_the_memory_of_its_request() -> None:
    sent = SentBatches(10_000_000)
    for offset, size in enumerate((1000, 64 * 1024, 1 << 20)):
        request = memoryview(bytes(4 << 20))
        sent.add(partition(), 77, offset, _VIEW._replace(data=request[100 : 100 + size]))
        found = sent.get(partition(), header(offset, 77), zstd=True)
        assert found is not None
        assert len(found) == len(memoryview(found.obj)) == size


def test_a_batch_that_is_almost_its_whole_request_is_not_copied() -> None:
    sent = SentBatches(10_000_000)
    request = memoryview(bytes(1 << 20))
    sent.add(partition(), 77, 0, _VIEW._replace(data=request[200:]))
    found = sent.get(partition(), header(0, 77), zstd=True)
    assert found is not None and found.obj is request.obj
    assert sent.size_bytes >= len(request)
    sent.drop(partition())
    assert sent.size_bytes == 0


def test_a_batch_above_the_limit_leaves_the_others() -> None:
    sent = SentBatches(10_000)
    sent.add(partition(), 77, 0, _VIEW)
    before = sent.size_bytes
    sent.add(partition(), 77, 3, _VIEW._replace(data=memoryview(bytes(10_000))))
    assert sent.get(partition(), header(3, 77), zstd=True) is None
    assert sent.get(partition(), header(0, 77), zstd=True) == _VIEW.data
    assert sent.size_bytes == before


def test_a_new_batch_replaces_the_one_at_its_offset() -> None:
    sent = SentBatches(10_000)
    sent.add(partition(), 77, 0, _VIEW)
    before = sent.size_bytes
    sent.add(partition(), 78, 0, _VIEW)
    assert sent.size_bytes == before
    assert sent.get(partition(), header(0, 77), zstd=True) is None


def test_a_change_of_role_drops_the_partitions_batches() -> None:
    sent = SentBatches(100_000)
    for offset in range(5):
        sent.add(partition(0), 77, offset, _VIEW)
        sent.add(partition(1), 77, offset, _VIEW)
    sent.drop(partition(0))
    assert sent.get(partition(0), header(4, 77), zstd=True) is None
    assert sent.get(partition(1), header(4, 77), zstd=True) is not None
    sent.drop(partition(1))
    assert sent.size_bytes == 0
