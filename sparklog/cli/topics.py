"""``sparklog topics``: create, list, describe, alter and delete topics.

``moves`` has the commands for replicas and leaders, and ``topic_archives`` the commands for archives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from sparklog.cli.config import Unset, alter_topic
from sparklog.cli.files import schema_of_file
from sparklog.cli.moves import add_partitions, elect_leaders, reassign
from sparklog.cli.options import (
    AsJson,
    Bootstrap,
    Timeout,
    Topic,
    Topics,
    Yes,
    confirm,
    open_admin,
    pairs,
    topic_names,
)
from sparklog.cli.output import done, note, on_terminal, print_json, print_line, print_table
from sparklog.cli.topic_archives import locate, restore
from sparklog.cli.topic_output import (
    AtMinIsr,
    PartitionFilter,
    Unavailable,
    UnderMinIsr,
    UnderReplicated,
    plain_topic,
    print_topic,
    state,
)
from sparklog.client.admin.ddl import parse_columns
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition

topics = typer.Typer(
    help="Create, list, describe, alter and delete topics; move their replicas and leaders.", no_args_is_help=True
)

NewTopicName = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]  # the topic does not exist yet


@topics.command("create")
def create(
    name: NewTopicName,
    *,
    partitions: Annotated[
        int | None,
        typer.Option("--partitions", "-p", help="Number of partitions. Default: num.partitions of the brokers."),
    ] = None,
    replication_factor: Annotated[
        int | None,
        typer.Option("--replication-factor", "-r", help="Default: default.replication.factor of the brokers."),
    ] = None,
    schema: Annotated[
        str | None, typer.Option(help="Columns, such as 'carrier string, dep_delay double'. Default: key and value.")
    ] = None,
    schema_from: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the columns of a Parquet, Arrow or CSV file.")
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="COLUMN,...", help="Columns that determine the partition.")] = None,
    event_time: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column that holds the record's time.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option("--config", "-c", metavar="NAME=VALUE", help="Topic setting; repeatable.")
    ] = None,
    if_not_exists: Annotated[bool, typer.Option("--if-not-exists", help="Do nothing if the topic exists.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Create a topic.

    Example: sparklog topics create flights -p 6 --schema 'carrier string, dep_delay double' --key carrier
    """
    columns = _columns(schema, schema_from)
    with open_admin(bootstrap, timeout) as admin:
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
        print_json(plain_topic(topic))
    else:
        print_line(f"{topic.name}: {len(topic.partitions)} partitions, replication factor {topic.replication_factor}")


@topics.command("list")
def list_topics(
    *,
    under_replicated: UnderReplicated = False,
    unavailable: Unavailable = False,
    under_min_isr: UnderMinIsr = False,
    at_min_isr: AtMinIsr = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """List topics: on a terminal with partitions, replicas and their state; in a pipe only the names.

    Example: sparklog topics list --under-replicated
    """
    health = PartitionFilter(under_replicated, unavailable, under_min_isr, at_min_isr)
    with open_admin(bootstrap, timeout) as admin:
        if not health.asked and (as_json or not on_terminal()):
            names = admin.list_topics()
        else:
            found = admin.describe_topics()
            found = health.pick(admin, found) if health.asked else found
            names = [topic.name for topic in found]
    if as_json:
        print_json(names)
    elif on_terminal():
        rows = [(topic.name, len(topic.partitions), topic.replication_factor, state(topic)) for topic in found]
        print_table(("topic", "partitions", "replicas", "state"), rows, numeric=("partitions", "replicas"))
    else:
        for name in names:
            print_line(name)


@topics.command("describe")
def describe(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPIC...]", show_default=False, autocompletion=topic_names)
    ] = None,
    *,
    under_replicated: UnderReplicated = False,
    unavailable: Unavailable = False,
    under_min_isr: UnderMinIsr = False,
    at_min_isr: AtMinIsr = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show partitions, leaders, in-sync replicas, columns and settings of the named topics, default all.

    Example: sparklog topics describe flights
    """
    health = PartitionFilter(under_replicated, unavailable, under_min_isr, at_min_isr)
    with open_admin(bootstrap, timeout) as admin:
        found = admin.describe_topics(names or None)
        if health.asked:
            found = health.pick(admin, found)
    if as_json:
        print_json([plain_topic(topic) for topic in found])
        return
    for index, topic in enumerate(found):
        if index:
            print_line()
        print_topic(topic)


@topics.command("delete")
def delete(
    names: Topics,
    *,
    yes: Yes = False,
    if_exists: Annotated[bool, typer.Option("--if-exists", help="Ignore topics that do not exist.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Delete topics and their records. Asks for confirmation unless --yes is given.

    Example: sparklog topics delete flights --yes
    """
    confirm(f"Delete {', '.join(names)} and all records?", f"deleting {', '.join(names)}", yes=yes)
    with open_admin(bootstrap, timeout) as admin:
        for name in names:
            try:
                admin.delete_topic(name)
            except BrokerError as error:  # noqa: PERF203 - a few names at most
                if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION or not if_exists:
                    raise
            else:
                done({"topic": name, "deleted": True}, f"{name}: deleted", as_json=as_json)


