"""Tests of operators' commands against a fake cluster: filters, plans, settings, names that are almost right."""

from __future__ import annotations

import datetime as dt
import json
import time
from pathlib import Path

import pyarrow as pa
import pytest
import typer

from sparklog.cli.options import confirm, point_in_time, topic_names
from sparklog.cli.topic_output import PartitionFilter
from sparklog.client.admin.descriptions import PartitionDescription, TopicDescription
from sparklog.client.producer.producer import Producer
from sparklog.errors import ConfigError
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import AlterReassignments, Request
from tests.cli.in_process import Cli, Result
from tests.client.fake_cluster import FakeBroker, FakeCluster


@pytest.mark.extended
def test_a_misspelled_name_gets_a_suggestion(cli: Cli, fake: FakeCluster) -> None:
    fake.create("flights")
    for arguments in (("topics", "describe", "fligts"), ("consume", "flihgts"), ("config", "describe", "flight")):
        result = cli(*arguments)
        assert result.code == 1
        assert "did you mean 'flights'?" in result.err, result
        assert result.err.count("\n") == 1
    assert "did you mean" not in cli("topics", "describe", "orders").err
    assert "Did you mean 'topics'" in cli("topcs").err
    assert "did you mean 'retention.ms'" in cli("config", "alter", "flights", "retention.msec=1").err


def test_the_shell_completes_topic_names(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.create("flights")
    fake.create("orders")
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    context.params = {"bootstrap": fake.bootstrap}
    assert topic_names(context, "fl") == ["flights"]
    context.params = {}
    monkeypatch.delenv("SPARKLOG_BOOTSTRAP", raising=False)
    assert topic_names(context, "fl") == [], "no broker to ask"


# --- unhealthy partitions ---


def described(*isrs: tuple[int, ...], leader: int | None = 0, min_isr: str = "") -> TopicDescription:
    parts = tuple(PartitionDescription(number, leader, 1, (0, 1, 2), isr) for number, isr in enumerate(isrs))
    config = {"min.insync.replicas": min_isr} if min_isr else {}
    return TopicDescription("t", "id", parts, pa.schema([]), 0, (), None, config)


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        (PartitionFilter(under_replicated=True), [1, 2, 3]),
        (PartitionFilter(under_min_isr=True), [2, 3]),
        (PartitionFilter(at_min_isr=True), [1]),
        (PartitionFilter(unavailable=True), []),
    ],
)
def test_filters_select_unhealthy_partitions(health: PartitionFilter, expected: list[int]) -> None:
    topic = described((0, 1, 2), (0, 1), (0,), ())
    assert [part.partition for part in health.only(topic, "2").partitions] == expected


def test_filters_use_the_topics_own_minimum_and_its_replicas() -> None:
    own = described((0, 1), min_isr="3")
    assert len(PartitionFilter(under_min_isr=True).only(own, "1").partitions) == 1
    assert not PartitionFilter(under_min_isr=True).only(described((0, 1, 2)), "5").partitions
    assert len(PartitionFilter(unavailable=True).only(described((0,), leader=None), "1").partitions) == 1


