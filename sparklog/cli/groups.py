"""``sparklog groups``: consumer groups, their members, committed offsets and lag."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from sparklog.cli.options import TIMES, AsJson, Bootstrap, Timeout, Yes, confirm, group_names, open_admin, point_in_time
from sparklog.cli.output import done, note, print_json, print_table
from sparklog.client.admin.admin import Admin
from sparklog.client.cluster.offsets import OffsetQuery
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition

groups = typer.Typer(
    help="Consumer groups: list and describe them, set their offsets, delete them.", no_args_is_help=True
)
GroupName = Annotated[str, typer.Argument(metavar="GROUP", show_default=False, autocompletion=group_names)]

_ENDS: dict[str, OffsetQuery] = {"earliest": "earliest", "latest": "latest"}


class GroupLag(NamedTuple):
    """The progress of a consumer group in one partition.

    ``offset`` is the next offset that the group reads, or None if it has not committed an offset. ``end_offset`` is the
    end of the committed records, or None if the topic was deleted. ``lag`` is the difference between the two.
    ``member`` is the member that reads the partition, or None.
    """

    topic: str
    partition: int
    offset: int | None
    end_offset: int | None
    lag: int | None
    member: str | None


class OffsetChange(NamedTuple):
    topic: str
    partition: int
    before: int | None
    after: int


@groups.command("list")
def list_groups(bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """List groups that have committed offsets or members.

    Example: sparklog groups list
    """
    with open_admin(bootstrap, timeout) as admin:
        found = admin.group_listings()
    if as_json:
        print_json([{"group": one.group, "state": one.state, "members": one.members} for one in found])
    elif found:
        rows = [(one.group, one.state, one.members) for one in found]
        print_table(("group", "state", "members"), rows, numeric=("members",))


@groups.command("describe")
def describe(group: GroupName, bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """Show a group's offset and lag in each partition, and the member that reads it.

    Example: sparklog groups describe reports
    """
    with open_admin(bootstrap, timeout) as admin:
        offsets = admin.group_offsets(group)
        described = admin.describe_group(group)
        owners = {tp: one.member_id for one in (described.members if described else ()) for tp in one.owned}
        if not offsets and not owners:
            note(f"sparklog: group {group!r} has no committed offsets and no assigned partitions")
            raise typer.Exit(1)
        rows = _lags(admin, offsets, owners)
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    columns = ("topic", "partition", "offset", "end", "lag", "member")
    print_table(columns, rows, numeric=("partition", "offset", "end", "lag"))


def _lags(admin: Admin, offsets: Mapping[TopicPartition, int], owners: Mapping[TopicPartition, str]) -> list[GroupLag]:
    partitions = sorted({*offsets, *owners})
    ends = _listed(admin, partitions, "latest")
    found = []
    for tp in partitions:
        offset, end = offsets.get(tp), ends.get(tp)
        lag = None if end is None or offset is None else max(0, end - offset)
        found.append(GroupLag(tp.topic, tp.partition, offset, end, lag, owners.get(tp)))
    return found


def _listed(admin: Admin, partitions: Iterable[TopicPartition], at: OffsetQuery) -> dict[TopicPartition, int]:
    """Return the offsets of those partitions whose topics still exist."""
    found: dict[TopicPartition, int] = {}
    by_topic: dict[str, list[TopicPartition]] = {}
    there = set(admin.list_topics())
    for tp in partitions:
        if tp.topic in there:
            by_topic.setdefault(tp.topic, []).append(tp)
    for named in by_topic.values():
        try:
            found |= admin.list_offsets(named, at=at)
        except BrokerError as error:  # noqa: PERF203 - as above
            if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
    return found


@groups.command("members")
def members(group: GroupName, bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """Show the members of a group and the partitions assigned to each.

    Example: sparklog groups members reports
    """
    with open_admin(bootstrap, timeout) as admin:
        found = admin.describe_group(group)
    if found is None:
        note(f"sparklog: group {group!r} does not exist")
        raise typer.Exit(1)
    if as_json:
        print_json(found)
        return
    rows = [
        (one.member_id, one.client_id, one.host, one.instance_id or None, one.rack or None, one.member_epoch,
         len(one.owned), _by_topic(one.owned))
        for one in found.members
    ]  # fmt: skip
    columns = ("member", "client", "host", "instance", "rack", "epoch", "partitions", "owned")
    title = f"group {group}: {found.state}, epoch {found.group_epoch}"
    title += f", classic protocol {found.protocol}" if found.protocol else ""
    print_table(columns, rows, title=title, numeric=("epoch", "partitions"))


def _by_topic(partitions: Iterable[TopicPartition]) -> str:
    by_topic: dict[str, list[str]] = {}
    for tp in partitions:
        by_topic.setdefault(tp.topic, []).append(str(tp.partition))
    return " ".join(f"{topic}:{','.join(numbers)}" for topic, numbers in by_topic.items())


@groups.command("delete")
def delete(
    names: Annotated[list[str], typer.Argument(metavar="GROUP...", show_default=False)],
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Delete groups and their offsets. Fails for a group with members. Asks for confirmation unless --yes is given.

    Example: sparklog groups delete reports --yes
    """
    confirm(f"Delete the offsets of {', '.join(names)}?", f"deleting {', '.join(names)}", yes=yes)
    with open_admin(bootstrap, timeout) as admin:
        for name in names:
            admin.delete_group(name)
            done({"group": name, "deleted": True}, f"{name}: deleted", as_json=as_json)


