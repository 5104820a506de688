"""Tests of every command against a fake cluster: its output and its exit code."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from sparklog.cli.main import app
from sparklog.cli.options import byte_count
from sparklog.cli.output import print_table
from sparklog.client.producer.producer import Producer
from sparklog.net.client_security import CLIENT_CONFIG
from sparklog.protocol.messages import DescribedGroup, FoundHangingTransaction, MemberDescription, TopicPartitions
from tests.cli.in_process import Cli, Result
from tests.cli.rows import ROWS, table_of
from tests.client.fake_cluster import FakeCluster

# --- topics ---


def test_topics_are_created_listed_described_and_deleted(cli: Cli) -> None:
    made = cli("topics", "create", "flights", "-p", 6, "--schema", "carrier string, delay double", "--key", "carrier",
               "-c", "retention.ms=1000")  # fmt: skip
    assert made == Result(0, b"flights: 6 partitions, replication factor 1\n", "")
    assert cli("topics", "create", "other").code == 0
    assert cli("topics", "list").text == "flights\nother\n"
    assert json.loads(cli("topics", "list", "--json").out) == ["flights", "other"]
    described = cli("topics", "describe", "flights").text
    assert "carrier string, delay double" in described
    assert "retention.ms=1000" in described
    lines = described.splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("partition"))
    assert lines[header].split() == ["partition", "leader", "epoch", "replicas", "in", "sync"]
    assert [line.split()[0] for line in lines[header + 1 :]] == [str(index) for index in range(6)]
    (found,) = json.loads(cli("topics", "describe", "flights", "--json").out)
    assert found["key"] == ["carrier"]
    assert found["columns"][1] == {"name": "delay", "type": "double", "nullable": True}
    assert [topic["name"] for topic in json.loads(cli("topics", "describe", "--json").out)] == ["flights", "other"]
    assert cli("topics", "delete", "flights", "other", "--yes").text == "flights: deleted\nother: deleted\n"
    assert cli("topics", "list").text == ""


def test_a_topic_can_be_created_for_a_file(cli: Cli, fake: FakeCluster, tmp_path: Path) -> None:
    categorical = ROWS.set_column(0, "carrier", ROWS.column(0).dictionary_encode())
    pa.parquet.write_table(categorical, tmp_path / "f.parquet")
    pa.feather.write_feather(ROWS, tmp_path / "f.arrow", compression="uncompressed")
    pa.csv.write_csv(ROWS, tmp_path / "f.csv")
    for index, name in enumerate(("f.parquet", "f.arrow", "f.csv")):
        assert cli("topics", "create", f"t{index}", "--schema-from", tmp_path / name, "--json").code == 0
        assert cli("produce", f"t{index}", tmp_path / name, "--quiet").code == 0
        assert table_of(fake, f"t{index}").to_pylist() == ROWS.to_pylist()


def test_topics_are_created_once(cli: Cli) -> None:
    assert cli("topics", "create", "t").code == 0
    again = cli("topics", "create", "t")
    assert (again.code, again.out) == (1, b"")
    assert again.err == "sparklog: TOPIC_ALREADY_EXISTS: t\n"
    assert cli("topics", "create", "t", "--if-not-exists").code == 0
    assert cli("topics", "delete", "none", "--yes", "--if-exists").code == 0


def test_deleting_a_topic_asks_or_needs_yes(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t")
    refused = cli("topics", "delete", "t")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert cli("topics", "list").text == "t\n"


# --- brokers ---


def test_brokers_are_listed(cli: Cli) -> None:
    text = cli("brokers").text.splitlines()
    assert text[0] == "cluster fake"
    assert text[1].split() == ["broker", "address", "rack", "state", "pid", "leads", "replicas", "size"]
    assert [line.split()[3] for line in text[2:]] == ["running", "running"]
    found = json.loads(cli("brokers", "--json").out)
    assert [broker["broker_id"] for broker in found["brokers"]] == [0, 1]


# --- transactions and groups ---


def test_transactions_are_listed_and_aborted(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t")
    assert cli("transactions", "list").text == "no transaction is open\n"
    with Producer(fake.bootstrap, transactional_id="orders") as producer:
        with producer.transaction():
            producer.send("t", b"seen")
        assert json.loads(cli("transactions", "list", "--json").text) == []
        assert "id:orders  empty" in cli("transactions", "list", "--all").text
        producer.begin()
        producer.send("t", b"never").result(5)
        listed = cli("transactions", "list")
        assert listed.text.splitlines()[1].split()[:2] == ["id:orders", "open"]
        assert listed.text.rstrip().endswith("t-0")
        (told,) = json.loads(cli("transactions", "list", "--json").text)
        assert told["producers"][0]["partitions"] == [{"topic": "t", "partition": 0}]
        assert told["version"] is None and told["deadline"] > told["began"]
        asked = cli("transactions", "abort", "id:orders")
        assert (asked.code, "pass --yes" in asked.err) == (2, True)
        assert cli("transactions", "abort", "id:orders", "--yes") == Result(0, b"id:orders: aborted\n", "")
        again = cli("transactions", "abort", "id:orders", "--yes")
        assert (again.code, "nothing is open" in again.err) == (1, True)
    assert table_of(fake, "t")["value"].to_pylist() == [b"seen"]


def test_hanging_transactions_are_found_and_ended(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    assert cli("transactions", "find-hanging").text == "no transaction is hanging\n"
    now_ms = time.time_ns() // 1_000_000
    old = FoundHangingTransaction("t", 1, 4711, 0, 12, now_ms - 7_200_000)
    fake.do(
        lambda: fake.coordinator.hanging.extend([old, FoundHangingTransaction("t", 0, 4712, 0, 3, now_ms - 60_000)])
    )
    (line,) = cli("transactions", "find-hanging").text.splitlines()[1:]
    assert line.split()[:3] == ["t-1", "4711", "12"]
    found = json.loads(cli("transactions", "find-hanging", "--open-for", 10, "--json").text)
    assert [one["producer_id"] for one in found] == [4712, 4711]
    named = ("--topic", "t", "--partition", 1, "--producer-id", 4711)
    for wrong in (("id:orders", *named), named[:4], ()):
        assert (cli("transactions", "abort", *wrong, "--yes").code, len(fake.coordinator.hanging)) == (2, 2)
    assert cli("transactions", "abort", *named).code == 2, "the command needs --yes"
    assert cli("transactions", "abort", *named, "--yes").text == "producer 4711 in t-1: aborted\n"
    again = cli("transactions", "abort", *named, "--yes")
    assert (again.code, "nothing open" in again.err) == (1, True)


def test_consume_reads_committed_records_by_default(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t")
    with Producer(fake.bootstrap, transactional_id="orders") as producer:
        with producer.transaction():
            producer.send("t", b"seen")
        producer.begin()
        producer.send("t", b"aborted").result(5)
        producer.abort()
        producer.begin()
        producer.send("t", b"open").result(5)
        assert cli("consume", "t").text == "seen\n"
        assert cli("consume", "t", "--isolation", "read_committed").text == "seen\n"
        assert cli("consume", "t", "--isolation", "read_uncommitted").text == "seen\naborted\nopen\n"
    assert cli("consume", "t", "--isolation", "none").code == 2


def test_groups_are_listed_with_their_lag(cli: Cli, fake: FakeCluster) -> None:
    fake.create("__consumer_offsets")
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap) as producer:
        for number in range(5):
            producer.send("t", b"v", partition=number % 2)
    fake.do(lambda: fake.groups.offsets.update({("g", "t", 0): 1, ("g", "t", 1): 2, ("g", "gone", 0): 7}))
    owned = (TopicPartitions("t", "id", (0,)),)
    member = MemberDescription("m1", "", "c", "::1", "", 3, ("t",), "", owned, owned)
    fake.do(lambda: fake.groups.described.update({"h": DescribedGroup("h", "stable", 3, (member,))}))
    assert [line.split() for line in cli("groups", "list").text.splitlines()[1:]] == [
        ["g", "empty", "0"], ["h", "stable", "1"],
    ]  # fmt: skip
    assert json.loads(cli("groups", "list", "--json").text)[1] == {"group": "h", "state": "stable", "members": 1}
    assert [line.split() for line in cli("groups", "describe", "g").text.splitlines()[1:]] == [
        ["gone", "0", "7", "-", "-", "-"],
        ["t", "0", "1", "3", "2", "-"],
        ["t", "1", "2", "2", "0", "-"],
    ]
    assert json.loads(cli("groups", "describe", "g", "--json").text)[1] == {
        "topic": "t", "partition": 0, "offset": 1, "end_offset": 3, "lag": 2, "member": None,
    }  # fmt: skip
    assert cli("groups", "describe", "h").text.splitlines()[1].split() == ["t", "0", "-", "3", "-", "m1"]
    unknown = cli("groups", "describe", "unknown")
    assert (unknown.code, "'unknown' has no committed offsets" in unknown.err) == (1, True)
    told = cli("groups", "members", "h").text.splitlines()
    assert told[0] == "group h: stable, epoch 3"
    assert told[2].split() == ["m1", "c", "::1", "-", "-", "3", "1", "t:0"]
    assert cli("groups", "members", "unknown").code == 1


def test_offsets_of_groups_can_be_set(cli: Cli, fake: FakeCluster, tmp_path: Path) -> None:
    fake.create("__consumer_offsets")
    fake.create("t", partitions=2)
    with Producer(fake.bootstrap) as producer:
        for second in range(10):
            producer.send("t", b"v", partition=second % 2, timestamp=second * 1_000_000).result(10)
    fake.do(lambda: fake.groups.offsets.update({("g", "t", 0): 2, ("g", "t", 1): 3, ("g", "gone", 0): 7}))

    def kept() -> dict[tuple[str, int], int]:
        return {key[1:]: offset for key, offset in fake.groups.offsets.items() if key[0] == "g" and key[1] == "t"}

    def reset(*arguments: object) -> list[int]:
        result = cli("groups", "reset-offsets", "g", *arguments, "--json")
        assert result.code == 0, result
        return [change["after"] for change in json.loads(result.text)]

    assert reset("--to", "earliest", "--dry-run") == [0, 0]
    assert kept() == {("t", 0): 2, ("t", 1): 3}, "a refused command must set nothing"
    asked = cli("groups", "reset-offsets", "g", "--to", "latest")
    assert (asked.code, "pass --yes" in asked.err) == (2, True)
    assert reset("--to", "latest", "--yes") == [5, 5]
    assert kept() == {("t", 0): 5, ("t", 1): 5}
    assert reset("--shift", -2, "--yes") == [3, 3]
    assert reset("--shift", -9, "--topic", "t:1", "--dry-run") == [0], "no offset may be above the end of the log"
    assert reset("--to", 4, "--topic", "t", "--yes") == [4, 4]
    assert reset("--to", "1970-01-01T00:00:05Z", "--dry-run") == [3, 2]
    assert reset("--to", "-1h", "--dry-run") == [5, 5]
    table = cli("groups", "reset-offsets", "g", "--to", "earliest", "--topic", "t:0", "--dry-run")
    assert table.text.splitlines()[1].split() == ["t", "0", "4", "0"]
    assert "no offset was set" in table.err
    file = tmp_path / "offsets"
    file.write_text("topic,partition,offset\nt,0,1\nt,1,2\nnone,0,3\n")
    assert reset("--from-file", file, "--yes") == [1, 2]
    file.write_bytes(cli("groups", "describe", "g", "--json").out)
    assert reset("--from-file", file, "--topic", "t:1", "--dry-run") == [2]
    for wrong in (
        (),
        ("--to", "soon"),
        ("--to", "1", "--shift", 1),
        ("--to", "1", "--topic", "t:x"),
        ("--shift", 1, "--topic", "u:0"),
    ):
        assert cli("groups", "reset-offsets", "g", *wrong, "--yes").code == 2, wrong
    file.write_text("t,0\n")
    refused = cli("groups", "reset-offsets", "g", "--from-file", file, "--yes")
    assert (refused.code, "entry 1" in refused.err) == (2, True)
    assert cli("groups", "delete", "g").code == 2
    assert cli("groups", "delete", "g", "--yes") == Result(0, b"g: deleted\n", "")
    again = cli("groups", "delete", "g", "--yes")
    assert (again.code, "GROUP_ID_NOT_FOUND" in again.err) == (1, True)


def test_a_wrong_address_fails_soon(cli: Cli) -> None:
    started = time.monotonic()
    result = cli("brokers", "-b", "127.0.0.1:1")
    assert result.code == 3
    assert result.err.startswith("sparklog: no broker can be reached: 127.0.0.1:1: ")
    assert result.err.count("\n") == 1
    assert time.monotonic() - started < 8


# --- replicas ---


def test_partitions_are_added(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t", partitions=2)
    assert cli("topics", "add-partitions", "t", 5).text == "t: 5 partitions\n"
    refused = cli("topics", "add-partitions", "t", 5)
    assert (refused.code, refused.err) == (1, "sparklog: INVALID_PARTITIONS: it has 5\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["reassign", "t"], "pass exactly one of --to, --replication-factor, --cancel, --status"),
        (["reassign", "t", "--to", "1", "--cancel"], "pass exactly one of"),
        (["reassign", "--to", "1"], "no topic given"),
        (["reassign", "t:x", "--to", "1"], "expected TOPIC or TOPIC:PARTITION, found 't:x'"),
        (["reassign", "t:0", "--to", "1,two"], "--to '1,two': expected broker ids such as 1,2,3"),
        (["reassign", "t:0", "--to", "1", "--throttle", "fast"], "--throttle 'fast': expected a number of bytes"),
        (["reassign", "t:0", "--to", "1", "--throttle", "0"], "--throttle '0'"),
        (["elect-leaders", "--unclean"], "--unclean may lose records: name the topics"),
        (["add-partitions", "t", "many"], "'TOTAL'"),
    ],
)
def test_an_invalid_move_is_one_line(cli: Cli, arguments: list[str], expected: str) -> None:
    result = cli("topics", *arguments)
    assert result.code == 2
    assert expected in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("1500", 1500), ("50MB", 50_000_000), ("50 MiB/s", 50 << 20), ("1.5k", 1500), ("2gb", 2 * 10**9)],
)
def test_byte_counts_have_units(text: str, count: int) -> None:
    assert byte_count(text, what="--throttle") == count


# --- the command itself ---


def test_usage_errors_are_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["topics", "lst"], ["produce"], ["topics", "create", "t", "-p", "many"], ["nothing"]):
        result = cli(*arguments)
        assert result.code == 2
        assert result.err.startswith("sparklog: ")
        assert result.err.count("\n") == 1
        assert "--help" in result.err
    assert "Did you mean 'list'" in cli("topics", "lst").err
    monkeypatch.delenv("SPARKLOG_BOOTSTRAP")
    assert cli("topics", "list").err == (
        "sparklog: no brokers given: pass --bootstrap host:port or set SPARKLOG_BOOTSTRAP\n"
    )
    assert "found; expected host:port" in cli("topics", "list", "-b", "a:b:c").err


def test_both_environment_variables_name_the_brokers(
    cli: Cli, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.create("t")
    monkeypatch.delenv("SPARKLOG_BOOTSTRAP")
    monkeypatch.setenv("SPARKLOG_BOOTSTRAP_SERVERS", fake.bootstrap)
    assert cli("topics", "list").text == "t\n"


def test_an_unreachable_broker_exits_with_3(cli: Cli) -> None:
    result = cli("topics", "list", "-b", "127.0.0.1:1", "--timeout", "0.3")
    assert result.code == 3
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("command", ["produce", "consume"])
def test_a_wrong_address_is_reported_before_the_timeout(
    command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparklog.cli.options.FIRST_CONTACT_S", 0.2)
    result = cli(command, "t", "-b", "127.0.0.1:1")
    assert (result.code, "tried for 0.2 s" in result.err) == (3, True)


def test_version_and_help_are_printed(cli: Cli) -> None:
    assert cli("--version").text.startswith("sparklog ")
    for arguments in ([], ["topics"], ["topics", "create"], ["produce"], ["consume"], ["brokers"]):
        result = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0
        assert "Usage" in result.output
    for command in (
        ["topics", "create"],
        ["topics", "delete"],
        ["topics", "add-partitions"],
        ["topics", "reassign"],
        ["topics", "elect-leaders"],
        ["produce"],
        ["consume"],
        ["brokers"],
        ["brokers", "drain"],
        ["brokers", "restart"],
        ["brokers", "rolling-restart"],
        ["controller"],
    ):
        output = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"}).output
        assert "Example: sparklog" in output


def test_a_terminal_gets_tables(cli: Cli, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.create("t", partitions=2)
    monkeypatch.setattr("sparklog.cli.output.on_terminal", lambda: True)
    monkeypatch.setattr("sparklog.cli.topics.on_terminal", lambda: True)
    text = cli("topics", "list").text
    assert "───" in text
    assert "in sync" in text
    assert json.loads(cli("topics", "list", "--json").out) == ["t"]


def test_brokers_fit_a_terminal_of_80_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparklog.cli.output.on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    columns = ("broker", "address", "rack", "state", "pid", "leads", "replicas", "size")
    row = (0, "192.168.100.200:19392", "r1", "running", 419_430, 5, 14, "123.4 MiB")
    print_table(columns, [row], title="cluster " + 32 * "c", numeric=("broker", "pid"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == [*map(str, row[:-1]), "123.4", "MiB"]


# --- the settings of clients ---


def test_client_settings_may_come_before_or_after_the_command(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CLIENT_CONFIG, raising=False)
    plain, tls = tmp_path / "plain.conf", tmp_path / "tls.conf"
    plain.write_text("security.protocol = PLAINTEXT\n", "utf-8")
    tls.write_text(f"security.protocol = SSL\nssl.ca.location = {tmp_path}/missing.pem\n", "utf-8")
    assert cli("--client-config", plain, "topics", "list").code == 0
    assert cli("topics", "list", f"--client-config={plain}").code == 0
    for arguments in (("--client-config", tls, "topics", "list"), ("topics", "list", "--client-config", tls)):
        refused = cli(*arguments)
        assert refused.code == 2 and "missing.pem: No such file" in refused.err
    assert CLIENT_CONFIG not in os.environ
    monkeypatch.setenv(CLIENT_CONFIG, str(tls))
    assert cli("topics", "list").code == 2
    assert cli("topics", "list", "--client-config", plain).code == 0
    assert os.environ[CLIENT_CONFIG] == str(tls)
