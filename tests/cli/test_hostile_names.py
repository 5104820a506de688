"""Tests of names, error texts and records from other users: what every command shows of them, in a pipe and on a
terminal."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from sparklog.cli.main import app
from sparklog.client.producer.producer import Producer
from sparklog.errors import ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    DescribeBroker,
    DescribeBrokerReply,
    DescribedGroup,
    ErrorReply,
    FoundHangingTransaction,
    MemberDescription,
    Metadata,
    Request,
    TopicPartitions,
)
from tests.cli.in_process import Result, in_process
from tests.client.fake_cluster import FakeBroker, FakeCluster
from tests.conftest import ROOT
from tests.tiers import marked_after

#: It sets a terminal's title, clears the screen by a one-character code, forges a row, reverses text, and is invalid
#: markup.
NAME = "x\x1b]0;owned\x07\x9b2J\nforged row\u202e[/unopened][blink]"
SHOWN = r"x\x1b]0;owned\x07\x9b2J\nforged row\u202e[/unopened][blink]"
#: Colors and other styles that rich writes.
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

#: Arguments for every command that queries a cluster. True if its output contains the name.
COMMANDS: dict[str, tuple[list[str], bool]] = {
    "acls add": (["--principal", f"User:{NAME}", "--operation", "Read", "--topic", NAME, "--timeout", "1"], False),
    "acls check": (["--principal", f"User:{NAME}", "--operation", "Read", "--topic", NAME, "--timeout", "1"], False),
    "acls list": (["--principal", f"User:{NAME}", "--timeout", "1"], False),
    "acls remove": (["--principal", f"User:{NAME}", "--topic", NAME, "--yes", "--timeout", "1"], False),
    "brokers": ([], True),
    "brokers describe": (["0"], True),
    "brokers drain": (["0", "--yes"], False),
    "brokers list": ([], True),
    "brokers restart": (["0", "--timeout", "1"], False),
    "brokers rolling-restart": (["--timeout", "1"], False),
    "cluster status": ([], False),
    "config alter": ([NAME, "retention.ms=1"], False),
    "config describe": ([NAME], False),
    "config list": (["topics"], False),
    "consume": (["t"], False),
    "groups delete": ([NAME, "--yes"], True),
    "groups describe": ([NAME], True),
    "groups list": ([], True),
    "groups members": ([NAME], True),
    "groups reset-offsets": ([NAME, "--to", "earliest", "--dry-run"], True),
    "partitions elect": ([NAME], False),
    "partitions reassign apply": (["-", "--yes"], False),
    "partitions reassign cancel": ([NAME, "--yes"], False),
    "partitions reassign plan": ([NAME, "--to", "0"], False),
    "partitions reassign progress": ([], True),
    "partitions set-aside list": ([], False),
    "partitions set-aside remove": (["0/" + NAME, "--yes"], False),
    "partitions set-aside restore": ([NAME, "--yes"], False),
    "perf consume": ([NAME, "--timeout", "1"], False),
    "perf latency": ([NAME, "--records", "1"], False),
    "perf produce": ([NAME, "--records", "1"], False),
    "produce": ([NAME], False),
    "quotas list": (["--timeout", "1"], False),
    "quotas remove": (["--user", NAME, "--timeout", "1"], False),
    "quotas set": (["--user", NAME, "request_percentage=50", "--timeout", "1"], False),
    "tokens create": (["--operation", "Read", "--topic", NAME, "--timeout", "1"], False),
    "tokens expire": ([NAME, "--yes", "--timeout", "1"], False),
    "tokens list": (["--timeout", "1"], False),
    "tokens renew": ([NAME, "--timeout", "1"], False),
    "top": (["--count", "1"], True),
    "topics add-partitions": ([NAME, "3"], False),
    "topics alter": ([NAME, "-c", "retention.ms=1"], False),
    "topics create": ([NAME], False),
    "topics delete": ([NAME, "--yes"], False),
    "topics delete-records": ([NAME, "--before", "0=end", "--yes"], False),
    "topics describe": ([NAME], True),
    "topics elect-leaders": ([NAME], False),
    "topics list": ([], True),
    "topics locate": ([NAME, "2024-05-01T12:00:00Z"], False),
    "topics reassign": (["--status"], True),
    "transactions abort": (["id:" + NAME, "--yes"], False),
    "transactions find-hanging": ([], True),
    "transactions list": ([], False),
    "users alter": ([NAME, "--password-stdin", "--timeout", "1"], False),
    "users create": ([NAME, "--password-stdin", "--timeout", "1"], False),
    "users delete": ([NAME, "--yes", "--timeout", "1"], False),
    "users list": (["--timeout", "1"], False),
}
#: Commands that read files, query ZooKeeper or start processes, and print through the same functions; and whole groups.
WITHOUT_CLUSTER = {"cluster start", "cluster stop", "controller", "topics restore", "users bootstrap"}
GROUPS_WITHOUT_CLUSTER = ("certs ", "segments ", "zookeeper ")


@pytest.fixture
def hostile(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """Yield a cluster in which every text that another user can choose is ``NAME``."""
    monkeypatch.setenv("SPARKLOG_BOOTSTRAP", fake.bootstrap)
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("TERM", "xterm")
    fake.create(NAME)
    fake.create("t")
    fake.create("__consumer_offsets")
    fake.topics[NAME].config = {"cleanup.policy": NAME}
    with Producer(fake.bootstrap) as producer:
        producer.send("t", NAME, key=NAME, headers=[(NAME, NAME.encode())]).result()
    owned = (TopicPartitions(NAME, "id1", (0,)),)
    member = MemberDescription(NAME, NAME, NAME, NAME, NAME, 3, (NAME,), NAME, owned, owned)
    described = DescribedGroup(NAME, NAME, 3, (member,))

    def fill() -> None:
        fake.groups.offsets[NAME, NAME, 0] = 0
        fake.groups.described[NAME] = described
        fake.coordinator.hanging.append(FoundHangingTransaction(NAME, 0, 4711, 0, 0, 0))
        fake.moves[NAME, 0] = (1,)

    fake.do(fill)
    for broker in fake.brokers:
        fake.fault(broker.broker_id, _describe)
    yield fake


def _describe(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
    if isinstance(request, DescribeBroker):
        connection.reply(
            DescribeBrokerReply(request.cid, broker.broker_id, 1, 4242, NAME, NAME, NAME, (), {NAME: 1}, {NAME: NAME})
        )
        return True
    return False


def check(result: Result, *, on_terminal: bool) -> str:
    out = _STYLE.sub("", result.text) if on_terminal else result.text
    for text in (out, result.err):
        assert [line for line in text.split("\n") if not line.replace("\r", "").isprintable()] == []
        assert [line for line in text.splitlines() if line.strip().startswith("forged row")] == []
    return out


def commands() -> set[str]:
    """Return all commands, as users type them."""

    def below(command: object, path: tuple[str, ...]) -> Iterator[str]:
        inner = getattr(command, "commands", None)
        if not inner or getattr(command, "invoke_without_command", False):
            yield " ".join(path)
        for name, one in (inner or {}).items():
            yield from below(one, (*path, name))

    return set(below(typer.main.get_command(app), ()))


def test_every_command_is_tried_here() -> None:
    assert {*COMMANDS, *WITHOUT_CLUSTER} == {one for one in commands() if not one.startswith(GROUPS_WITHOUT_CLUSTER)}


@pytest.mark.parametrize("on_terminal", marked_after(1, [True, False], pytest.mark.extended))
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_escapes_names_chosen_by_others(hostile: FakeCluster, command: str, on_terminal: bool) -> None:
    arguments, has_name = COMMANDS[command]
    result = in_process(*command.split(), *arguments, on_terminal=on_terminal)
    if command == "consume" and not on_terminal:
        assert result.out == NAME.encode() + b"\n", "a pipe must get records unchanged"
        return
    assert (SHOWN in check(result, on_terminal=on_terminal)) >= has_name, result


@pytest.mark.parametrize("command", COMMANDS)
def test_a_brokers_error_text_is_escaped(hostile: FakeCluster, command: str) -> None:
    def refuse(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if isinstance(request, Metadata):
            return False
        connection.reply(ErrorReply(request.cid, ErrorCode.INVALID_CONFIG, NAME))
        return True

    for broker in hostile.brokers:
        hostile.do(broker.faults.clear)
        hostile.fault(broker.broker_id, refuse)
    check(in_process(*command.split(), *COMMANDS[command][0]), on_terminal=False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), f"{SHOWN}\n"),
        (("--keys",), f"{SHOWN}\t{SHOWN}\n"),
        (("--template", r"%t:\x1b[1m%k=%s;%h\n"), f"t:\x1b[1m{SHOWN}={SHOWN};{SHOWN}={SHOWN}\n"),
    ],
)
def test_records_on_a_terminal_escape_unprintable_characters(
    hostile: FakeCluster, options: tuple[str, ...], expected: str
) -> None:
    found = in_process("consume", "t", *options, on_terminal=True)
    assert (found.code, found.text) == (0, expected)
    assert NAME in in_process("consume", "t", *options).text, "a pipe must get records unchanged"


def test_json_on_a_terminal_prints_and_means_the_same(hostile: FakeCluster) -> None:
    found = in_process("consume", "t", "--json", on_terminal=True)
    assert found.text.removesuffix("\n").isprintable()
    assert json.loads(found.text)["value"] == NAME
    groups = in_process("groups", "list", "--json", on_terminal=True)
    assert groups.text.replace("\n", "").isprintable()
    assert json.loads(groups.text)[0]["group"] == NAME


def test_commands_print_through_the_functions_that_escape() -> None:
    for module in Path(ROOT, "sparklog", "cli").glob("*.py"):
        called = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(module.read_text()))
            if isinstance(node, ast.Call) and module.name != "output.py"
        }
        assert not called & {"print", "typer.echo", "typer.secho", "sys.stdout.write", "sys.stderr.write"}, module
