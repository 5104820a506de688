"""Tests of topics that are recreated from their tables on three new brokers: every row, offset and time once,
despite kills."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.errors import ClientTimeout
from sparklog.client.producer.producer import Producer
from sparklog.client.producer.restore_produce import restore_batches
from sparklog.delta.archive_reader import open_archive
from sparklog.delta.compare import RestoreDiffersError, compare
from sparklog.delta.restore import Restored, restore_topic
from sparklog.delta.restore_batches import RestoreBatches
from sparklog.errors import BrokerError, ConfigError
from sparklog.model import TopicPartition
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.topics import PATIENCE_S, leader, segment_digests, wait_equal, wait_isr
from tests.delta.tables import UTC_US, Archived, described, placed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

OWN = DEFAULT_SCHEMA.remove(3)
#: A time that does not exist in some time zones.
LOCAL = dt.datetime(2024, 3, 31, 2, 30)  # noqa: DTZ001 - a time without a zone
START_US = 1_700_000_000_000_000

TYPED = pa.schema(
    [
        pa.field("id", pa.uint64(), nullable=False),
        pa.field("name", pa.large_string()),
        pa.field("price", pa.float64()),
        pa.field("amount", pa.decimal128(12, 2)),
        pa.field("at", pa.timestamp("ms", tz="Europe/Berlin")),
        pa.field("local", pa.timestamp("us")),
        pa.field("day", pa.date32()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("place", pa.struct([pa.field("x", pa.float32()), pa.field("label", pa.string())])),
        pa.field("counts", pa.map_(pa.string(), pa.int32())),
    ]
)
#: The same columns in Delta's types.
TYPED_THERE = pa.schema(
    [
        pa.field("id", pa.decimal128(20, 0)),
        pa.field("name", pa.string()),
        *[TYPED.field(name) for name in ("price", "amount")],
        pa.field("at", UTC_US),
        *[TYPED.field(name) for name in ("local", "day", "tags", "place", "counts")],
    ]
)


@pytest.fixture(scope="module")
def running() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, settings={"log.checkpoint.interval.ms": "500"}) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: ProcessCluster) -> ProcessCluster:
    running.start_brokers()
    return running


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap) as client:
        yield client


def default_rows(count: int, *, partition: int, seed: int) -> tuple[pa.Table, list[int]]:
    """Return rows with gaps before, between and after them, and their offsets."""
    offsets = (np.flatnonzero(np.random.default_rng(seed).random(count) < 0.8) + 11).tolist()
    rows = {
        "key": [None if at % 5 == 0 else b"key-%d" % (at % 7) for at in offsets],
        "value": [None if at % 11 == 0 else b"value %d " % at * (at % 4) for at in offsets],
        "headers": [[{"key": "a", "value": b"%d" % at}, {"key": "b"}] if at % 3 == 0 else None for at in offsets],
    }  # fmt: skip
    times = [START_US + (at * 7919) % 100_000 for at in offsets]
    return placed(pa.Table.from_pydict(rows, schema=OWN), [partition] * len(offsets), offsets, times), offsets


def default_archive(to: Path, name: str, *, count: int, config: dict[str, str] | None = None) -> Archived:
    """Write the archive of a topic with four partitions. The last one had records once, and has none now."""
    kept = {"retention.ms": "-1", "segment.bytes": "50000", "max.message.bytes": "20000"} | (config or {})
    topic = described(name, DEFAULT_SCHEMA, partitions=4, key=("key",), event_time="timestamp", config=kept)
    archived = Archived(to, topic)
    parts = [default_rows(count, partition=number, seed=number)[0] for number in range(2)]
    half = {number: int(part.column("_offset")[len(part) // 2].as_py()) for number, part in enumerate(parts)}
    archived.append(pa.concat_tables([part.slice(0, len(part) // 2) for part in parts]), half)
    rest = [part.slice(len(part) // 2) for part in parts]
    bad = pa.concat_tables([part.slice(100, 3) for part in rest])
    archived.set_aside(bad, "cannot be cast")
    good = pa.concat_tables([table for part in rest for table in (part.slice(103), part.slice(0, 100))])
    archived.append(good, {0: count + 20, 1: count + 12, 2: 0, 3: 77})
    return archived


def restored(cluster: ProcessCluster, archived: Archived, **how: Any) -> Restored:
    return restore_topic(cluster.bootstrap, archived.topic.name, open_archive(archived.table), **how)


def wanted(archived: Archived) -> dict[tuple[int, int], tuple[int, dict[str, Any]]]:
    """Return every row of the table and the quarantine, read in another way than the restore reads them."""
    from deltalake import DeltaTable

    found: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
    for path in (archived.table, archived.quarantine):
        if not DeltaTable.is_deltatable(path):
            continue
        rows = DeltaTable(path).to_pyarrow_dataset()
        for row in rows.to_table().to_pylist():
            own = row["record"] if "record" in row else {name: row[name] for name in row if not name.startswith("_")}
            time = round(row["_timestamp"].timestamp() * 1_000_000)
            found[row["_partition"], row["_offset"]] = (time, own)
    return found


def held(cluster: ProcessCluster, admin: Admin, name: str) -> dict[tuple[int, int], tuple[int, dict[str, Any]]]:
    """Return every record of the topic, and the time that readers see."""
    topic = admin.describe_topic(name)
    tps = topic.topic_partitions()
    starts, ends = admin.list_offsets(tps, at="earliest"), admin.list_offsets(tps)
    found: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
    for tp in tps:
        with PartitionReader(cluster.bootstrap, tp, starts[tp], ends[tp], local="never") as reader:
            for one in reader.fetched():
                offsets = one.offsets if one.offsets is not None else range(one.first_offset, 1 << 62)
                for offset, row in zip(offsets, one.batch.to_pylist(), strict=False):
                    own = row.pop("timestamp") if "timestamp" in row else row.get(topic.event_time)
                    time = one.header.max_timestamp if own is None else round(own.timestamp() * 1_000_000)
                    found[tp.partition, int(offset)] = (time, row)
    return found


def wait_alike(cluster: ProcessCluster, name: str, number: int) -> None:
    """Wait until all replicas have the same bytes. Segments below the log start are deleted with the next
    checkpoint."""

    def alike() -> bool:
        digests = [segment_digests(cluster, broker_id, name, number) for broker_id in range(3)]
        return digests[0] == digests[1] == digests[2] != {}

    wait_until(alike, PATIENCE_S, f"the replicas of {name}-{number} to be alike")


def test_a_default_topic_is_restored(cluster: ProcessCluster, admin: Admin, tmp_path: Path) -> None:
    archived = default_archive(tmp_path, "plain", count=4000)
    done = restored(cluster, archived)
    expected = wanted(archived)
    assert held(cluster, admin, "plain") == expected
    assert (done.was_there, done.records, done.compared) == (False, len(expected), len(expected))
    tps = [TopicPartition("plain", number) for number in range(4)]
    starts, ends = admin.list_offsets(tps, at="earliest"), admin.list_offsets(tps)
    firsts = [min(offset for partition, offset in expected if partition == number) for number in (0, 1)]
    assert [starts[tp] for tp in tps] == [*firsts, 0, 77] and firsts[0] > 10
    assert [ends[tp] for tp in tps] == [4020, 4012, 0, 77]
    topic = admin.describe_topic("plain")
    assert topic.key == ("key",) and topic.event_time == "timestamp"
    assert dict(topic.config) == {**archived.topic.config, "restored.from": open_archive(archived.table).name}
    for number, end in ((0, 4020), (3, 77)):
        wait_equal(cluster, "plain", end, number)
    wait_alike(cluster, "plain", 0)
    with Producer(cluster.bootstrap) as producer:
        assert producer.send("plain", b"next", partition=0).result(60).offset == 4020

    before = held(cluster, admin, "plain")
    again = restored(cluster, archived)
    assert (again.was_there, again.records) == (True, 0)
    assert held(cluster, admin, "plain") == before


def typed_rows() -> tuple[pa.Table, pa.Table]:
    """Return good and bad rows. In the log they were a batch without event times, one with some, and one with all."""
    none = [(None, START_US + 5)] * 40
    some = [(None if at % 2 else START_US + at * 1000, START_US + 58_000) for at in range(40, 60)]
    times = [*none, *some, *((START_US + at * 1000, 0) for at in range(60, 90))]
    rows = [
        {
            "id": decimal.Decimal(2**64 - 1 - at),
            "name": None if at % 9 == 0 else f"nämé {at}",
            "price": float("nan") if at % 10 == 0 else at / 3,
            "amount": None if at % 4 == 0 else decimal.Decimal(at) / 100,
            "at": None if own is None else dt.datetime.fromtimestamp(own // 1_000_000, dt.timezone.utc)
            + dt.timedelta(microseconds=own % 1_000_000),
            "local": LOCAL + dt.timedelta(hours=at),
            "day": dt.date(1969, 12, 31) + dt.timedelta(days=at),
            "tags": [None, "a"] * (at % 3),
            "place": None if at % 5 == 0 else {"x": at / 4, "label": None},
            "counts": [("k", at), ("l", None)] if at % 2 else [],
        }
        for at, (own, _) in enumerate(times)
    ]  # fmt: skip
    shown = [stamp if own is None else own for own, stamp in times]
    offsets = list(range(90))
    whole = placed(pa.Table.from_pylist(rows, schema=TYPED_THERE), [0] * 90, offsets, shown)
    return pa.concat_tables([whole.slice(0, 45), whole.slice(47)]), whole.slice(45, 2)


@pytest.mark.extended
def test_a_typed_topic_is_restored_with_its_types(cluster: ProcessCluster, admin: Admin, tmp_path: Path) -> None:
    config = {"retention.ms": "-1", "cleanup.policy": "compact", "min.insync.replicas": "1"}
    topic = described("typed", TYPED, partitions=1, key=("id",), event_time="at", config=config)
    archived = Archived(tmp_path, topic)
    good, bad = typed_rows()
    archived.append(good, {0: 92})
    archived.set_aside(bad, "price: a reason")
    done = restored(cluster, archived, compression="zstd", replication_factor=2, config={"min.insync.replicas": "2"})
    found = admin.describe_topic("typed")
    assert found.schema == TYPED and (found.key, found.event_time) == (("id",), "at")
    assert (done.compared, found.replication_factor) == (90, 2)
    assert found.config["min.insync.replicas"] == "2"
    assert admin.list_offsets([TopicPartition("typed", 0)]) == {("typed", 0): 92}
    log, table = held(cluster, admin, "typed"), wanted(archived)
    assert repr(sorted(log)) == repr(sorted(table))
    for place, (time, row) in table.items():
        assert (place, log[place][0]) == (place, time)
        assert repr(log[place][1] | {"at": None}) == repr(row | {"id": int(row["id"]), "at": None})
        assert log[place][1]["at"] == row["at"]


@pytest.mark.extended
def test_a_restore_and_a_leader_are_killed(cluster: ProcessCluster, admin: Admin, tmp_path: Path) -> None:
    archived = default_archive(tmp_path, "killed", count=40_000)
    name = "killed"
    command = [sys.executable, "-m", "sparklog.cli.main", "topics", "restore", name, "--from", str(tmp_path), "--yes"]
    command += ["--bootstrap", cluster.bootstrap, "--json"]

    def run_until_first_partition_is_done() -> subprocess.Popen[str]:
        run = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert run.stderr is not None
        assert "killed-0: offsets " in run.stderr.readline()
        return run

    with run_until_first_partition_is_done() as first:
        first.kill()
        assert first.wait(60) == -9
    tps = [TopicPartition(name, number) for number in range(4)]
    half_way = admin.list_offsets(tps, isolation="read_uncommitted")
    assert half_way[tps[0]] == 40_020 and half_way[tps[3]] == 0
    assert admin.describe_topic(name).config["restoring"] == "true"
    with (
        Producer(cluster.bootstrap, delivery_timeout_s=1.5) as producer,
        pytest.raises(ClientTimeout, match="RESTOR"),
    ):
        producer.send(name, b"too early", partition=3).result(60)

    with run_until_first_partition_is_done() as second:
        victim = leader(cluster, name, 1)
        cluster.kill(victim)
        out, err = second.communicate(timeout=200)
        assert second.returncode == 0, err
    told = json.loads(out)
    expected = wanted(archived)
    assert told["records_compared"] == len(expected) > told["records_sent"] > 0
    cluster.start_broker(victim)
    for number in range(4):
        wait_isr(cluster, name, {0, 1, 2}, number)
        wait_equal(cluster, name, [40_020, 40_012, 0, 77][number], number)
    assert held(cluster, admin, name) == expected
    for number in range(2):
        wait_alike(cluster, name, number)
    assert restored(cluster, archived).was_there


@pytest.mark.extended
def test_obstacles_to_a_restore_are_reported(cluster: ProcessCluster, admin: Admin, tmp_path: Path) -> None:
    archived = default_archive(tmp_path, "mine", count=1000)
    with pytest.raises(ConfigError, match=r"2 partitions requested, but .* has 4"):
        restored(cluster, archived, partitions=2)
    with pytest.raises(ConfigError, match="compression gzip: expected none, lz4, zstd"):
        restored(cluster, archived, compression="gzip")
    with pytest.raises(ConfigError, match=r"restored.from cannot be set: the restore sets it"):
        restored(cluster, archived, config={"restored.from": "x"})
    assert "mine" not in admin.list_topics()

    admin.create_topic("mine", partitions=4)
    with Producer(cluster.bootstrap) as producer:
        producer.send("mine", b"other data", partition=0).result(60)
    with pytest.raises(BrokerError, match=r"TOPIC_ALREADY_EXISTS.*not created by a restore"):
        restored(cluster, archived)
    with pytest.raises(BrokerError, match=r"INVALID_CONFIG.*only a restore creates a topic with restoring=true"):
        admin.alter_topic("mine", {"restoring": "true"})
    batches = RestoreBatches(DEFAULT_SCHEMA, 0, "timestamp", 1 << 20).nothing(1, 5)
    with (
        BlockingCluster(cluster.bootstrap) as link,
        pytest.raises(BrokerError, match=r"INVALID_REQUEST.*only its leader"),
    ):
        restore_batches(link, TopicPartition("mine", 0), "", batches, timeout_s=30)
    assert admin.list_offsets([TopicPartition("mine", 0)]) == {("mine", 0): 1}
    admin.delete_topic("mine")

    restored(cluster, archived, check=False)
    other = default_archive(tmp_path / "other", "mine", count=1000)
    with pytest.raises(BrokerError, match=r"TOPIC_ALREADY_EXISTS.*was restored from"):
        restored(cluster, other)


@pytest.mark.extended
def test_a_difference_between_topic_and_table_is_found(cluster: ProcessCluster, admin: Admin, tmp_path: Path) -> None:
    archived = default_archive(tmp_path, "same", count=500, config={"restored.from": ""})
    restored(cluster, archived)
    topic = admin.describe_topic("same")
    rows, offsets = default_rows(500, partition=0, seed=0)
    with BlockingCluster(cluster.bootstrap) as link:
        assert compare(link, topic, open_archive(archived.table), 0) == len(offsets)
        for number, (column, value) in enumerate(
            [
                ("value", b"other"),
                ("_timestamp", dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)),
                ("_offset", offsets[7] - 1),
            ]
        ):
            changed = rows.to_pylist()
            changed[8 if column == "_offset" else 7][column] = value if column != "_offset" else offsets[8] + 500
            other = Archived(tmp_path / str(number), archived.topic)
            other.append(pa.Table.from_pylist(changed, schema=rows.schema), {0: 1100})
            with pytest.raises((RestoreDiffersError, ClientTimeout, BrokerError), match="same-0"):
                compare(link, topic, open_archive(other.table), 0)
