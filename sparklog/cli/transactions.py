"""``sparklog transactions``: what is open, and ending it in place of who began it."""

from __future__ import annotations

import datetime as dt
import sys
from typing import Annotated, Any

import typer

from sparklog.cli.options import FIRST_CONTACT_S, AsJson, Bootstrap, Timeout, servers
from sparklog.cli.output import print_json, print_table
from sparklog.client.admin import Admin
from sparklog.client.descriptions import TransactionDescription
from sparklog.errors import ConfigError

transactions = typer.Typer(help="Transactions of producers and Spark sinks: list and abort.", no_args_is_help=True)


@transactions.command("list")
def list_transactions(
    every: Annotated[bool, typer.Option("--all", help="Also ids with nothing open.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """List the transactions that are open or being ended, the oldest first: readers of committed records wait for them.

    Example: sparklog transactions list
    """
    with Admin(servers(bootstrap), timeout_s=timeout, first_contact_s=FIRST_CONTACT_S) as admin:
        found = [one for one in admin.transactions() if every or one.state != "empty"]
    now = dt.datetime.now(dt.timezone.utc)
    found.sort(key=lambda one: (one.began or now, one.key))
    if as_json:
        print_json([_plain(one) for one in found])
    elif found:
        rows = [
            (
                one.key,
                one.state,
                one.version,
                one.last_version,
                _seconds(now - one.began if one.began else None),
                _seconds(one.deadline - now if one.deadline else None),
                ",".join(map(str, one.partitions)) or None,
            )
            for one in found
        ]
        columns = ("key", "state", "version", "committed", "open for", "aborted in", "partitions")
        print_table(columns, rows, numeric=("version", "committed", "open for", "aborted in"))
    else:
        print("no transaction is open")


@transactions.command("abort")
def abort(
    key: Annotated[str, typer.Argument(metavar="KEY", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
) -> None:
    """Abort an open transaction: what it has written is never seen, and who began it cannot go on. KEY is as 'list'
    shows it. Asks first, unless --yes.

    Example: sparklog transactions abort id:orders --yes
    """
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"aborting {key} cannot be undone: give --yes")
        typer.confirm(f"Abort what {key} has open?", abort=True)
    with Admin(servers(bootstrap), timeout_s=timeout, first_contact_s=FIRST_CONTACT_S) as admin:
        admin.abort_transaction(key)
    print(f"{key}: aborted")


def _seconds(span: dt.timedelta | None) -> str | None:
    return None if span is None else f"{max(span.total_seconds(), 0):.0f} s"


def _plain(one: TransactionDescription) -> dict[str, Any]:
    return {
        "key": one.key,
        "state": one.state,
        "run": one.run,
        "run_id": one.run_id,
        "version": one.version,
        "last_version": one.last_version,
        "began": one.began,
        "deadline": one.deadline,
        "producers": [
            {
                "producer_id": producer_id,
                "partitions": [{"topic": tp.topic, "partition": tp.partition} for tp in partitions],
            }
            for producer_id, partitions in one.producers.items()
        ],
    }
