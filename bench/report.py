"""The table as text and as JSON. One file keeps rows that were measured at different times."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.measure import Line

_COLUMNS = ("work", "unit", "sparklog", "Kafka", "ratio", "goal", "met")


def text(lines: Sequence[Line]) -> str:
    """Return the table in Markdown that is readable as plain text."""
    cells = [_COLUMNS, *(_cells(line) for line in lines)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
    shown = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {shown[0]} |", f"|{rule}|", *(f"| {row} |" for row in shown[1:])])


def _cells(line: Line) -> tuple[str, ...]:
    theirs = "missing" if line.against else ""
    if line.theirs is not None:
        theirs = f"{_number(line.theirs)} ({line.against})"
    goal = "" if line.goal is None else f"{'<=' if line.lower else '>='} {line.goal:g}"
    met = {True: "yes", False: "no", None: ""}[line.met]
    ratio = "" if line.ratio is None else f"{line.ratio:.2f}x"
    return line.title, line.unit, _number(line.ours), theirs, ratio, goal, met


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.3g}"


def named(lines: Iterable[Line], scale: float) -> list[Line]:
    """Return the lines. Unless ``scale`` is 1, each title names the scale."""
    return [line if scale == 1 else line._replace(title=f"{line.title} (x {scale:g})") for line in lines]


def merged(path: Path, lines: Iterable[Line], order: Sequence[str]) -> list[Line]:
    """Return the lines in the file ``path`` together with the new ``lines``, in the order of the rows.

    The new lines replace all lines of the same row in the file.
    """
    new = list(lines)
    measured = {line.row for line in new}
    kept = [line for line in load(path) if line.row not in measured] if path.exists() else []
    return sorted([*kept, *new], key=lambda line: order.index(line.row) if line.row in order else len(order))


def load(path: Path) -> list[Line]:
    return [
        Line(**{field: found[field] for field in Line._fields if field in found})
        for found in json.loads(path.read_text())["lines"]
    ]


def save(path: Path, lines: Sequence[Line], machine: dict[str, Any]) -> None:
    found = [{**line._asdict(), "ratio": line.ratio, "met": line.met} for line in lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "lines": found}, indent=1) + "\n")