@topics.command("alter")
def alter(
    name: Topic,
    *,
    config: Annotated[
        list[str] | None, typer.Option("--config", "-c", metavar="NAME=VALUE", help="Setting to change; repeatable.")
    ] = None,
    unset: Unset = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Change a topic's settings while it is in use. All values are checked before any setting is changed.

    Example: sparklog topics alter flights -c retention.ms=3600000 --unset segment.ms
    """
    if not config and not unset:
        raise ConfigError("nothing to change: pass --config NAME=VALUE or --unset NAME")
    with open_admin(bootstrap, timeout) as admin:
        alter_topic(admin, name, pairs(config or [], what="setting"), unset=unset, as_json=as_json)


@topics.command("delete-records")
def delete_records(
    name: Topic,
    *,
    before: Annotated[
        list[str],
        typer.Option(
            "--before", metavar="PARTITION=OFFSET", help="First offset to keep; PARTITION=end deletes all; repeatable."
        ),
    ],
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Delete all records before the given offset of a partition. Asks for confirmation unless --yes is given.

    Example: sparklog topics delete-records flights --before 0=1000 --before 1=end --yes
    """
    wanted = {TopicPartition(name, part): offset for part, offset in _places(before).items()}
    confirm(f"Delete records of {len(wanted)} partitions of {name}?", f"deleting records of {name}", yes=yes)
    with open_admin(bootstrap, timeout) as admin:
        starts = admin.delete_records(wanted)
    for tp, start in starts.items():
        told = {"topic": tp.topic, "partition": tp.partition, "log_start_offset": start}
        done(told, f"{tp}: now starts at offset {start}", as_json=as_json)


def _places(before: list[str]) -> dict[int, int | None]:
    """Parse PARTITION=OFFSET texts; return the offset of each partition, or None for its end.

    Raises ConfigError for any other text.
    """
    found: dict[int, int | None] = {}
    for part, offset in pairs(before, what="place").items():
        if not part.isdigit() or not (offset.isdigit() or offset == "end"):
            raise ConfigError(f"--before {part}={offset}: expected PARTITION=OFFSET or PARTITION=end")
        found[int(part)] = None if offset == "end" else int(offset)
    return found


topics.command("locate")(locate)
topics.command("restore")(restore)
topics.command("add-partitions")(add_partitions)
topics.command("reassign")(reassign)
topics.command("elect-leaders")(elect_leaders)


def _columns(schema: str | None, schema_from: Path | None) -> pa.Schema | None:
    if schema is not None and schema_from is not None:
        raise ConfigError("--schema and --schema-from exclude each other")
    if schema is not None:
        return parse_columns(schema)
    return schema_of_file(schema_from) if schema_from is not None else None
