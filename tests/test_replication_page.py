"""Tests that docs/replication.md agrees with the code.

The role diagram is drawn from the replica core's table. Every test and module that the page or docs/testing.md names
exists. ``python -m tests.test_replication_page`` draws the diagram.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from sparklog.replica.replica import TRANSITIONS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "replication.md"
TESTING_PAGE = ROOT / "docs" / "testing.md"
START, END = "<!-- roles -->", "<!-- end of roles -->"


def diagram() -> str:
    arrows = [
        f"    {row.source} --> {row.target} : {row.event}" + (f" ({row.condition})" if row.condition else "")
        for row in TRANSITIONS
    ]
    table = [
        f"| {row.source} | {row.event} | {row.condition or 'always'} | {row.target} | {row.effects} |"
        for row in TRANSITIONS
    ]
    return "\n".join(
        [
            *("```mermaid", "stateDiagram-v2", "    [*] --> offline : started", *arrows, "```", ""),
            *("| from | event | when | to | orders |", "|---|---|---|---|---|", *table),
        ]
    )


@cache
def test_names() -> dict[str, set[str]]:
    """Return the files of every test function, by its name."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, set()).add(path.relative_to(ROOT).as_posix())
    return found


test_names.__test__ = False  # type: ignore[attr-defined]


def traps() -> list[tuple[str, list[str]]]:
    section = PAGE.read_text("utf-8").split("<!-- traps -->")[1].split("<!-- end of traps -->")[0]
    rows = [line.strip("| ").split(" | ") for line in section.strip().splitlines()[2:]]
    return [(trap, re.findall(r"`(.+?)`", files)) for trap, files in rows]


def test_the_role_diagram_is_drawn_from_the_table() -> None:
    drawn = PAGE.read_text("utf-8").split(START)[1].split(END)[0]
    assert drawn.strip() == diagram(), "run python -m tests.test_replication_page"


@pytest.mark.parametrize(("page", "at_least"), [(PAGE, (50, 10)), (TESTING_PAGE, (50, 2))], ids=["protocol", "tests"])
def test_every_name_on_the_page_exists(page: Path, at_least: tuple[int, int]) -> None:
    named = set(re.findall(r"`([^`\s]+)`", page.read_text("utf-8")))
    tests = {name for name in named if re.fullmatch(r"test_\w+", name)}
    files = {name for name in named if re.fullmatch(r"(sparklog|tests)/[\w/]+\.py", name)}
    assert len(tests) > at_least[0] and len(files) >= at_least[1]
    assert tests - set(test_names()) == set()
    assert {name for name in files if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize(("trap", "files"), traps(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_trap_is_a_test_of_that_name(trap: str, files: list[str]) -> None:
    name = "test_" + re.sub(r"\W+", "_", trap.lower()).strip("_")
    assert files and set(files) <= test_names().get(name, set()), name


if __name__ == "__main__":
    before, rest = PAGE.read_text("utf-8").split(START)
    PAGE.write_text(f"{before}{START}\n{diagram()}\n{END}{rest.split(END)[1]}", "utf-8")