@groups.command("reset-offsets")
def reset_offsets(
    group: GroupName,
    *,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic", metavar="TOPIC[:N,...]", help="Topics or partitions to set. Default: all of the group."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", help="earliest, latest, an offset, a time such as 2026-01-31T12:00, or an age such as -1h."
        ),
    ] = None,
    shift: Annotated[
        int | None, typer.Option("--shift", metavar="N", help="Move offsets forward by N, or back by -N.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--from-file", help="CSV of topic,partition,offset, or the output of 'describe --json'."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the new offsets without setting them.")] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Set the offsets at which a group continues to read. The group must have no members. An offset outside the log is
    moved to the nearer end. Asks for confirmation unless --yes or --dry-run is given.

    Example: sparklog groups reset-offsets reports --topic orders --to -1h --dry-run
    """
    if sum(given is not None for given in (to, shift, file)) != 1:
        raise ConfigError("pass exactly one of --to, --shift, --from-file")
    with open_admin(bootstrap, timeout) as admin:
        before = admin.group_offsets(group)
        partitions = _named(admin, topics, before)
        if file is not None:
            wanted = {tp: at for tp, at in _read(file).items() if topics is None or tp in partitions}
        elif shift is not None:
            wanted = {tp: before[tp] + shift for tp in partitions if tp in before}
        else:
            wanted = _places(admin, partitions, to or "")
        after = _within(admin, wanted)
        changes = [OffsetChange(*tp, before.get(tp), at) for tp, at in sorted(after.items())]
        if not changes:
            raise ConfigError(f"group {group!r}: no partition to set; pass topics with --topic")
        if not dry_run:
            confirm(f"Set {len(changes)} offsets of {group}?", f"setting offsets of {group}", yes=yes)
            admin.commit_offsets(group, after)
    if as_json:
        print_json([change._asdict() for change in changes])
        return
    print_table(("topic", "partition", "before", "after"), changes, numeric=("partition", "before", "after"))
    if dry_run:
        note("sparklog: no offset was set (--dry-run)")


def _named(admin: Admin, topics: list[str] | None, before: Mapping[TopicPartition, int]) -> list[TopicPartition]:
    if topics is None:
        return sorted(before)
    found: list[TopicPartition] = []
    for text in topics:
        name, colon, numbers = text.partition(":")
        if colon and not re.fullmatch(r"[0-9]+(,[0-9]+)*", numbers):
            raise ConfigError(f"--topic {text!r}: expected TOPIC or TOPIC:0,1,2")
        if colon:
            found += [TopicPartition(name, int(number)) for number in numbers.split(",")]
        else:
            found += [TopicPartition(name, one.partition) for one in admin.describe_topic(name).partitions]
    return list(dict.fromkeys(found))


def _places(admin: Admin, partitions: list[TopicPartition], to: str) -> dict[TopicPartition, int]:
    if to.isascii() and to.isdigit():
        return dict.fromkeys(partitions, int(to))
    where: OffsetQuery | None = _ENDS.get(to) or point_in_time(to)
    if where is None:
        raise ConfigError(f"--to {to!r}: expected earliest, latest, an offset, {TIMES}")
    return _listed(admin, partitions, where)


def _within(admin: Admin, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    starts, ends = _listed(admin, wanted, "earliest"), _listed(admin, wanted, "latest")
    gone = sorted(tp for tp in wanted if tp not in ends)
    if gone:
        note(f"sparklog: skipped partitions that do not exist: {', '.join(map(str, gone))}")
    return {tp: min(max(at, starts[tp]), ends[tp]) for tp, at in wanted.items() if tp in ends}


def _read(file: Path) -> dict[TopicPartition, int]:
    """Return the offsets in ``file``. Raises ConfigError with the line number."""
    text = file.read_text()
    found: dict[TopicPartition, int] = {}
    rows: list[tuple[Any, ...]]
    if text.lstrip().startswith("["):
        try:
            rows = [(one["topic"], one["partition"], one.get("after", one.get("offset"))) for one in json.loads(text)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}: expected a list of objects with topic, partition, offset: {error}") from None
    else:
        rows = [tuple(row) for row in csv.reader(text.splitlines()) if row and row[0] != "topic"]
    for number, row in enumerate(rows, 1):
        try:
            topic, partition, offset = row
            if offset is not None:
                found[TopicPartition(str(topic).strip(), int(partition))] = int(offset)
        except ValueError:  # noqa: PERF203 - the entry is named
            raise ConfigError(f"{file}, entry {number}: expected topic,partition,offset, found {row!r}") from None
    return found
