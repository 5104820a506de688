"""``sparklog groups``: consumer groups, where they stand, and how far behind that is."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from sparklog.cli.options import FIRST_CONTACT_S, AsJson, Bootstrap, Timeout, servers
from sparklog.cli.output import note, print_json, print_table
from sparklog.client.admin import Admin
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition

groups = typer.Typer(help="Consumer groups: list them, and show their lag.", no_args_is_help=True)


class GroupLag(NamedTuple):
    """One partition: the group's next offset, where committed records end, and how many offsets lie between. The end is
    None when the topic is gone."""

    topic: str
    partition: int
    offset: int
    end_offset: int | None
    lag: int | None


@groups.command("list")
def list_groups(bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """List the groups that have offsets.

    Example: sparklog groups list
    """
    with Admin(servers(bootstrap), timeout_s=timeout, first_contact_s=FIRST_CONTACT_S) as admin:
        found = admin.list_groups()
    if as_json:
        print_json(found)
        return
    for name in found:
        print(name)


@groups.command("describe")
def describe(
    group: Annotated[str, typer.Argument(metavar="GROUP", show_default=False)],
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show where a group stands in each partition, and its lag behind the end of the committed records.

    Example: sparklog groups describe reports
    """
    with Admin(servers(bootstrap), timeout_s=timeout, first_contact_s=FIRST_CONTACT_S) as admin:
        offsets = admin.group_offsets(group)
        if not offsets:
            note(f"sparklog: group {group!r} has no offsets")
            raise typer.Exit(1)
        rows = _lags(admin, offsets)
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    print_table(("topic", "partition", "offset", "end", "lag"), rows, numeric=("partition", "offset", "end", "lag"))


def _lags(admin: Admin, offsets: dict[TopicPartition, int]) -> list[GroupLag]:
    ends: dict[TopicPartition, int] = {}
    for topic in sorted({tp.topic for tp in offsets}):
        try:
            ends |= admin.list_offsets([tp for tp in offsets if tp.topic == topic])
        except BrokerError as error:  # noqa: PERF203 - one that is gone does not hide the others
            if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
    found = []
    for tp, offset in sorted(offsets.items()):
        end = ends.get(tp)
        found.append(GroupLag(tp.topic, tp.partition, offset, end, None if end is None else max(0, end - offset)))
    return found