def test_filters_of_a_healthy_cluster_select_nothing(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t")
    for option in ("--under-replicated", "--unavailable", "--under-min-isr", "--at-min-isr"):
        assert cli("topics", "list", option) == Result(0, b"", "")
        assert cli("topics", "describe", option, "--json").out == b"[]\n"
    refused = cli("topics", "list", "--unavailable", "--at-min-isr")
    assert (refused.code, "pass only one of" in refused.err) == (2, True)


# --- plans ---


def test_a_plan_is_made_read_and_applied(cli: Cli, fake: FakeCluster, tmp_path: Path) -> None:
    fake.create("t", partitions=2)
    plan = tmp_path / "plan.json"
    made = cli("partitions", "reassign", "plan", "t", "--to", "1,0", "-o", plan)
    assert (made.code, "plan for 2 partitions" in made.err) == (0, True)
    assert json.loads(plan.read_text())["partitions"] == [
        {"topic": "t", "partition": 0, "replicas": [1, 0]},
        {"topic": "t", "partition": 1, "replicas": [0, 1]},
    ]
    for verb in (("apply", str(plan)), ("cancel", "t")):
        asked = cli("partitions", "reassign", *verb)
        assert (asked.code, "pass --yes" in asked.err, fake.moves) == (2, True, {}), verb
    begun = cli("partitions", "reassign", "apply", plan, "--json", "--yes")
    assert (begun.code, len(json.loads(begun.out)["partitions"])) == (0, 2), begun
    for text, complaint in (("{}", "not a plan"), ('{"partitions": []}', "has no partitions"), ("x", "not a plan")):
        refused = cli("partitions", "reassign", "apply", "-", stdin=text.encode())
        assert (refused.code, complaint in refused.err) == (2, True)
    assert cli("partitions", "reassign", "plan", "t").code == 2
    unclean = cli("partitions", "elect", "t", "--unclean")
    assert (unclean.code, "pass --yes" in unclean.err) == (2, True)


def test_a_move_that_ends_before_its_cancel_is_no_error(cli: Cli, fake: FakeCluster) -> None:
    """The command names no partition and cancels all moves that it finds."""
    fake.create("t", partitions=2)
    fake.create("u", partitions=2)

    def first_ends(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if isinstance(request, AlterReassignments) and any(move.target is None for move in request.moves):
            fake.moves.pop(("t", 0), None)
        return False

    for broker in fake.brokers:
        fake.fault(broker.broker_id, first_ends)

    def move(*which: str) -> None:
        for one in which:
            assert cli("topics", "reassign", one, "--to", "1", "--yes").code == 0

    move("t:0", "t:1")
    taken = cli("partitions", "reassign", "cancel", "t", "--yes", "--json")
    assert (taken.code, json.loads(taken.out), fake.moves) == (0, {"cancelled": ["t-1"]}, {})
    move("t:0")
    assert cli("partitions", "reassign", "cancel", "t", "--yes").text == "0 moves cancelled\n"
    move("t:0", "u:0", "u:1")
    taken = cli("partitions", "reassign", "cancel", "u:1", "u", "t", "--yes", "--json")
    assert (taken.code, json.loads(taken.out)) == (0, {"cancelled": ["u-1", "u-0"]}), "each move must be cancelled once"
    move("u:1")
    refused = cli("partitions", "reassign", "cancel", "t:0", "u", "--yes")
    assert (refused.code, fake.moves) == (1, {})
    assert "NO_REASSIGNMENT_IN_PROGRESS: 1 of 2 moves were refused; 1 others were accepted" in refused.err


# --- settings ---


def test_settings_and_their_sources_are_shown(cli: Cli, fake: FakeCluster) -> None:
    assert cli("topics", "create", "t", "-c", "retention.ms=1000").code == 0
    given = json.loads(cli("config", "describe", "t", "--given", "--json").out)
    assert given == [
        {"name": "min.insync.replicas", "value": "1", "origin": "cluster"},
        {"name": "retention.ms", "value": "1000", "origin": "topic"},
    ]
    of_broker = {one["name"]: one for one in json.loads(cli("config", "describe", "--broker", 1, "--json").out)}
    assert of_broker["num.partitions"] == {"name": "num.partitions", "value": "1", "origin": "default"}
    assert of_broker["min.insync.replicas"]["origin"] == "cluster"
    listed = {one["name"]: one for one in json.loads(cli("config", "list", "--json").out)}
    assert listed["segment.bytes"]["allowed"] == "1024 to 2147483647"
    assert listed["log.cleaner.enable"]["allowed"] == "true or false"
    for arguments, complaint in (
        (("describe",), "pass either TOPIC or --broker"),
        (("alter", "t"), "nothing to change"),
        (("alter", "t", "num.partitions=3"), "num.partitions is a broker setting, fixed"),
        (("alter", "t", "num.partitions=0"), "expected 1 to 100000"),
    ):
        refused = cli("config", *arguments)
        assert (refused.code, complaint in refused.err) == (2, True), refused


def test_a_single_broker_is_described(cli: Cli) -> None:
    assert cli("brokers", "describe", 1).text.startswith("broker     1 (running)\n")
    assert [one["broker_id"] for one in json.loads(cli("brokers", "describe", "--json").out)] == [0, 1]
    gone = cli("brokers", "describe", 7)
    assert (gone.code, "broker 7 is not alive; live brokers: 0, 1" in gone.err) == (1, True)


# --- kcat's habits ---


def test_a_consumer_reads_by_time_and_from_the_end(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t")
    now_us = time.time_ns() // 1000
    with Producer(fake.bootstrap) as producer:
        for hours in range(5, 0, -1):
            producer.send("t", b"%d" % hours, timestamp=now_us - hours * 3_600_000_000 + 60_000_000).result(10)
    assert cli("consume", "t", "--from", "-2h").text == "2\n1\n"
    assert cli("consume", "t", "--from", "-4h", "--until", "-2h").text == "4\n3\n"
    assert cli("consume", "t", "--from", "-1").text == "1\n"
    assert cli("consume", "t", "--from", "-99", "-e", "-n", 1).text == "5\n"
    assert cli("consume", "t", "-t", "%p:%o=%s;").text == "0:0=5;0:1=4;0:2=3;0:3=2;0:4=1;"
    assert json.loads(cli("consume", "t", "-n", 1, "--json").out)["value"] == "5"
    for arguments in (("--until", "soon"), ("-t", "%x"), ("-t", "%s", "--json"), ("--json", "-f", "text")):
        assert cli("consume", "t", *arguments).code == 2, arguments


def test_written_records_are_reported_in_json(cli: Cli, fake: FakeCluster) -> None:
    fake.create("t")
    told = cli("produce", "t", "-", "-K", "\\t", "--json", stdin=b"k\tv\n")
    assert (json.loads(told.out)["records"], told.err) == (1, "")
    assert cli("consume", "t", "-t", "%k=%s").text == "k=v"


def test_points_in_time_are_parsed() -> None:
    now = dt.datetime.now(dt.timezone.utc)
    found = point_in_time("-90s")
    assert found is not None
    assert dt.timedelta(seconds=89) < now - found < dt.timedelta(seconds=90.1)
    assert point_in_time("2026-01-01T00:00Z") == dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
    assert point_in_time("2026-01-01T00:00") == dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
    assert point_in_time("-1w") is None


def test_confirmation_without_a_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    confirm("Really?", "doing it", yes=True)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(ConfigError, match="pass --yes"):
        confirm("Really?", "doing it", yes=False)


def test_status_distinguishes_broker_counts_from_ids(cli: Cli, fake: FakeCluster) -> None:
    fake.stop(1)
    lines = dict(line.split(maxsplit=1) for line in cli("cluster", "status").text.splitlines() if "answer" not in line)
    assert lines["brokers"] == "1 (0)"
    fake.start(1)
    shown = cli("cluster", "status").text
    assert f"{'brokers':<18} 2 (0, 1)\n" in shown
    assert f"{'not answering':<18} 0\n" in shown
    assert json.loads(cli("cluster", "status", "--json").out)["brokers"] == [0, 1]
