"""The events and the comparisons of the demonstration, which are printed with their times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class StoryCheck:
    """One comparison of a property of the source rows with the same property of the rows that were read."""

    what: str
    expected: str
    found: str
    equal: bool


@dataclass(slots=True)
class Story:
    """The events of the demonstration in the order of time, and its comparisons.

    The demonstration's main thread uses it. The fault thread also calls ``tell``, which needs no lock because it only
    appends.
    """

    console: Console
    started: float = field(default_factory=time.monotonic)
    events: list[tuple[float, str, str]] = field(default_factory=list)
    checks: list[StoryCheck] = field(default_factory=list)

    def tell(self, what: str, detail: str = "") -> None:
        """Store an event and print it at once."""
        seconds = time.monotonic() - self.started
        self.events.append((seconds, what, detail))
        self.console.print(f"{seconds:6.1f} s  {what}{': ' if detail else ''}{detail}", highlight=False, markup=False)

    def check(self, what: str, *, expected: object, found: object) -> None:
        self.checks.append(StoryCheck(what, _shown(expected), _shown(found), expected == found))

    @property
    def all_equal(self) -> bool:
        return bool(self.checks) and all(check.equal for check in self.checks)

    def print_tables(self) -> None:
        happened = Table("seconds", "event", "", title="What happened", title_justify="left")
        for seconds, what, detail in self.events:
            happened.add_row(f"{seconds:.1f}", what, detail)
        compared = Table("compared", "source", "read back", "", title="What came out", title_justify="left")
        for check in self.checks:
            compared.add_row(check.what, check.expected, check.found, "equal" if check.equal else "[red]DIFFERENT")
        self.console.print(happened)
        self.console.print(compared)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
