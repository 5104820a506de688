"""Tests of ``consume`` across a schema change and of empty topics, into files in every format."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from sparklog.cli.sinks import OutputFormat, open_sink
from sparklog.client.producer.producer import Producer
from sparklog.errors import ConfigError
from sparklog.model import TopicSchema
from sparklog.record.schema import schema_message
from tests.cli.in_process import Cli
from tests.cli.rows import TYPED, table_of
from tests.client.fake_cluster import FakeCluster

WIDER = pa.schema([*TYPED, pa.field("age", pa.int64()), pa.field("at", pa.timestamp("us", "UTC"))])


def widen(fake: FakeCluster, topic: str) -> None:
    fake.do(lambda: fake.topics[topic].schemas.append(TopicSchema(1, schema_message(WIDER))))


@pytest.fixture
def grown(fake: FakeCluster) -> FakeCluster:
    """Create a topic with a record of its first schema and a record of its second."""
    fake.create("t", schema=TYPED)
    with Producer(fake.bootstrap) as producer:
        producer.send("t", {"carrier": "UA", "delay": 1.0}).result(30)
    widen(fake, "t")
    with Producer(fake.bootstrap) as producer:
        producer.send("t", {"carrier": "AA", "age": 7}).result(30)
    return fake


@pytest.mark.parametrize("count", [None, 1])
def test_older_records_have_nulls_for_later_columns(
    cli: Cli, grown: FakeCluster, tmp_path: Path, count: int | None
) -> None:
    expected = table_of(grown, "t").slice(0, count or 2)
    assert expected.schema.equals(WIDER)
    limit = [] if count is None else ["-n", count]
    assert cli("consume", "t", *limit, "-t", "%{age}|%{carrier}\\n").text == ("|UA\n7|AA\n" if not count else "|UA\n")
    assert cli("consume", "t", *limit).text == "UA\t1.0\t\t\n" + ("" if count else "AA\t\t7\t\n")
    first = json.loads(cli("consume", "t", *limit, "--json").text.splitlines()[0])
    assert first == {"carrier": "UA", "delay": 1.0, "age": None, "at": None}
    for name in ("o.arrow", "o.arrows", "o.feather", "o.parquet", "o.csv", "o.jsonl"):
        done = cli("consume", "t", *limit, "-o", tmp_path / name)
        assert done.code == 0, done.err
    assert pa.ipc.open_file(tmp_path / "o.arrow").read_all().equals(expected)
    assert pa.ipc.open_file(tmp_path / "o.feather").read_all().equals(expected)
    assert pa.ipc.open_stream(tmp_path / "o.arrows").read_all().equals(expected)
    assert pa.parquet.read_table(tmp_path / "o.parquet").equals(expected)
    assert (tmp_path / "o.csv").read_text().splitlines()[:2] == ["carrier,delay,age,at", "UA,1.0,,"]
    assert json.loads((tmp_path / "o.jsonl").read_text().splitlines()[0]) == first


def test_an_empty_topic_gives_a_valid_empty_file(cli: Cli, fake: FakeCluster, tmp_path: Path) -> None:
    fake.create("t", schema=TYPED)
    fake.create("d")
    for name in ("o.arrow", "o.arrows", "o.parquet", "o.csv", "o.csv.gz", "o.json", "o.txt"):
        path = tmp_path / name
        assert cli("consume", "t", "-o", path).code == 0
        if name != "o.txt":
            assert cli("produce", "t", path).code == 0
    assert table_of(fake, "t").num_rows == 0
    assert pa.ipc.open_file(tmp_path / "o.arrow").read_all().equals(TYPED.empty_table())
    assert pa.ipc.open_stream(tmp_path / "o.arrows").read_all().equals(TYPED.empty_table())
    assert pa.parquet.read_table(tmp_path / "o.parquet").equals(TYPED.empty_table())
    assert (tmp_path / "o.csv").read_bytes() == b"carrier,delay\n"
    assert (tmp_path / "o.json").read_bytes() == b""
    assert pa.ipc.open_stream(cli("consume", "t", "-f", "arrow").out).read_all().schema.equals(TYPED)
    assert cli("consume", "t", "--places", "-f", "csv").text == "carrier,delay,_topic,_partition,_offset\n"


def test_topics_with_different_columns_are_no_table(cli: Cli, fake: FakeCluster, tmp_path: Path) -> None:
    fake.create("t", schema=TYPED)
    fake.create("u", schema=WIDER)
    fake.create("v", schema=TYPED)
    done = cli("consume", "t", "u", "-o", tmp_path / "o.arrow")
    assert done.code == 2 and "different columns" in done.err
    assert cli("consume", "t", "v", "-o", tmp_path / "o.arrow").code == 0
    assert cli("consume", "t", "u", "--json").code == 0


def test_a_table_does_not_change_its_columns(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pylist([{"age": 1}], schema=WIDER)
    for name, kind in (
        ("o.arrow", OutputFormat.ARROW),
        ("o.csv", OutputFormat.CSV),
        ("o.parquet", OutputFormat.PARQUET),
    ):
        with (
            pytest.raises(ConfigError, match=r"columns \['age', 'at'\] were added"),
            open_sink(kind, tmp_path / name, schema=TYPED, keys=False, template=None) as sink,
        ):
            sink.write(batch)


@pytest.mark.parametrize("kind", [OutputFormat.TEXT, OutputFormat.JSON, OutputFormat.CSV])
def test_a_text_file_has_each_batch_at_once(tmp_path: Path, kind: OutputFormat) -> None:
    """Another program may read the file of ``consume --follow -o FILE`` meanwhile."""
    batch = pa.RecordBatch.from_pylist([{"carrier": "UA"}], schema=TYPED)
    with open_sink(kind, tmp_path / "o", schema=TYPED, keys=False, template=None) as sink:
        sink.write(batch)
        assert b"UA" in (tmp_path / "o").read_bytes()


def test_new_columns_are_shown_while_a_command_follows(cli: Cli, fake: FakeCluster, tmp_path: Path) -> None:
    fake.create("t", schema=TYPED)
    with Producer(fake.bootstrap) as producer:
        producer.send("t", {"carrier": "UA"}).result(30)

    def asked(topic: str) -> pa.Schema:
        return schemas.pop(0)

    schemas = [TYPED, WIDER]
    from sparklog.cli.newest_columns import NewestColumns
    from sparklog.client.consumer.origin import Origin, with_origin

    newest = NewestColumns(["t"], asked, places=False)
    old = with_origin(pa.RecordBatch.from_pylist([{"carrier": "UA"}], schema=TYPED), Origin("t", 0, 0, 0))
    new = with_origin(pa.RecordBatch.from_pylist([{"age": 1}], schema=WIDER), Origin("t", 0, 1, 0))
    assert [newest.fit(batch).num_columns for batch in (old, new, old)] == [2, 4, 4]
