"""``sparklog topics locate``: find the offsets of a time in a topic and its archive."""

from __future__ import annotations

from typing import Annotated

import typer

from sparklog.cli.options import AsJson, Bootstrap, servers
from sparklog.cli.output import print_json, print_table
from sparklog.errors import ConfigError


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
    """Find the first record at or after a time in each partition: in the archive, in the log, or ahead, at the log end
    offset, if no such record exists yet.

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
