"""Tests of the bound on a broker's producer ids: no id in use is dropped."""

from __future__ import annotations

import time

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.producer_count import ProducerCount
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import SCHEMAS, append, batch, config, follow, marker, open_directory

LIMIT = 100
DAY_US = 86_400_000_000


def directory(disk: SimDisk) -> LogDirectory:
    return open_directory(disk=disk, settings={"producer.ids.max": str(LIMIT)})


def log_of(opened: LogDirectory, number: int) -> Log:
    return opened.create(TopicPartition("t", number), "id", schemas=SCHEMAS, config=config(segment_bytes=4096))


def count(opened: LogDirectory) -> int:
    found = opened._services.producer_count
    assert found is not None
    return found.used


def write(log: Log, producer: int, sequence: int = 0, *, now_us: int | None = None) -> OffsetRange:
    found = batch(1, producer=producer, sequence=sequence)
    return append(log, found, now_us=time.time_ns() // 1000 if now_us is None else now_us)


def fill(opened: LogDirectory, log: Log, *, now_us: int | None = None) -> None:
    for producer in range(LIMIT - count(opened)):
        write(log, 1000 + producer, now_us=now_us)


def test_new_ids_are_refused_at_the_limit_and_used_ones_accepted() -> None:
    opened = directory(SimDisk())
    one, other = log_of(opened, 0), log_of(opened, 1)
    living = write(one, 7)
    fill(opened, other)
    for log in (one, other):
        with pytest.raises(BrokerError) as caught:
            write(log, 8)
        assert caught.value.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED and caught.value.retriable
        assert str(LIMIT) in caught.value.detail and "producer.ids.max" in caught.value.detail
    with pytest.raises(BrokerError):
        append(one, batch(1, producer=8, sequence=0), batch(1, producer=9, sequence=0))
    end = one.log_end_offset
    assert write(one, 7) == living, "a retry must still be recognized"
    assert one.log_end_offset == end
    write(one, 7, 1)
    append(one, batch(1))
    assert count(opened) == LIMIT


def test_idle_producer_ids_make_room() -> None:
    opened = directory(SimDisk())
    one, other = log_of(opened, 0), log_of(opened, 1)
    now_us = time.time_ns() // 1000
    fill(opened, other, now_us=now_us - 2 * DAY_US)
    for producer in range(LIMIT):
        write(one, producer)
    assert count(opened) == LIMIT, "the ids of the other log must be dropped"
    with pytest.raises(BrokerError):
        write(one, LIMIT)


def test_the_count_equals_that_of_the_tables_after_any_change() -> None:
    disk = SimDisk()
    opened = directory(disk)
    one, other, follower = (log_of(opened, number) for number in range(3))
    for producer in range(10):
        write(one, producer)
        write(other, producer)
    append(one, batch(1, producer=50, sequence=0, transactional=True))
    follow(follower, one)
    assert count(opened) == 10 + 10 + 2 * 1 + 10
    append(one, marker(committed=(50,)))
    assert count(opened) == 31
    one.truncate(5)
    assert count(opened) == 5 + 10 + 11
    one.restart_at(100)
    assert count(opened) == 10 + 11
    opened.delete(other.tp)
    assert count(opened) == 11
    opened.write_clean_marker()
    opened.close()
    again = directory(disk)
    assert count(again) == 11, "as many as before, without the log that was deleted"


def test_a_full_directory_searches_for_idle_ids_at_intervals() -> None:
    looks: list[int] = []
    full = ProducerCount(5, lambda: looks.append(1))
    full.used = 5
    for _ in range(10):
        with pytest.raises(BrokerError):
            full.require_room()
    assert looks == [1]
