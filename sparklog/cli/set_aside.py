"""``sparklog partitions set-aside``: logs whose topic does not exist. Brokers keep but do not serve these logs."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from dataclasses import asdict
from typing import Annotated

import typer

from sparklog.cli.options import AsJson, Bootstrap, Timeout, Yes, confirm, open_admin
from sparklog.cli.output import done, human_bytes, note, print_json, print_table
from sparklog.client.admin.set_aside import SetAsideDescription
from sparklog.errors import BrokerError, ConfigError, ErrorCode

set_aside = typer.Typer(help="Logs of no existing topic: list, restore, remove.", no_args_is_help=True)


@set_aside.command("list")
def list_set_aside(bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """List logs that brokers keep without serving them: partition, reason, time and size.

    Example: sparklog partitions set-aside list
    """
    with open_admin(bootstrap, timeout) as admin:
        found = admin.set_aside_logs()
    if as_json:
        print_json([asdict(log) for log in found])
        return
    columns = ("log", "partition", "topic id", "offsets", "size", "since", "reason")
    rows = [
        (
            f"{log.broker_id}/{log.name}",
            f"{log.topic}-{log.partition}",
            log.topic_id or "-",
            f"{log.log_start_offset} to {log.log_end_offset}" if log.intact else "unknown",
            human_bytes(log.size_bytes),
            dt.datetime.fromtimestamp(log.since_ms / 1000, dt.timezone.utc).isoformat(" ", "seconds"),
            log.reason,
        )
        for log in found
    ]
    print_table(columns, rows)


@set_aside.command("restore")
def restore(
    which: Annotated[
        str, typer.Argument(metavar="TOPIC|TOPIC_ID", help="Topic id, or topic name if only one id has that name.")
    ],
    *,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    """Recreate a topic from the logs that brokers have set aside, with its original id and records.

    In each partition, the replica with the highest log end offset becomes the leader, and the other replicas copy from
    it. Asks for confirmation unless --yes is given.

    Example: sparklog partitions set-aside restore flights
    """
    with open_admin(bootstrap, timeout) as admin:
        topic_id = _topic_id(admin.set_aside_logs(), which)
        confirm(f"Recreate topic {which} with id {topic_id}?", f"restoring {which}", yes=yes)
        topic = admin.restore_set_aside(topic_id, timeout_s=timeout)
    for finding in topic.findings:
        note(f"sparklog: {finding}")
    done(asdict(topic), f"restored topic {topic.name} with {topic.partitions} partitions", as_json=as_json)


@set_aside.command("remove")
def remove(
    which: Annotated[list[str], typer.Argument(metavar="BROKER/LOG...", help="Logs, as named by 'set-aside list'.")],
    *,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Delete set-aside logs permanently. These logs may be the last copies of their records. Asks for confirmation
    unless --yes is given.

    Example: sparklog partitions set-aside remove 2/1795795594418000000-flights-0
    """
    by_broker: defaultdict[int, list[str]] = defaultdict(list)
    for one in which:
        broker, slash, name = one.partition("/")
        if not slash or not name or not (broker.isascii() and broker.isdigit()):
            raise ConfigError(f"{one!r}: expected BROKER/LOG, as listed by `sparklog partitions set-aside list`")
        by_broker[int(broker)].append(name)
    confirm(f"Delete {len(which)} set-aside logs permanently?", f"deleting {which[0]}", yes=yes)
    with open_admin(bootstrap, timeout) as admin:
        for broker_id, names in by_broker.items():
            admin.remove_set_aside(broker_id, names)
    # Removing a log that does not exist is not an error.
    done({"removed": which}, f"deleted: {', '.join(which)}", as_json=as_json)


def _topic_id(logs: list[SetAsideDescription], which: str) -> str:
    """Return the topic id for ``which``, the name or id of a topic.

    Raises:
        BrokerError: UNKNOWN_TOPIC_OR_PARTITION if no broker has set aside a log of the topic.
        ConfigError: there are set-aside logs of several topics with this name.
    """
    if any(log.topic_id == which for log in logs):
        return which
    found = sorted({log.topic_id for log in logs if log.topic == which and log.topic_id})
    if not found:
        detail = f"{which}: no broker has set aside a log of this topic"
        raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, detail)
    if len(found) > 1:
        raise ConfigError(
            f"{which}: logs of {len(found)} topics with this name are set aside: pass one of the ids {found}"
        )
    return found[0]
