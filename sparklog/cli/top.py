"""``sparklog top``: a live view of brokers, the busiest partitions, ISR changes, and consumer lag."""

from __future__ import annotations

import datetime as dt
import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sparklog.cli.options import AsJson, Bootstrap, Timeout, open_admin
from sparklog.cli.output import human_bytes, on_terminal, print_json, print_line, print_table
from sparklog.cli.top_view import TopSnapshot, View, compare
from sparklog.client.admin.admin import Admin
from sparklog.client.errors import ClientTimeout
from sparklog.errors import BrokerError
from sparklog.escaping import escaped

_BROKERS = ("broker", "address", "state", "leads", "replicas", "size", "records/s", "ISR changes")
_BUSIEST = ("partition", "leader", "in sync", "records/s", "bytes/s", "end")
_GROUPS = ("group", "partitions", "lag", "most in", "records/s")
_NUMERIC = frozenset({"broker", "leads", "replicas", "size", "records/s", "bytes/s", "ISR changes", "leader", "end",
                      "partitions", "lag"})  # fmt: skip
_CHANGES_SHOWN = 8


def top(
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.1, metavar="SECONDS", help="Time between refreshes.")
    ] = 2.0,
    count: Annotated[
        int | None,
        typer.Option("--count", "-n", min=1, help="Exit after N refreshes (2 when piped: rates need two samples)."),
    ] = None,
    *,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Maximum number of partitions and groups shown.")] = 10,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 10.0,
    as_json: AsJson = False,
) -> None:
    """Watch a cluster until Ctrl-C: brokers, busiest partitions, changes of leaders and ISRs, lag of groups.

    In a pipe, only the last refresh is printed; with --json every refresh, one document per line.

    Example: sparklog top --interval 1
    """
    looks: Iterable[int] = itertools.count() if count is None else range(count)
    with open_admin(bootstrap, timeout) as admin:
        if as_json or not on_terminal():
            _print(admin, looks if count is not None or as_json else range(2), interval, rows, as_json=as_json)
        else:
            _live(admin, looks, interval, rows)


def _print(admin: Admin, looks: Iterable[int], interval_s: float, rows: int, *, as_json: bool) -> None:
    before: TopSnapshot | None = None
    view: View | None = None
    for look in looks:
        if look:
            time.sleep(interval_s)
        now = snapshot(admin)
        view = compare(before, now)
        before = now
        if as_json:
            print_json(_plain(view, rows))
    if view is not None and not as_json:
        for title, columns, cells in _tables(view, rows):
            print_table(columns, cells, title=title, numeric=tuple(_NUMERIC))
            print_line()


def _live(admin: Admin, looks: Iterable[int], interval_s: float, rows: int) -> None:
    before: TopSnapshot | None = None
    shown: RenderableType = Text("querying the brokers ...")
    changes: deque[str] = deque(maxlen=_CHANGES_SHOWN)
    with Live(shown, console=Console(), screen=True, auto_refresh=False) as live:
        for _ in looks:
            try:
                now = snapshot(admin)
                view = compare(before, now)
                before = now
                at = dt.datetime.now().strftime("%H:%M:%S")  # noqa: DTZ005 - local time, for the operator
                changes.extendleft(f"{at}  {change}" for change in view.changes)
                shown = _render(view, changes, rows)
                live.update(shown, refresh=True)
            except (BrokerError, ClientTimeout) as error:
                # The last view stays on screen, because an operator needs it while the cluster has a problem.
                live.update(Group(Text(escaped(str(error)), style="bold red"), shown), refresh=True)
            time.sleep(interval_s)


def snapshot(admin: Admin) -> TopSnapshot:
    """Ask every broker and coordinator once; return the state of the cluster.

    Raises BrokerError or ClientTimeout if a broker or coordinator cannot respond.
    """
    groups = {}
    for name in admin.list_groups():
        groups[name] = admin.group_offsets(name)
    return TopSnapshot(time.monotonic(), admin.describe_brokers(), admin.describe_topics(internal=True), groups)


def _render(view: View, changes: Iterable[str], rows: int) -> RenderableType:
    style = "bold red" if view.leaderless else "yellow" if view.under_replicated else "green"
    headline = (
        f"{len(view.brokers)} brokers, {view.under_replicated} under-replicated, {view.leaderless} without a leader"
    )
    parts: list[RenderableType] = [Text(headline, style=style)]
    for title, columns, cells in _tables(view, rows):
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for column in columns:
            table.add_column(column, justify="right" if column in _NUMERIC else "left")
        for row in cells:
            table.add_row(*(Text("-" if cell is None else escaped(str(cell))) for cell in row))
        parts += [Text(), table]
    return Group(
        *parts,
        Text(),
        Text("changes of leaders and in-sync sets", style="italic"),
        Text("\n".join(map(escaped, changes))),
    )


def _tables(view: View, rows: int) -> list[tuple[str, Sequence[str], list[tuple[Any, ...]]]]:
    brokers = [
        (*row[:5], human_bytes(row.size_bytes), _rate(row.records_per_s), row.isr_changes) for row in view.brokers
    ]
    busiest = [
        (str(row.partition), row.leader, row.in_sync, _rate(row.records_per_s), human_bytes(row.bytes_per_s),
         row.end_offset)
        for row in view.busiest[:rows]
    ]  # fmt: skip
    groups = [
        (row.group, row.partitions, row.lag, None if row.worst is None else str(row.worst), _rate(row.per_s))
        for row in view.groups[:rows]
    ]
    return [
        ("brokers", _BROKERS, brokers),
        ("busiest partitions", _BUSIEST, busiest),
        ("groups, by lag", _GROUPS, groups),
    ]


def _rate(per_s: float | None) -> str | None:
    return None if per_s is None else f"{per_s:,.0f}"


def _plain(view: View, rows: int) -> dict[str, Any]:
    def named(items: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {name: str(value) if isinstance(value, tuple) else value for name, value in row._asdict().items()}
            for row in items
        ]

    return {
        "brokers": named(view.brokers),
        "partitions": named(view.busiest[:rows]),
        "groups": named(view.groups[:rows]),
        "under_replicated": view.under_replicated,
        "without_leader": view.leaderless,
        "changes": view.changes,
    }
