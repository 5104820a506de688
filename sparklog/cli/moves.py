"""``sparklog topics``, the part about replicas and leaders: reassign, elect-leaders, add-partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from sparklog.cli.options import FIRST_CONTACT_S, AsJson, Bootstrap, Throttle, Timeout, byte_count, servers
from sparklog.cli.output import human_bytes, note, print_json, print_table
from sparklog.client.admin import Admin
from sparklog.client.descriptions import MoveDescription, TopicDescription
from sparklog.errors import ConfigError
from sparklog.model import TopicPartition

Which = Annotated[str, typer.Argument(metavar="TOPIC[:PARTITION]", show_default=False)]
Whichs = Annotated[list[str] | None, typer.Argument(metavar="[TOPIC[:PARTITION]...]", show_default=False)]


def add_partitions(
    name: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    partitions: Annotated[int, typer.Argument(metavar="TOTAL", show_default=False)],
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
) -> None:
    """Give a topic more partitions: TOTAL is the new number. Keys may go to other partitions from then on.

    Example: sparklog topics add-partitions flights 12
    """
    with _admin(bootstrap, timeout) as admin:
        topic = admin.create_partitions(name, partitions)
    if topic.warning:
        note(f"sparklog: {topic.warning}")
    print(f"{topic.name}: {len(topic.partitions)} partitions")


def reassign(
    which: Annotated[str | None, typer.Argument(metavar="[TOPIC[:PARTITION]]", show_default=False)] = None,
    *,
    to: Annotated[
        str | None, typer.Option(metavar="ID,...", help="Brokers wanted, preferred leader first.", show_default=False)
    ] = None,
    replication_factor: Annotated[
        int | None, typer.Option("--replication-factor", "-r", help="So many replicas, placed by the cluster.")
    ] = None,
    throttle: Throttle = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the replicas are there and in sync.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Take moves under way back.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show moves under way.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Wait no longer than this.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Move replicas to other brokers, change their number, or the order of leaders; watch it, take it back.

    --to with a whole topic gives every partition these brokers, beginning with another one each, so that each leads
    its share.

    Example: sparklog topics reassign flights:0 --to 3,1,2 --throttle 50MB --wait
    """
    wanted = [to is not None, replication_factor is not None, cancel, status]
    if sum(wanted) != 1:
        raise ConfigError("expected one of --to, --replication-factor, --cancel, --status")
    if which is None and not status:
        raise ConfigError("no topic named: expected TOPIC or TOPIC:PARTITION")
    limit = byte_count(throttle, what="--throttle")
    with _admin(bootstrap, 30.0) as admin:
        if status:
            _show(admin.reassignments(), which, as_json=as_json)
        elif cancel:
            _cancel(admin, which or "")
        else:
            begun = admin.reassign(_targets(admin, which or "", to, replication_factor), throttle_bytes=limit)
            if begun.warning:
                note(f"sparklog: {begun.warning}")
            print(f"{len(begun.targets)} partitions move")
            if wait:
                admin.wait_until_moved(begun.targets, timeout_s=timeout)
                print(f"{len(begun.targets)} partitions are there, and in sync")


def elect_leaders(
    which: Whichs = None,
    unclean: Annotated[
        bool, typer.Option("--unclean", help="Any live replica where none in sync is alive. Loses records.")
    ] = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
) -> None:
    """Give leaderships to the preferred leaders, the first replicas; without names of all partitions.

    Example: sparklog topics elect-leaders flights
    """
    if unclean and not which:
        raise ConfigError("--unclean loses records: name the topics or partitions")
    with _admin(bootstrap, timeout) as admin:
        partitions = None if not which else [tp for name in which for tp in _partitions(admin, name)]
        failed = admin.elect_leaders(partitions, unclean=unclean)
        for error in failed.values():
            note(f"sparklog: {error}")
    if failed:
        raise typer.Exit(1)
    print("every partition has the leader it should have")


def print_moves(moves: Sequence[MoveDescription]) -> None:
    rows = [
        (
            f"{move.topic}:{move.partition}",
            _ids(move.original),
            _ids(move.target),
            _ids(move.isr),
            f"{move.progress:.0%}",
            human_bytes(move.leader_bytes),
            f"{human_bytes(move.throttle_bytes)}/s" if move.throttle_bytes else None,
        )
        for move in moves
    ]
    print_table(
        ("partition", "from", "to", "in sync", "copied", "of", "limit"), rows, numeric=("copied", "of", "limit")
    )


def _show(found: list[MoveDescription], which: str | None, *, as_json: bool) -> None:
    if which is not None:
        topic, partition = _parse(which)
        found = [move for move in found if move.topic == topic and partition in {None, move.partition}]
    if as_json:
        print_json([{**asdict(move), "progress": move.progress} for move in found])
    elif found:
        print_moves(found)
    else:
        print("no partition is being moved")


def _cancel(admin: Admin, which: str) -> None:
    topic, partition = _parse(which)
    if partition is not None:
        named = [TopicPartition(topic, partition)]
    else:
        admin.describe_topic(topic)  # raises for a topic that is not there
        named = [TopicPartition(topic, m.partition) for m in admin.reassignments() if m.topic == topic]
    admin.cancel_reassignment(named)
    print(f"{len(named)} moves taken back")


def _targets(
    admin: Admin, which: str, to: str | None, replication_factor: int | None
) -> dict[TopicPartition, tuple[int, ...]]:
    topic, partition = _parse(which)
    if to is None:
        assert replication_factor is not None
        planned = admin.plan_replication_factor(topic, replication_factor)
        return {tp: target for tp, target in planned.items() if partition in {None, tp.partition}}
    brokers = _broker_ids(to)
    if partition is not None:
        return {TopicPartition(topic, partition): brokers}
    found = admin.describe_topic(topic)
    return {tp: _rotated(brokers, tp.partition) for tp in found.topic_partitions()}


def _partitions(admin: Admin, which: str) -> list[TopicPartition]:
    topic, partition = _parse(which)
    found: TopicDescription = admin.describe_topic(topic)
    return found.topic_partitions() if partition is None else [TopicPartition(topic, partition)]


def _parse(which: str) -> tuple[str, int | None]:
    """A topic and its partition, None for all. A topic's name holds no colon."""
    topic, colon, number = which.partition(":")
    if colon and not (number.isascii() and number.isdigit()):
        raise ConfigError(f"{which!r} found, expected TOPIC or TOPIC:PARTITION")
    return topic, int(number) if colon else None


def _broker_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--to {text!r}: expected broker ids as 1,2,3")
    return tuple(map(int, parts))


def _rotated(brokers: tuple[int, ...], turn: int) -> tuple[int, ...]:
    at = turn % len(brokers)
    return brokers[at:] + brokers[:at]


def _ids(brokers: Sequence[int]) -> str:
    return ",".join(map(str, brokers)) or "-"


def _admin(bootstrap: str | None, timeout_s: float) -> Admin:
    return Admin(servers(bootstrap), timeout_s=timeout_s, first_contact_s=FIRST_CONTACT_S)
