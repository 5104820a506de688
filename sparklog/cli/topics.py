"""``sparklog topics``: create, list, describe, alter, delete. Replicas and leaders are in ``moves``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from sparklog.cli.files import schema_of_file
from sparklog.cli.moves import add_partitions, elect_leaders, reassign
from sparklog.cli.options import FIRST_CONTACT_S, AsJson, Bootstrap, Timeout, pairs, servers
from sparklog.cli.output import note, on_terminal, print_json, print_table
from sparklog.client.admin import Admin
from sparklog.client.ddl import parse_columns
from sparklog.client.descriptions import TopicDescription
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition

topics = typer.Typer(
    help="Create, list, describe, alter and delete topics; move their replicas and leaders.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]
Names = Annotated[list[str], typer.Argument(metavar="TOPIC...", show_default=False)]


@topics.command("create")
def create(
    name: Name,
    *,
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", help="Default: the brokers' num.partitions.")
    ] = None,
    replication_factor: Annotated[
        int | None, typer.Option("--replication-factor", "-r", help="Default: the brokers'.")
    ] = None,
    schema: Annotated[
        str | None, typer.Option(help="Columns, as 'carrier string, dep_delay double'. Default: key and value.")
    ] = None,
    schema_from: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Columns of a Parquet, Arrow or CSV file.")
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="COLUMN,...", help="Columns that decide the partition.")] = None,
    event_time: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column that times go by.")] = None,
    config: Annotated[
        list[str] | None, typer.Option("--config", "-c", metavar="NAME=VALUE", help="A topic setting; repeatable.")
    ] = None,
    if_not_exists: Annotated[bool, typer.Option("--if-not-exists", help="It is fine if the topic is there.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Create a topic.

    Example: sparklog topics create flights -p 6 --schema 'carrier string, dep_delay double' --key carrier
    """
    columns = _columns(schema, schema_from)
    with Admin(servers(bootstrap), timeout_s=timeout, first_contact_s=FIRST_CONTACT_S) as admin:
        try:
            topic = admin.create_topic(
                name,
                partitions=partitions,
                replication_factor=replication_factor,
                schema=columns,
                key=[column.strip() for column in key.split(",")] if key else None,
                event_time=event_time,
                config=pairs(config or [], what="setting"),
            )
        except BrokerError as error:
            if error.code != ErrorCode.TOPIC_ALREADY_EXISTS or not if_not_exists:
                raise
            topic = admin.describe_topic(name)
    if topic.warning:
        note(f"sparklog: {topic.warning}")
    if as_json:
        print_json(_plain(topic))
    else:
        print(f"{topic.name}: {len(topic.partitions)} partitions, replication factor {topic.replication_factor}")


