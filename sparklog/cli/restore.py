"""``sparklog topics restore``: a topic made again out of its Delta table."""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING, Annotated

import typer

from sparklog.cli.options import AsJson, Bootstrap, Timeout, Yes, confirm, open_admin, pairs, servers
from sparklog.cli.output import note, print_json, print_line
from sparklog.cli.topic_output import cluster_default
from sparklog.errors import ConfigError

if TYPE_CHECKING:
    from sparklog.delta.restore import Restored

_KNOWN_SINCE_US = -(2**62)


def restore(
    name: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    *,
    path: Annotated[
        str, typer.Option("--from", metavar="PATH", help="The topic's Delta table, or the folder that archives are in.")
    ],
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", help="Default: as many as it had; not fewer.")
    ] = None,
    replication_factor: Annotated[
        int | None, typer.Option("--replication-factor", "-r", help="Default: as it had.")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-c", metavar="NAME=VALUE", help="A topic setting, over those it had; repeatable."),
    ] = None,
    compression: Annotated[str, typer.Option(help="Of the batches: none, lz4 or zstd.")] = "none",
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Read it back and compare it with the table.")
    ] = True,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    """Make a topic that is no more out of its Delta table, with the same offsets. Goes on where an earlier run stopped.
    --timeout is for each wait. Asks first, unless --yes.

    Example: sparklog topics restore flights --from /data/archive --yes
    """
    settings = pairs(config or [], what="setting")
    try:
        from sparklog.delta.archive_reader import open_archive
        from sparklog.delta.restore import restore_topic
        from sparklog.delta.snapshot import find_table
    except ImportError as missing:
        raise ConfigError(f"{missing.name} is not installed here: pip install 'sparklog[delta]'") from None

    archive = open_archive(find_table(path, name))
    what = f"{archive.partitions} partitions, {sum(archive.ends.values())} offsets"
    asked = f"Restore {name} ({what}) from {archive.table} at version {archive.version}?"
    confirm(asked, f"restoring {name}", yes=yes)
    done = restore_topic(
        servers(bootstrap),
        name,
        archive,
        partitions=partitions,
        replication_factor=replication_factor,
        config=settings,
        compression=compression,
        check=check,
        timeout_s=timeout,
        tell=lambda line: note(f"sparklog: {line}"),
    )
    if as_json:
        print_json(_plain(done))
        return
    if done.was_there:
        print_line(f"{name}: was restored from this table already, nothing changed")
    else:
        compared = "" if done.compared is None else f", {done.compared} compared with the table"
        print_line(f"{name}: {len(done.partitions)} partitions restored, {done.records} records sent{compared}")
        _warn_of_retention(done, bootstrap, timeout)


def _plain(done: Restored) -> dict[str, object]:
    return {
        "topic": done.topic.name,
        "topic_id": done.topic.topic_id,
        "table": done.archive.table,
        "version": done.archive.version,
        "nothing_changed": done.was_there,
        "records_sent": done.records,
        "records_compared": done.compared,
        "partitions": [
            {"partition": found.partition, "log_start_offset": found.start, "log_end_offset": found.end}
            for found in done.partitions
        ],
    }


def _warn_of_retention(done: Restored, bootstrap: str | None, timeout_s: float) -> None:
    """Archives go back further than topics, and what a topic does not keep goes as soon as it is open."""
    config = done.topic.config
    with open_admin(bootstrap, timeout_s) as admin:
        policy, kept = (config.get(key) or cluster_default(admin, key) for key in ("cleanup.policy", "retention.ms"))
    oldest_us = min((file.times.low for file in done.archive.files), default=_KNOWN_SINCE_US)
    if "delete" not in policy or int(kept) < 0 or not _KNOWN_SINCE_US < oldest_us < time.time_ns() // 1000:
        return
    if oldest_us < time.time_ns() // 1000 - int(kept) * 1000:
        oldest = dt.datetime.fromtimestamp(oldest_us / 1_000_000, dt.timezone.utc).isoformat(timespec="seconds")
        note(
            f"sparklog: {done.topic.name} has records from {oldest} on, and keeps them for retention.ms={kept}: older"
            " segments go soon, unless it is set to -1 now"
        )
