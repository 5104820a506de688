"""Progress bars with the amount done, the speed and the remaining time.

The bars are shown on stderr, and only on a terminal.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from sparklog.escaping import escaped


class Bar:
    """A progress bar. Without a terminal, it shows nothing."""

    def __init__(self, progress: Progress | None, total: int | None, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total) if progress is not None else None

    @property
    def shown(self) -> bool:
        return self._progress is not None

    def show(self, count: int) -> None:
        """Show that ``count`` units of the total are done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=count)


@contextlib.contextmanager
def bar(title: str, total: int | None, *, unit: str = "records", hidden: bool = False) -> Iterator[Bar]:
    """Show a bar during a ``with`` block.

    If ``total`` is None, the total is unknown and no remaining time is shown. If ``unit`` is "", the bar shows percent.
    """
    if hidden or not sys.stderr.isatty():
        yield Bar(None, total, title)
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()]
    columns += [MofNCompleteColumn(), _Rate(unit)] if unit else [TaskProgressColumn()]
    columns += [TimeRemainingColumn()] if total is not None else [TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, total, escaped(title))


class _Rate(TextColumn):
    def __init__(self, unit: str) -> None:
        super().__init__("")
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} {self._unit}/s" if task.speed else f"- {self._unit}/s")
