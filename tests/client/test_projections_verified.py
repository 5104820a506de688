"""Tests of a projected batch with a wrong checksum: the client asks the broker once to verify the stored batch, and
trusts its response."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Fetch, Request
from tests.client.fake_cluster import FakeBroker, FakeCluster
from tests.client.reading import TP, drained, numbers

WIDE = pa.schema([("n", pa.int64()), ("m", pa.int64())])
#: the (offset, verified or not) of each fetch
Asked = list[tuple[int, bool]]


@pytest.fixture
def wide(fake: FakeCluster) -> FakeCluster:
    """Write a hundred records in batches of ten, the one from 50 on damaged."""
    fake.create("t", schema=WIDE)
    with Producer(fake.bootstrap) as producer:
        for at in range(0, 100, 10):
            producer.write("t", pa.table({"n": range(at, at + 10), "m": range(at, at + 10)}))
    fake.do(lambda: change(fake))
    return fake


def change(fake: FakeCluster) -> None:
    """Damage the batch, or repair it."""
    batches = fake.topics["t"].logs[0].batches
    header, body = batches[5]
    batches[5] = header, body[:-8] + bytes(byte ^ 255 for byte in body[-8:])


def one_batch(fake: FakeCluster) -> int:
    """Return the size of a batch in bytes."""
    return len(fake.topics["t"].logs[0].batches[0][1])


def noted(fake: FakeCluster, *, heals_at: int | None) -> Asked:
    """Record the requests from now on. ``heals_at``: a verification from this offset on shows that the stored batch
    is intact."""
    asked: Asked = []

    def note(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if isinstance(request, Fetch):
            (wanted,) = request.partitions
            if wanted.verify and wanted.fetch_offset == heals_at:
                change(fake)
            asked.append((wanted.fetch_offset, wanted.verify))
        return False

    fake.fault(0, note)
    return asked


def test_a_reader_continues_if_the_stored_batch_is_intact(wide: FakeCluster) -> None:
    asked = noted(wide, heals_at=50)
    with PartitionReader(wide.bootstrap, TP, 3, 97, columns=["n"]) as reader:
        assert numbers([batch for _, batch in reader]) == list(range(3, 97))
    assert [one for one in asked if one[1]] == [(50, True)]


def test_a_reader_verifies_the_whole_range_of_a_response(wide: FakeCluster) -> None:
    """A verified response covers less of the log."""
    asked = noted(wide, heals_at=50)
    with PartitionReader(wide.bootstrap, TP, 0, 100, columns=["n"], max_bytes=one_batch(wide)) as reader:
        assert numbers([batch for _, batch in reader]) == list(range(100))
    assert [one for one in asked if one[1] or not one[0]] == [(0, False), (50, True), (60, True), (70, True)]


@pytest.mark.parametrize(("start", "known"), [(0, 4), (50, 3)])
def test_a_reader_resends_the_leader_epoch_of_its_position(wide: FakeCluster, start: int, known: int) -> None:
    """The batches have leader epochs 0 to 9. The last one of the response, 9, is not the one before the damage."""
    log = wide.topics["t"].logs[0]

    def age() -> None:
        log.epoch = 9
        log.batches[:] = [
            (header._replace(leader_epoch=epoch), body) for epoch, (header, body) in enumerate(log.batches)
        ]

    wide.do(age)
    asked: list[int] = []

    def note(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if isinstance(request, Fetch) and request.partitions[0].verify:
            asked.append(request.partitions[0].last_epoch)
            change(wide)
        return False

    wide.fault(0, note)
    with PartitionReader(wide.bootstrap, TP, start, 100, columns=["n"], last_epoch=3) as reader:
        assert numbers([batch for _, batch in reader]) == list(range(start, 100))
    assert asked == [known]


def test_a_reader_raises_if_the_stored_batch_is_damaged(wide: FakeCluster) -> None:
    asked = noted(wide, heals_at=None)
    found: list[pa.RecordBatch] = []
    with (
        PartitionReader(wide.bootstrap, TP, 3, 97, columns=["n"]) as reader,
        pytest.raises(BrokerError, match="t-0 at offset 50") as caught,
    ):
        found.extend(batch for _, batch in reader)
    assert caught.value.code == ErrorCode.CORRUPT_MESSAGE
    assert numbers(found) == list(range(3, 50))
    assert [one for one in asked if one[1]] == [(50, True)]


def test_a_read_of_all_columns_asks_for_no_verification(wide: FakeCluster) -> None:
    """The broker sent the stored bytes unchanged, so it has no better ones."""
    asked = noted(wide, heals_at=50)
    with (
        PartitionReader(wide.bootstrap, TP, 0, 100) as reader,
        pytest.raises(BrokerError, match="t-0 at offset 50"),
    ):
        list(reader)
    with Consumer(wide.bootstrap, "t") as consumer, pytest.raises(BrokerError, match="t-0 at offset 50"):
        drained(consumer, 100)
    assert asked and not any(verify for _, verify in asked)


def test_a_consumer_continues_if_the_stored_batch_is_intact(wide: FakeCluster) -> None:
    asked = noted(wide, heals_at=50)
    with Consumer(wide.bootstrap, "t", columns=["n"]) as consumer:
        assert numbers(drained(consumer, 100)) == list(range(100))
    assert [one for one in asked if one[1]] == [(50, True)]


def test_a_consumer_has_the_rest_of_a_response_verified(wide: FakeCluster) -> None:
    """The verification begins at the damaged batch. Verified responses cover less of the log."""
    asked = noted(wide, heals_at=50)
    with Consumer(wide.bootstrap, "t", columns=["n"], max_bytes=one_batch(wide)) as consumer:
        assert numbers(drained(consumer, 100)) == list(range(100))
    assert [at for at, verify in asked if verify] == [50, 60, 70]
    assert [at for at, verify in asked if not verify and at < 80] == [0]


def test_only_fetches_of_the_damaged_part_ask_for_verification(wide: FakeCluster) -> None:
    asked = noted(wide, heals_at=50)
    with Consumer(wide.bootstrap, "t", columns=["n"]) as consumer:
        consumer.seek(TP, 30)
        assert numbers(drained(consumer, 70)) == list(range(30, 100))
        consumer.seek(TP, 0)
        assert numbers(drained(consumer, 100)) == list(range(100))
    assert (50, True) in asked and (0, False) in asked and not any(verify for at, verify in asked if at < 50)


def test_a_consumer_raises_if_the_stored_batch_is_damaged(wide: FakeCluster) -> None:
    asked = noted(wide, heals_at=None)
    with Consumer(wide.bootstrap, "t", columns=["n"]) as consumer:
        for _ in range(2):
            with pytest.raises(BrokerError, match="t-0 at offset 50") as caught:
                drained(consumer, 100)
            assert caught.value.code == ErrorCode.CORRUPT_MESSAGE
    assert any(verify for _, verify in asked)
