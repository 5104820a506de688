"""``sparklog topics locate`` and ``restore``: the commands for archives of topics."""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING, Annotated

import typer

from sparklog.cli.options import AsJson, Bootstrap, Timeout, Yes, confirm, open_admin, pairs, servers
from sparklog.cli.output import note, print_json, print_line, print_table
from sparklog.cli.topic_output import cluster_default
from sparklog.errors import ConfigError

if TYPE_CHECKING:
    from sparklog.delta.restore import Restored

_KNOWN_SINCE_US = -(2**62)


def locate(
    name: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    moment: Annotated[str, typer.Argument(metavar="TIME", help="ISO 8601 with a time zone.", show_default=False)],
    *,
    history: Annotated[
        str, typer.Option(metavar="PATH", help="The topic's Delta table, or the directory of all archives.")
    ],
    bootstrap: Bootstrap = None,
    as_json: AsJson = False,
) -> None:
    """Find the first record at or after a time in each partition, in the archive or in the log. If no such record
    exists yet, the column "store" has "ahead", and the column "offset" has the log end offset.

    Example: sparklog topics locate flights 2024-05-01T00:00:00Z --history /data/archive
    """
    try:
        from sparklog.spark.read_history import find_moment
    except ImportError as missing:
        raise ConfigError(f"{missing.name} is not installed here: pip install 'sparklog[delta]'") from None

    found = find_moment(servers(bootstrap), name, moment, history=history)
    rows = [(partition, *place) for partition, place in sorted(found.items())]
    columns = ("partition", "store", "offset", "version")
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, rows, numeric=("partition", "offset", "version"))


def restore(
    name: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    *,
    path: Annotated[
        str, typer.Option("--from", metavar="PATH", help="The topic's Delta table, or the directory of all archives.")
    ],
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", help="Default: the archived topic's number; cannot be lower.")
    ] = None,
    replication_factor: Annotated[
        int | None, typer.Option("--replication-factor", "-r", help="Default: that of the archived topic.")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config", "-c", metavar="NAME=VALUE", help="Setting that overrides the archived topic's; repeatable."
        ),
    ] = None,
    compression: Annotated[str, typer.Option(help="Compression of the batches: none, lz4 or zstd.")] = "none",
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Read the restored topic and compare it with the table.")
    ] = True,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    """Recreate a deleted topic from its Delta table, with the same offsets. Continues where an earlier run stopped.
    --timeout limits each wait. Asks for confirmation unless --yes is given.

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
        print_line(f"{name}: already restored from this table, nothing changed")
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
    """Warn if the restored topic's retention will soon delete records.

    An archive usually has older records than a topic keeps.
    """
    config = done.topic.config
    with open_admin(bootstrap, timeout_s) as admin:
        policy, kept = (config.get(key) or cluster_default(admin, key) for key in ("cleanup.policy", "retention.ms"))
    oldest_us = min((file.times.low for file in done.archive.files), default=_KNOWN_SINCE_US)
    if "delete" not in policy or int(kept) < 0 or not _KNOWN_SINCE_US < oldest_us < time.time_ns() // 1000:
        return
    if oldest_us < time.time_ns() // 1000 - int(kept) * 1000:
        oldest = dt.datetime.fromtimestamp(oldest_us / 1_000_000, dt.timezone.utc).isoformat(timespec="seconds")
        note(
            f"sparklog: the oldest record of {done.topic.name} is from {oldest}, but retention.ms={kept}: older"
            " segments will be deleted soon; set retention.ms=-1 now to keep them"
        )
