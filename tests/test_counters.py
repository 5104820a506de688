"""Tests that every counter of brokers and controllers has a sentence in a table, and every sentence a counter."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.broker.counters import BROKER_COUNTERS
from sparklog.controller.counters import CONTROLLER_COUNTERS

PACKAGE = Path(__file__).resolve().parent.parent / "sparklog"
#: The effects that count.
REPORTS = {"ControllerReport", "CoordinatorReport"}
NAME = re.compile(r"[a-z_]+(\.[a-z_]+)*")


def counted(*packages: str) -> Iterator[str]:
    """Yield each counted name as a pattern, with ``[a-z_]+`` for the inserted parts of an f-string.

    Names are the keys of ``counters`` and the first arguments of ``ControllerReport`` and ``CoordinatorReport``.
    """
    for path in sorted(path for package in packages for path in (PACKAGE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2].lstrip("_") == "counters":
                yield from patterns(node.slice)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in REPORTS:
                yield from patterns(node.args[0])


def patterns(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(str(name)):
            yield re.escape(name)
        case ast.IfExp():
            yield from patterns(node.body)
            yield from patterns(node.orelse)
        case ast.JoinedStr():
            yield "".join(
                re.escape(str(part.value)) if isinstance(part, ast.Constant) else "[a-z_]+" for part in node.values
            )


@pytest.mark.parametrize(
    ("table", "packages"),
    [(BROKER_COUNTERS, ("broker", "coordinator")), (CONTROLLER_COUNTERS, ("controller", "cluster"))],
    ids=["brokers", "controllers"],
)
def test_every_counter_has_a_sentence_and_every_sentence_a_counter(
    table: dict[str, str], packages: tuple[str, ...]
) -> None:
    found = set(counted(*packages))
    without = {pattern for pattern in found if not any(re.fullmatch(pattern, name) for name in table)}
    # Current values that DescribeBroker adds.
    added = {"requests.queued.bytes", "requests.queued.bytes.max", "producer.ids", "ssl.certificate.expires.s"}
    unused = {name for name in table if not any(re.fullmatch(pattern, name) for pattern in found)} - added
    assert (without, unused) == (set(), set())
    assert all(NAME.fullmatch(name) and sentence for name, sentence in table.items())
