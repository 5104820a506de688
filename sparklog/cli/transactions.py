"""``sparklog transactions``: list open transactions, find hanging transactions, abort transactions."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from sparklog.cli.options import AsJson, Bootstrap, Timeout, Yes, confirm, open_admin
from sparklog.cli.output import done, print_json, print_line, print_table
from sparklog.client.admin.admin import Admin
from sparklog.client.admin.descriptions import HangingTransaction, TransactionDescription
from sparklog.errors import ConfigError
from sparklog.model import TopicPartition

transactions = typer.Typer(help="Transactions of producers and Spark sinks: list and abort.", no_args_is_help=True)


@transactions.command("list")
def list_transactions(
    every: Annotated[bool, typer.Option("--all", help="Include ids without an open transaction.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """List transactions that are open or ending, oldest first. Consumers of committed records wait for them.

    Example: sparklog transactions list
    """
    with open_admin(bootstrap, timeout) as admin:
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
        print_line("no transaction is open")


@transactions.command("find-hanging")
def find_hanging(
    open_s: Annotated[
        float,
        typer.Option("--open-for", min=0, metavar="SECONDS", help="Minimum time that the transaction has been open."),
    ] = 900.0,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Find hanging transactions: open in a partition, but unknown to every coordinator. Consumers of committed records
    wait until a hanging transaction ends. Brokers abort it after transaction.hanging.after.ms; 'abort' ends it at once.

    Example: sparklog transactions find-hanging --open-for 60
    """
    with open_admin(bootstrap, timeout) as admin:
        found = admin.hanging_transactions(open_s=open_s)
    if as_json:
        print_json([_plain_hanging(one) for one in found])
    elif found:
        now = dt.datetime.now(dt.timezone.utc)
        rows = [(str(one.partition), one.producer_id, one.first_offset, _seconds(now - one.began)) for one in found]
        columns = ("partition", "producer id", "first offset", "open for")
        print_table(columns, rows, numeric=("producer id", "first offset", "open for"))
    else:
        print_line("no transaction is hanging")


@transactions.command("abort")
def abort(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", show_default=False)] = None,
    *,
    topic: Annotated[str | None, typer.Option("--topic", help="Of a hanging transaction.")] = None,
    partition: Annotated[int | None, typer.Option("--partition", help="Of a hanging transaction.")] = None,
    producer_id: Annotated[int | None, typer.Option("--producer-id", help="Of a hanging transaction.")] = None,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Abort an open transaction: its records are never visible, and its producer is fenced. Pass the KEY that 'list'
    shows. For a transaction of 'find-hanging', pass topic, partition and producer id; the command fails if the
    transaction is not hanging. Asks for confirmation unless --yes is given.

    Example: sparklog transactions abort id:orders --yes
    """
    work: Callable[[Admin], None]
    if key is not None and topic is None and partition is None and producer_id is None:
        name, work = key, partial(_abort, key=key)
    elif key is None and topic is not None and partition is not None and producer_id is not None:
        tp = TopicPartition(topic, partition)
        name, work = f"producer {producer_id} in {tp}", partial(_abort_hanging, tp=tp, producer_id=producer_id)
    else:
        raise ConfigError("pass either KEY, or --topic, --partition and --producer-id")
    confirm(f"Abort the open transaction of {name}?", f"aborting {name}", yes=yes)
    with open_admin(bootstrap, timeout) as admin:
        work(admin)
    done({"transaction": name, "aborted": True}, f"{name}: aborted", as_json=as_json)


def _abort(admin: Admin, *, key: str) -> None:
    admin.abort_transaction(key)


def _abort_hanging(admin: Admin, *, tp: TopicPartition, producer_id: int) -> None:
    admin.abort_hanging(tp, producer_id)


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


def _plain_hanging(one: HangingTransaction) -> dict[str, Any]:
    return {
        "topic": one.partition.topic,
        "partition": one.partition.partition,
        "producer_id": one.producer_id,
        "first_offset": one.first_offset,
        "began": one.began,
    }
