"""How results look: rich tables on a terminal, aligned text in a pipe, JSON when asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def on_terminal() -> bool:
    return sys.stdout.isatty()


def print_json(value: Any) -> None:
    """One JSON document, indented for people where they look."""
    text = msgspec.json.encode(value)
    print((msgspec.json.format(text, indent=2) if on_terminal() else text).decode())


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str = "", numeric: Sequence[str] = ()
) -> None:
    """A table; ``numeric`` columns stand to the right."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    if on_terminal():
        # Without rules between columns, so that eight of them fit into 80 characters.
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.title, table.title_justify, table.title_style, table.header_style = title or None, "left", "", "bold"
        for column in columns:
            table.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
        for row in cells:
            table.add_row(*row)
        Console().print(table)
        return
    if title:
        print(title)
    widths = [max(len(cell) for cell in column) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        aligned = (
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        )
        print("  ".join(aligned).rstrip())


def done(value: Any, text: str, *, as_json: bool) -> None:
    """What a command has done, one document or one line."""
    print_json(value) if as_json else print(text, flush=True)


def note(message: str) -> None:
    """For people, not for the pipe: on stderr."""
    print(message, file=sys.stderr)


def ids(brokers: Sequence[int]) -> str:
    return ",".join(map(str, brokers)) or "-"


def human_bytes(size: float) -> str:
    amount = float(size)
    for unit in _UNITS:
        if amount < 1024 or unit == _UNITS[-1]:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")