@topics.command("list")
def list_topics(bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """List the topics: on a terminal with partitions, replicas and whether they are in sync, in a pipe only the names.

    Example: sparklog topics list
    """
    with Admin(servers(bootstrap), timeout_s=timeout, first_contact_s=FIRST_CONTACT_S) as admin:
        if as_json:
            print_json(admin.list_topics())
        elif on_terminal():
            found = admin.describe_topics()
            rows = [(topic.name, len(topic.partitions), topic.replication_factor, _state(topic)) for topic in found]
            print_table(("topic", "partitions", "replicas", "state"), rows, numeric=("partitions", "replicas"))
        else:
            for name in admin.list_topics():
                print(name)


@topics.command("describe")
def describe(
    names: Annotated[list[str] | None, typer.Argument(metavar="[TOPIC...]", show_default=False)] = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show partitions, leaders, in-sync replicas, columns and settings; without names of all topics.

    Example: sparklog topics describe flights
    """
    with Admin(servers(bootstrap), timeout_s=timeout, first_contact_s=FIRST_CONTACT_S) as admin:
        found = admin.describe_topics(names or None)
    if as_json:
        print_json([_plain(topic) for topic in found])
        return
    for index, topic in enumerate(found):
        if index:
            print()
        _print_topic(topic)


@topics.command("delete")
def delete(
    names: Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    if_exists: Annotated[bool, typer.Option("--if-exists", help="It is fine if a topic is not there.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
) -> None:
    """Delete topics and their records. Asks first, unless --yes.

    Example: sparklog topics delete flights --yes
    """
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"deleting {', '.join(names)} cannot be undone: give --yes")
        typer.confirm(f"Delete {', '.join(names)} with all records?", abort=True)
    with Admin(servers(bootstrap), timeout_s=timeout, first_contact_s=FIRST_CONTACT_S) as admin:
        for name in names:
            try:
                admin.delete_topic(name)
            except BrokerError as error:  # noqa: PERF203 - a few names at most
                if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION or not if_exists:
                    raise
            else:
                print(f"{name}: deleted")


@topics.command("alter")
def alter(
    name: Name,
    config: Annotated[
        list[str] | None, typer.Option("--config", "-c", metavar="NAME=VALUE", help="Set it; repeatable.")
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", "-u", metavar="NAME", help="Back to the default; repeatable.")
    ] = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
) -> None:
    """Change a topic's settings while it is in use. All are checked before any is changed.

    Example: sparklog topics alter flights -c retention.ms=3600000 --unset segment.ms
    """
    if not config and not unset:
        raise ConfigError("nothing to change: give --config NAME=VALUE or --unset NAME")
    with Admin(servers(bootstrap), timeout_s=timeout, first_contact_s=FIRST_CONTACT_S) as admin:
        topic = admin.alter_topic(name, pairs(config or [], what="setting"), unset=unset or ())
    print(f"{name}: {', '.join(f'{key}={value}' for key, value in sorted(topic.config.items())) or 'all defaults'}")


@topics.command("delete-records")
def delete_records(
    name: Name,
    before: Annotated[
        list[str], typer.Option("--before", metavar="PARTITION=OFFSET", help="PARTITION=end for all; repeatable.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
) -> None:
    """Delete the oldest records, up to an offset that stays. Asks first, unless --yes.

    Example: sparklog topics delete-records flights --before 0=1000 --before 1=end --yes
    """
    wanted = {TopicPartition(name, part): offset for part, offset in _places(before).items()}
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"deleting records of {name} cannot be undone: give --yes")
        typer.confirm(f"Delete records of {len(wanted)} partitions of {name}?", abort=True)
    with Admin(servers(bootstrap), timeout_s=timeout, first_contact_s=FIRST_CONTACT_S) as admin:
        for tp, start in admin.delete_records(wanted).items():
            print(f"{tp}: begins at {start}")


def _places(before: list[str]) -> dict[int, int | None]:
    """Raises ConfigError for what is not PARTITION=OFFSET."""
    found: dict[int, int | None] = {}
    for part, offset in pairs(before, what="place").items():
        if not part.isdigit() or not (offset.isdigit() or offset == "end"):
            raise ConfigError(f"--before {part}={offset}: expected PARTITION=OFFSET or PARTITION=end")
        found[int(part)] = None if offset == "end" else int(offset)
    return found


topics.command("add-partitions")(add_partitions)
topics.command("reassign")(reassign)
topics.command("elect-leaders")(elect_leaders)


def _columns(schema: str | None, schema_from: Path | None) -> pa.Schema | None:
    if schema is not None and schema_from is not None:
        raise ConfigError("--schema and --schema-from: give one of them")
    if schema is not None:
        return parse_columns(schema)
    return schema_of_file(schema_from) if schema_from is not None else None


def _state(topic: TopicDescription) -> str:
    leaderless = sum(part.leader is None for part in topic.partitions)
    behind = sum(part.under_replicated for part in topic.partitions)
    if leaderless:
        return f"{leaderless} without leader"
    return f"{behind} under-replicated" if behind else "in sync"


def _print_topic(topic: TopicDescription) -> None:
    print(f"topic      {topic.name} ({topic.topic_id})")
    print(f"columns    {', '.join(f'{field.name} {field.type}' for field in topic.schema)}")
    for title, values in {
        "key": ", ".join(topic.key),
        "event time": topic.event_time or "",
        "settings": ", ".join(f"{name}={value}" for name, value in sorted(topic.config.items())),
    }.items():
        if values:
            print(f"{title:<10} {values}")
    rows = [
        (part.partition, part.leader, part.leader_epoch, _ids(part.replicas), _ids(part.isr))
        for part in topic.partitions
    ]
    print_table(("partition", "leader", "epoch", "replicas", "in sync"), rows, numeric=("partition", "leader", "epoch"))


def _ids(brokers: tuple[int, ...]) -> str:
    return ",".join(map(str, brokers)) or "-"


def _plain(topic: TopicDescription) -> dict[str, Any]:
    """A topic as JSON: the schema becomes a list of columns."""
    fields = [{"name": field.name, "type": str(field.type), "nullable": field.nullable} for field in topic.schema]
    return {
        "name": topic.name,
        "topic_id": topic.topic_id,
        "replication_factor": topic.replication_factor,
        "schema_id": topic.schema_id,
        "columns": fields,
        "key": topic.key,
        "event_time": topic.event_time,
        "config": dict(topic.config),
        "partitions": [asdict(part) for part in topic.partitions],
        "warning": topic.warning,
    }
