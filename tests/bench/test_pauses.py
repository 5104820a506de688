"""Tests that one system is paused while the other is measured, and in which rows."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

import pytest

from bench.measure import Row
from bench.sides import Bench
from sparklog.errors import ClusterError
from tests.conftest import ROOT


class Paused:
    """A stand-in for a system."""

    def __init__(self) -> None:
        self.stands_still = False
        self.becomes_whole = True

    def pause(self) -> None:
        self.stands_still = True

    def resume(self) -> None:
        self.stands_still = False
        if not self.becomes_whole:
            raise ClusterError("waited in vain")


def test_a_side_that_is_slow_to_resume_is_paused_again() -> None:
    one, other = Paused(), Paused()
    with Bench(quick=True, with_kafka=False) as bench:
        bench.started += [one, other]  # type: ignore[list-item]

        def give_to(side: Paused | None) -> tuple[bool, bool]:
            bench.give_machine_to(side)  # type: ignore[arg-type]
            return one.stands_still, other.stands_still

        assert give_to(one) == (False, True)
        other.becomes_whole = False
        with pytest.raises(ClusterError, match="in vain"):
            give_to(None)
        assert give_to(one) == (False, True)
        for _ in range(2):
            with pytest.raises(ClusterError, match="in vain"):
                give_to(other)
        other.becomes_whole = True
        assert give_to(other) == (True, False)
        assert give_to(other) == (True, False)
        assert give_to(None) == (False, False)


def test_the_page_names_the_rows_without_a_paused_system() -> None:
    named = re.search(r"\(Not in ([^)]*)\.\)", (ROOT / "docs" / "performance.md").read_text())
    assert named is not None
    assert sorted(row.name for row in _pausing_nobody()) == sorted(re.findall(r"`([^`]+)`", named.group(1)))


def _pausing_nobody() -> Iterator[Row]:
    """Return the rows of modules with a contestant without a side. The test reads their source, because opening them
    takes both systems."""
    for path in sorted((ROOT / "bench" / "rows").glob("[!_]*.py")):
        module = importlib.import_module(f"bench.rows.{path.stem}")
        if any(map(_is_without_side, ast.walk(ast.parse(path.read_text())))):
            yield from module.ROWS


def _is_without_side(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Contestant"):
        return False
    return len(node.args) + len(node.keywords) < 3
