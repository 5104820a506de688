"""``sparklog partitions set-aside``: logs that brokers keep though no topic claims them."""

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

set_aside = typer.Typer(help="Logs that no topic claims: list, restore, remove.", no_args_is_help=True)


@set_aside.command("list")
def list_set_aside(bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """Show every log that a broker keeps without serving it: whose it is, why, since when, and how large it is.

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
    which: Annotated[str, typer.Argument(metavar="TOPIC|TOPIC_ID", help="A topic's id, or its name if it has one id.")],
    *,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    """Make a topic again out of the logs that brokers have set aside. It has the id that it had, and its records.

    Each partition is led by the log that ends latest; the others copy from it. Asks first, unless --yes.

    Example: sparklog partitions set-aside restore flights
    """
    with open_admin(bootstrap, timeout) as admin:
        topic_id = _topic_id(admin.set_aside_logs(), which)
        confirm(f"Make topic {which} of id {topic_id} again?", which, yes=yes)
        topic = admin.restore_set_aside(topic_id, timeout_s=timeout)
    for finding in topic.findings:
        note(f"sparklog: {finding}")
    done(asdict(topic), f"topic {topic.name} is there again, with {topic.partitions} partitions", as_json=as_json)


@set_aside.command("remove")
def remove(
    which: Annotated[list[str], typer.Argument(metavar="BROKER/LOG...", help="As 'set-aside list' names them.")],
    *,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Delete set-aside logs for good: they may be the last copies of what they hold. Asks first, unless --yes.

    Example: sparklog partitions set-aside remove 2/1795795594418000000-flights-0
    """
    by_broker: defaultdict[int, list[str]] = defaultdict(list)
    for one in which:
        broker, slash, name = one.partition("/")
        if not slash or not name or not (broker.isascii() and broker.isdigit()):
            raise ConfigError(f"{one!r}: expected BROKER/LOG, as `sparklog partitions set-aside list` names it")
        by_broker[int(broker)].append(name)
    confirm(f"Delete {len(which)} set-aside logs for good?", which[0], yes=yes)
    with open_admin(bootstrap, timeout) as admin:
        for broker_id, names in by_broker.items():
            admin.remove_set_aside(broker_id, names)
    # A name of which there is no log is no error.
    done({"removed": which}, f"gone for good: {', '.join(which)}", as_json=as_json)


def _topic_id(logs: list[SetAsideDescription], which: str) -> str:
    """Return the one topic id that is meant.

    Raises:
        BrokerError: UNKNOWN_TOPIC_OR_PARTITION when no broker has set aside a log of the topic.
        ConfigError: logs of several topics of this name are set aside.
    """
    if any(log.topic_id == which for log in logs):
        return which
    found = sorted({log.topic_id for log in logs if log.topic == which and log.topic_id})
    if not found:
        detail = f"{which}: no broker has set aside a log of this topic"
        raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, detail)
    if len(found) > 1:
        raise ConfigError(f"{which}: logs of {len(found)} topics of this name are set aside: name one of {found}")
    return found[0]
