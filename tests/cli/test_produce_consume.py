"""Tests of ``sparklog produce`` and ``consume`` against a fake cluster: formats, start positions, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from sparklog.cli import files
from sparklog.client.producer.producer import Producer
from tests.cli.in_process import Cli
from tests.cli.rows import ROWS, TYPED, table_of
from tests.client.fake_cluster import FakeCluster

# --- produce ---


def test_lines_may_have_keys(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t")
    done = cli("produce", "t", stdin=b"one\ntwo\n\nfour")
    assert done.code == 0
    assert done.out == b""
    assert done.err.startswith("4 records written to t in ")
    assert cli("produce", "t", "-", "-K", ":", stdin=b"k:v:w\nplain\n").code == 0
    rows = table_of(fake, "t").select(["key", "value"]).to_pylist()
    assert [row["value"] for row in rows] == [b"one", b"two", b"", b"four", b"v:w", b"plain"]
    assert [row["key"] for row in rows][4:] == [b"k", None]


def test_empty_lines_are_records_at_any_position(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t")
    for text in (b"\n", b"a\n\nb\n", b"\n\n", b""):
        assert cli("produce", "t", stdin=text).code == 0
    assert table_of(fake, "t")["value"].to_pylist() == [b"", b"a", b"", b"b", b"", b""]


def test_the_whole_input_is_one_record(
    cli: Cli, fake: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.create("t")
    text = b'{\n  "a": "b:c"\n}\n\xff\n'
    (tmp_path / "a.json").write_bytes(text)
    assert cli("produce", "t", "-f", "whole", "--quiet", stdin=text).code == 0
    assert cli("produce", "t", tmp_path / "a.json", "--format", "whole").err.startswith("1 records written to t")
    assert cli("produce", "t", "-f", "whole", "-K", ":", "--quiet", stdin=b"k\n:v:w\n").code == 0
    assert cli("produce", "t", "-f", "whole", "-K", "|", "--quiet", stdin=b"v\n").code == 0
    assert json.loads(cli("produce", "t", "-f", "whole", "--json").out)["records"] == 0, (
        "an empty pipe must have no record"
    )
    found = table_of(fake, "t")
    assert found.column("value").to_pylist() == [text, text, b"v:w\n", b"v\n"]
    assert found.column("key").to_pylist() == [None, None, b"k\n", None]
    monkeypatch.setattr(files, "_MOST_BYTES", 3)
    refused = cli("produce", "t", "-f", "whole", stdin=b"four")
    assert refused.code == 2
    assert refused.err == "sparklog: standard input: the input is larger than 3 bytes, the maximum for one record\n"
    fake.create("typed", schema=TYPED)
    assert cli("produce", "typed", "-f", "whole", stdin=b"x").code == 2


def test_json_lines_become_records(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t", schema=TYPED)
    fake.create("d")
    lines = b'{"carrier": "UA", "delay": 1}\n\n{"delay": 2.5}\n'
    assert cli("produce", "t", "--format", "json", stdin=lines).code == 0
    assert table_of(fake, "t").to_pylist() == [{"carrier": "UA", "delay": 1.0}, {"carrier": None, "delay": 2.5}]
    assert cli("produce", "t", "--format", "json", stdin=b"\n \n").code == 0
    assert table_of(fake, "t").num_rows == 2
    line = b'{"key": "k", "value": "v", "headers": [{"key": "h", "value": "w"}], "timestamp": "2026-01-01T00:00:00Z"}\n'
    assert cli("produce", "d", "--format", "json", stdin=line).code == 0
    (row,) = table_of(fake, "d").to_pylist()
    assert (row["key"], row["value"], row["headers"]) == (b"k", b"v", [{"key": "h", "value": b"w"}])
    assert row["timestamp"].isoformat() == "2026-01-01T00:00:00+00:00"


def test_arrow_is_read_from_a_pipe(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t", schema=TYPED)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TYPED) as writer:
        writer.write_table(ROWS)
    assert cli("produce", "t", "--format", "arrow", stdin=sink.getvalue().to_pybytes()).code == 0
    assert table_of(fake, "t").equals(ROWS)


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (["t", "--format", "json"], b"{not json}\n", "standard input"),
        (["t", "--format", "json"], b'{"speed": 1}\n', "'speed'"),
        (["t", "--format", "json"], b"null\n", "line 1: null found, expected a JSON object"),
        (["t", "--format", "json"], b"\n[1]\n", "line 2: [1] found, expected a JSON object"),
        (["t", "--format", "parquet"], b"not parquet", "standard input"),
        (["t", "--format", "arrow"], b"not arrow", "standard input: neither an Arrow file nor an Arrow stream"),
        (["t", "--format", "csv"], b"carrier,delay\nUA,late\n", "standard input"),
        (["t"], b"a line\n", "does not accept lines"),
        (["t", "--format", "json", "-K", ":"], b"", "--key-separator requires --format lines or whole"),
        (["none"], b"a line\n", "UNKNOWN_TOPIC_OR_PARTITION"),
        (["t", "missing.parquet"], b"", "missing.parquet: No such file"),
        (["t", "--format", "csv", "--acks", "2"], b"carrier\nUA\n", "acks="),
        (["t", "--format", "csv", "--partition", "9"], b"carrier\nUA\n", "partition 9"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    cli: Cli, fake: FakeCluster, arguments: list[str], stdin: bytes, expected: str
) -> None:
    fake.create("t", schema=TYPED)
    result = cli("produce", *arguments, stdin=stdin)
    assert result.code in {1, 2}
    assert expected in result.err
    assert result.err.count("\n") == 1
    assert result.err.startswith("sparklog: ")
    assert fake.records("t") == []


# --- consume ---


def produce_numbers(fake: FakeCluster, count: int = 10) -> None:
    fake.create("t")
    with Producer(fake.bootstrap) as producer:
        for index in range(count):
            producer.send("t", b"%d" % index, key=b"k%d" % index, timestamp=index * 1_000_000)


def test_consume_prints_one_line_for_each_record(cli: Cli, fake: FakeCluster) -> None:
    produce_numbers(fake)
    assert cli("consume", "t").text == "".join(f"{index}\n" for index in range(10))
    assert cli("consume", "t", "--keys", "-n", 2).text == "k0\t0\nk1\t1\n"
    assert cli("consume", "t", "--count", 0).text == ""


def test_consume_starts_at_the_given_position(cli: Cli, fake: FakeCluster) -> None:
    produce_numbers(fake)
    assert cli("consume", "t", "--from", 7).text == "7\n8\n9\n"
    assert cli("consume", "t", "--from", "latest").text == ""
    assert cli("consume", "t", "--from", "1970-01-01T00:00:08Z").text == "8\n9\n"
    assert cli("consume", "t", "--partition", 0, "--from", 9).text == "9\n"
    bad = cli("consume", "t", "--from", "yesterday")
    assert (bad.code, "yesterday" in bad.err) == (2, True)


def test_following_ends_with_the_count(cli: Cli, fake: FakeCluster) -> None:
    produce_numbers(fake)
    assert cli("consume", "t", "--follow", "-n", 10).text.count("\n") == 10


def test_json_is_printed_for_both_kinds_of_topics(cli: Cli, fake: FakeCluster) -> None:
    produce_numbers(fake, 1)
    (line,) = cli("consume", "t", "-f", "json", "--places").text.splitlines()
    assert json.loads(line) == {
        "key": "k0",
        "value": "0",
        "headers": None,
        "timestamp": "1970-01-01T00:00:00Z",
        "_topic": "t",
        "_partition": 0,
        "_offset": 0,
    }
    fake.create("typed", schema=TYPED)
    with Producer(fake.bootstrap) as producer:
        producer.write("typed", ROWS)
        producer.send("t", b"\xff\xfe")
    found = [json.loads(line) for line in cli("consume", "typed", "-f", "json").text.splitlines()]
    assert found == ROWS.to_pylist()
    assert cli("consume", "typed").text == "UA\t1.5\nAA\t\n\t-2.0\n"
    assert json.loads(cli("consume", "t", "-f", "json", "--from", 1).text)["value"] == {"base64": "//4="}


def test_arrow_is_written_to_a_file_and_a_pipe(cli: Cli, fake: FakeCluster, tmp_path: Path) -> None:
    fake.create("t", schema=TYPED)
    with Producer(fake.bootstrap) as producer:
        producer.write("t", ROWS)
    assert cli("consume", "t", "-o", tmp_path / "out.arrow").out == b""
    assert pa.ipc.open_file(tmp_path / "out.arrow").read_all().equals(ROWS)
    assert pa.ipc.open_stream(cli("consume", "t", "-f", "arrow").out).read_all().equals(ROWS)


def test_output_read_as_json_can_be_written_as_json(cli: Cli, fake: FakeCluster) -> None:
    produce_numbers(fake)
    fake.create("copy")
    lines = cli("consume", "t", "-f", "json").out
    assert cli("produce", "copy", "-f", "json", stdin=lines).code == 0
    assert table_of(fake, "copy").equals(table_of(fake, "t"))


def test_an_unknown_topic_exits_with_one_error(cli: Cli) -> None:
    result = cli("consume", "none")
    assert result.code == 1
    assert result.err.startswith("sparklog: UNKNOWN_TOPIC_OR_PARTITION")
    assert result.err.count("\n") == 1
