"""A projected batch that fails its checksum: the broker is asked to verify what it has, once, and its word counts."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparklog.client.consumer import Consumer
from sparklog.client.producer import Producer
from sparklog.client.reader import PartitionReader
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import Fetch, Request
from tests.client.fake_cluster import FakeBroker, FakeCluster
from tests.client.reading import TP, drained, numbers

WIDE = pa.schema([("n", pa.int64()), ("m", pa.int64())])
#: (offset, whether it was to verify) of each fetch.
Asked = list[tuple[int, bool]]


@pytest.fixture
def wide(fake: FakeCluster) -> FakeCluster:
    """A hundred records in batches of ten, of which the one from 50 on is damaged."""
    fake.create("t", schema=WIDE)
    with Producer(fake.bootstrap) as producer:
        for at in range(0, 100, 10):
            producer.write("t", pa.table({"n": range(at, at + 10), "m": range(at, at + 10)}))
    fake.do(lambda: change(fake))
    return fake


def change(fake: FakeCluster) -> None:
    """Damage the batch, or the damage is gone."""
    batches = fake.topics["t"].logs[0].batches
    header, body = batches[5]
    batches[5] = header, body[:-8] + bytes(byte ^ 255 for byte in body[-8:])


def noted(fake: FakeCluster, *, heals: bool) -> Asked:
    """What is asked for from now on. ``heals``: verifying shows that what is stored is sound."""
    asked: Asked = []

    def note(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if isinstance(request, Fetch):
            (wanted,) = request.partitions
            if heals and wanted.verify:
                change(fake)
            asked.append((wanted.fetch_offset, wanted.verify))
        return False

    fake.fault(0, note)
    return asked


def test_a_reader_goes_on_when_what_is_stored_is_sound(wide: FakeCluster) -> None:
    asked = noted(wide, heals=True)
    with PartitionReader(wide.bootstrap, TP, 3, 97, columns=["n"]) as reader:
        assert numbers([batch for _, batch in reader]) == list(range(3, 97))
    assert [one for one in asked if one[1]] == [(50, True)]


def test_a_reader_is_told_when_it_is_not(wide: FakeCluster) -> None:
    asked = noted(wide, heals=False)
    found: list[pa.RecordBatch] = []
    with (
        PartitionReader(wide.bootstrap, TP, 3, 97, columns=["n"]) as reader,
        pytest.raises(BrokerError, match="t-0 at offset 50") as caught,
    ):
        found.extend(batch for _, batch in reader)
    assert caught.value.code == ErrorCode.CORRUPT_MESSAGE
    assert numbers(found) == list(range(3, 50))
    assert [one for one in asked if one[1]] == [(50, True)]


def test_who_reads_all_columns_asks_for_nothing(wide: FakeCluster) -> None:
    """What is stored was sent as it is: the broker knows no better."""
    asked = noted(wide, heals=True)
    with (
        PartitionReader(wide.bootstrap, TP, 0, 100) as reader,
        pytest.raises(BrokerError, match="t-0 at offset 50"),
    ):
        list(reader)
    with Consumer(wide.bootstrap, "t") as consumer, pytest.raises(BrokerError, match="t-0 at offset 50"):
        drained(consumer, 100)
    assert asked and not any(verify for _, verify in asked)


def test_a_consumer_goes_on_when_what_is_stored_is_sound(wide: FakeCluster) -> None:
    asked = noted(wide, heals=True)
    with Consumer(wide.bootstrap, "t", columns=["n"]) as consumer:
        assert numbers(drained(consumer, 100)) == list(range(100))
    assert sum(verify for _, verify in asked) == 1


def test_a_consumer_is_told_when_it_is_not(wide: FakeCluster) -> None:
    asked = noted(wide, heals=False)
    with Consumer(wide.bootstrap, "t", columns=["n"]) as consumer:
        for _ in range(2):
            with pytest.raises(BrokerError, match="t-0 at offset 50") as caught:
                drained(consumer, 100)
            assert caught.value.code == ErrorCode.CORRUPT_MESSAGE
    assert any(verify for _, verify in asked)
