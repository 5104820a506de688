"""The output of commands: tables on a terminal, aligned text in a pipe, JSON on request.

All output passes through this module, which escapes names and error messages of other users and processes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparklog.escaping import escaped, escaped_json, escaped_lines

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def on_terminal() -> bool:
    return sys.stdout.isatty()


def print_json(value: Any) -> None:
    """Print one JSON document, indented on a terminal."""
    text = msgspec.json.encode(value)
    print(escaped_json((msgspec.json.format(text, indent=2) if on_terminal() else text).decode()))


def print_line(text: str = "", *, flush: bool = False) -> None:
    """Print one line. Set ``flush`` if the command then continues for a long time, so that the line appears at once."""
    print(escaped(text), flush=flush)


def print_lines(text: str) -> None:
    """Print a text that has several lines."""
    print(escaped_lines(text), flush=True)


def print_json_line(text: str) -> None:
    """Print ``text``, which is an encoded JSON document."""
    print(escaped_json(text))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str = "", numeric: Sequence[str] = ()
) -> None:
    """Print a table. The ``numeric`` columns are right-aligned."""
    cells = [["-" if cell is None else escaped(str(cell)) for cell in row] for row in rows]
    title = escaped(title)
    if on_terminal():
        # There are no lines between columns, so that eight columns fit into 80 characters.
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.title, table.title_justify, table.title_style = Text(title) if title else None, "left", ""
        table.header_style = "bold"
        for column in columns:
            table.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))  # as Text, so that rich does not parse names as markup
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
    """Print the result of a command: ``value`` as one JSON document, or ``text`` as one line."""
    print_json(value) if as_json else print_line(text, flush=True)


def note(message: str) -> None:
    """Print a message for people on stderr, so that it is not part of piped output."""
    print(escaped(message), file=sys.stderr)


def ids(brokers: Sequence[int]) -> str:
    return ",".join(map(str, brokers)) or "-"


def human_bytes(size: float) -> str:
    amount = float(size)
    for unit in _UNITS:
        if amount < 1024 or unit == _UNITS[-1]:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")
