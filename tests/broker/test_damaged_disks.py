"""Tests of changed bytes on one disk with real brokers: no wrong record is served, and the replica is restored.

``tests/storage`` tests recovery from each damage. Here the cluster restores the replica. Reads come from the files, so
clients get the bytes on disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import CONSUMER, Fetch, FetchPartition, FetchReply
from sparklog.record.codec import decode_batch
from sparklog.record.header import HEADER_BYTES, unpack_headers
from sparklog.record.projection import projected_schema
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import encoded, fetch, read_all
from tests.broker.topics import (
    PATIENCE_S,
    Writer,
    create_topic,
    hosted,
    leader,
    partition,
    segment_digests,
    wait_equal,
    wait_isr,
)

pytestmark = pytest.mark.integration
ALL = {0, 1, 2}
CONFIG = {"segment.bytes": "4096"}
#: Four batches fill a segment. The active segment has space for more: a roll would seal and fsync it, and a fsynced
#: segment is not checked after a crash.
BATCHES = 42


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    settings = {"hot.batches.bytes": "0", "log.checkpoint.interval.ms": "200", "zookeeper.session.timeout.ms": "2000"}
    with ProcessCluster(3, settings=settings) as cluster:
        yield cluster


def written(cluster: ProcessCluster, topic: str) -> list[bytes]:
    """Create a topic with several sealed segments and an active one on every replica, led by broker 0. Return the
    values."""
    create_topic(cluster, topic, assignment=((0, 1, 2),), config=CONFIG)
    values: list[bytes] = []
    with Writer(cluster, topic) as writer:
        for number in range(BATCHES):
            writer.write(encoded(10, f"{number}-"))
            values += [f"{number}-{row}".encode() for row in range(10)]
    wait_equal(cluster, topic, len(values))
    wait_until(lambda: len(segments(cluster, 0, topic)) > 3, PATIENCE_S, "segments")
    return values


def segments(cluster: ProcessCluster, broker_id: int, topic: str) -> list[Path]:
    return sorted(cluster.slots[broker_id].log_dir.rglob(f"{topic}-0*/*.arrow"))


def flip(path: Path, value: bytes) -> None:
    """Flip one bit in a record with ``value``."""
    content = bytearray(path.read_bytes())
    at = content.find(value)
    assert at > 0, f"{value!r} is not in {path}"
    content[at] ^= 1
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content[at : at + 1])


def flip_in_the_active_segment(files: list[Path]) -> None:
    flip(files[-1], b"-0" if b"-0" in files[-1].read_bytes() else b"-9")


def flip_in_a_header(files: list[Path]) -> None:
    index = files[-1].with_suffix(".index")
    content = bytearray(index.read_bytes())
    content[10] ^= 1
    index.write_bytes(content)


def cut_an_index(files: list[Path]) -> None:
    index = files[1].with_suffix(".index")
    index.write_bytes(index.read_bytes()[:-40])


def remove_an_index(files: list[Path]) -> None:
    files[1].with_suffix(".index").unlink()


def remove_a_segment(files: list[Path]) -> None:
    files[1].unlink()


DAMAGES: list[Callable[[list[Path]], None]] = [
    flip_in_the_active_segment,
    flip_in_a_header,
    cut_an_index,
    remove_an_index,
    remove_a_segment,
]


def whole_again(cluster: ProcessCluster, topic: str, values: list[bytes]) -> None:
    """Check that the ISR is full, every replica serves every record, sealed files are equal, and the log continues."""
    wait_isr(cluster, topic, ALL)
    with Writer(cluster, topic) as writer:
        assert writer.write(encoded(1, "after-")) == len(values)
    wait_equal(cluster, topic, len(values) + 1)
    for broker_id in ALL:
        with cluster.connect(broker_id) as connection:
            assert read_all(connection, topic) == [*values, b"after-0"]

    def equal() -> bool:
        found = [segment_digests(cluster, broker_id, topic) for broker_id in ALL]
        return len(found[0]) > 2 and found[0] == found[1] == found[2]

    wait_until(equal, PATIENCE_S, "equal segments")


def test_a_killed_leader_finds_damage_and_refills_from_followers(cluster: ProcessCluster) -> None:
    """All kinds of damage happen in one life of the broker, each in another topic."""
    values = {damage: written(cluster, damage.__name__) for damage in DAMAGES}
    cluster.kill(0)
    for damage in DAMAGES:
        damage(segments(cluster, 0, damage.__name__))
    cluster.start_broker(0)
    found = cluster.slots[0].log_file.read_text()
    for damage in DAMAGES:
        assert f"{damage.__name__}-0" in found, "the damage was truncated, and the broker's log must report it"
        whole_again(cluster, damage.__name__, values[damage])


def test_a_leader_restarted_with_less_data_truncates_no_follower(cluster: ProcessCluster) -> None:
    """The leader had acknowledged the missing records, so the others must not be truncated to its length."""
    values = written(cluster, "less")
    for broker_id in ALL:
        cluster.kill(broker_id, retire=False)
    flip_in_the_active_segment(segments(cluster, 0, "less"))
    cluster.start_brokers()
    assert leader(cluster, "less") != 0
    whole_again(cluster, "less", values)


def test_a_running_leader_has_a_bit_flip_in_a_sealed_segment(cluster: ProcessCluster) -> None:
    values = written(cluster, "rot")
    wait_until(lambda: _sealed(segments(cluster, 0, "rot")[1]), PATIENCE_S, "a sealed segment")
    damaged = segments(cluster, 0, "rot")[1]
    flip(damaged, b"-5")
    first = int(damaged.stem)
    with cluster.connect(0) as connection:
        # Readers check every batch: they get the error, and still get the earlier batches.
        assert read_all(connection, "rot", end=first) == values[:first]
        fetched, _ = fetch(connection, "rot", first)
        assert fetched.batch_count > 0
        with pytest.raises(BrokerError) as caught:
            read_all(connection, "rot")
        assert caught.value.code == ErrorCode.CORRUPT_MESSAGE
    with cluster.connect(1) as connection:
        assert read_all(connection, "rot") == values, "another in-sync replica has the whole log"
    # A follower that has to start again accepts no damaged batch.
    cluster.kill(2)
    shutil.rmtree(segments(cluster, 2, "rot")[0].parent)
    cluster.start_broker(2)
    wait_until(lambda: _end(cluster, 2) == first, PATIENCE_S, f"broker 2 to have what is whole, up to {first}")
    assert 2 not in partition(cluster, "rot").isr
    # After the damaged file is removed, the broker fetches it again from the others.
    assert cluster.stop_broker(0) == 0
    wait_isr(cluster, "rot", {1, 2})
    damaged.unlink()
    cluster.start_broker(0)
    whole_again(cluster, "rot", values)


def test_a_running_leader_has_a_bit_flip_in_the_active_segment(cluster: ProcessCluster) -> None:
    """Readers get the error, and writes continue. After a crash the broker checks the records that were not fsynced."""
    values = written(cluster, "fresh")
    assert leader(cluster, "fresh") == 0
    damaged = segments(cluster, 0, "fresh")[-1]
    flip_in_the_active_segment([damaged])
    first = int(damaged.stem)
    with cluster.connect(0) as connection:
        assert read_all(connection, "fresh", end=first) == values[:first]
        with pytest.raises(BrokerError) as caught:
            read_all(connection, "fresh")
        assert caught.value.code == ErrorCode.CORRUPT_MESSAGE
    with cluster.connect(1) as connection:
        assert read_all(connection, "fresh") == values, "another in-sync replica has the whole log"
    with Writer(cluster, "fresh") as writer:
        assert writer.write(encoded(1, "on-")) == len(values)
    wait_equal(cluster, "fresh", len(values) + 1)
    cluster.kill(0)
    cluster.start_broker(0)
    assert _logged(cluster, 0, "fresh-0", "CRC32C"), "the damage was truncated, and the broker's log must report it"
    whole_again(cluster, "fresh", [*values, b"on-0"])


def test_a_bit_flip_after_the_verification_for_a_projection_is_found(cluster: ProcessCluster) -> None:
    """The broker does not read a verified column again: then readers find the damage, and ask the broker to verify."""
    schema = pa.schema([("n", pa.int64()), ("text", pa.string()), ("note", pa.string())])
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("wide", partitions=1, replication_factor=1, schema=schema)
    leads = leader(cluster, "wide")
    rows = 9000
    texts = [f"{row:0100}" for row in range(rows)]
    table = pa.table({"n": range(rows), "text": texts, "note": texts}, schema)
    with Producer(cluster.bootstrap) as producer:
        for at in range(0, rows, 3000):
            producer.write("wide", table.slice(at, 3000)).result(30)

    def read(*columns: str) -> pa.Table:
        with PartitionReader(
            cluster.bootstrap, TopicPartition("wide", 0), 0, rows, columns=columns, local="never"
        ) as reader:
            return pa.Table.from_batches([batch for _, batch in reader])

    def damaged() -> Any:
        return pytest.raises(BrokerError, match=r"^CORRUPT_MESSAGE: wide-0 at offset 3000: .*CRC32C")

    assert read("note").equals(table.select(["note"]))
    (file,) = segments(cluster, leads, "wide")
    flip(file, texts[4567].encode())  # in column text, which comes first
    assert read("n").equals(table.select(["n"])), "intact, and no other column was read"
    with cluster.connect(leads) as connection:
        wanted = FetchPartition("wide", 0, "", -1, 3000, 1 << 20, columns=("text",))
        reply, body = connection.request(Fetch(0, CONSUMER, -1, 0, 1, 1 << 20, 0, 0, -1, (wanted,)))
        assert isinstance(reply, FetchReply) and reply.partitions[0].code == ErrorCode.NONE
        (header,) = unpack_headers(body[: reply.partitions[0].batch_count * HEADER_BYTES])[:1]
        with pytest.raises(BrokerError, match="CRC32C"):
            decode_batch(header, body[HEADER_BYTES:][: header.length], projected_schema(schema, ["text"]))
    with damaged():
        read("text")
    with damaged():
        read("n")  # the broker knows of the damage now
    with Consumer(cluster.bootstrap, "wide", columns=["text"]) as consumer:
        found: list[str] = []
        with damaged():
            while True:
                found += [text for batch in consumer.poll(1.0) for text in batch["text"].to_pylist()]
        assert found == texts[:3000]
    flip(file, f"1{texts[4567][1:]}".encode())  # restored
    for columns in (["text"], ["n", "note"]):
        assert read(*columns).equals(table.select(columns))


@pytest.mark.extended
def test_an_index_is_truncated_under_a_running_leader(cluster: ProcessCluster) -> None:
    """The broker's disk cannot be trusted: the broker hands over its leaderships and exits. After a restart it
    copies the log."""
    values = written(cluster, "short")
    assert leader(cluster, "short") == 0
    files = segments(cluster, 0, "short")
    cut_an_index(files)
    first = int(files[1].stem)
    with cluster.connect(0) as connection:
        assert read_all(connection, "short", end=first) == values[:first]
        refused, _ = fetch(connection, "short", first)
        assert refused.code == ErrorCode.KAFKA_STORAGE_ERROR
    wait_until(lambda: not cluster.slots[0].running, PATIENCE_S, "broker 0 to end")
    assert _logged(cluster, 0, "another process truncated the file")
    wait_until(lambda: leader(cluster, "short") != 0, PATIENCE_S, "another leader")
    with cluster.connect(leader(cluster, "short")) as connection:
        assert read_all(connection, "short") == values
    cluster.start_broker(0)
    whole_again(cluster, "short", values)


def _logged(cluster: ProcessCluster, broker_id: int, *words: str) -> bool:
    lines = cluster.slots[broker_id].log_file.read_text().splitlines()
    return any(all(word in line for word in words) for line in lines)


def _sealed(path: Path) -> bool:
    return path.read_bytes().endswith(b"ARROW1")


def _end(cluster: ProcessCluster, broker_id: int) -> int:
    found = hosted(cluster, broker_id, "rot")
    return -1 if found is None else found.log_end_offset
