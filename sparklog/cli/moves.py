"""The commands of ``sparklog topics`` for replicas and leaders: reassign, elect-leaders, add-partitions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from sparklog.cli.options import (
    AsJson,
    Bootstrap,
    Throttle,
    Timeout,
    Topic,
    Yes,
    byte_count,
    confirm,
    open_admin,
    topic_names,
)
from sparklog.cli.output import done, human_bytes, ids, note, print_json, print_line, print_table
from sparklog.cli.progress import bar
from sparklog.client.admin.admin import Admin
from sparklog.client.admin.descriptions import MoveDescription, TopicDescription
from sparklog.errors import ConfigError
from sparklog.model import TopicPartition

Whichs = Annotated[
    list[str] | None, typer.Argument(metavar="[TOPIC[:PARTITION]...]", show_default=False, autocompletion=topic_names)
]


def add_partitions(
    name: Topic,
    partitions: Annotated[int, typer.Argument(metavar="TOTAL", show_default=False)],
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Add partitions to a topic. TOTAL is the new number of partitions. Keys may then map to other partitions.

    Example: sparklog topics add-partitions flights 12
    """
    with open_admin(bootstrap, timeout) as admin:
        topic = admin.create_partitions(name, partitions)
    if topic.warning:
        note(f"sparklog: {topic.warning}")
    told = {"topic": topic.name, "partitions": len(topic.partitions)}
    done(told, f"{topic.name}: {len(topic.partitions)} partitions", as_json=as_json)


def reassign(
    which: Annotated[str | None, typer.Argument(metavar="[TOPIC[:PARTITION]]", show_default=False)] = None,
    *,
    to: Annotated[
        str | None, typer.Option(metavar="ID,...", help="Target brokers, preferred leader first.", show_default=False)
    ] = None,
    replication_factor: Annotated[
        int | None, typer.Option("--replication-factor", "-r", help="Number of replicas; the cluster places them.")
    ] = None,
    throttle: Throttle = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return once the new replicas are in sync.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel moves in progress.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show moves in progress.")] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Maximum time to wait.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Move replicas to other brokers, or change their number or order; show or cancel such moves.

    --to with a whole topic assigns these brokers to every partition, each partition starting with the next broker, so
    that leaders are spread evenly. Moving and cancelling ask for confirmation unless --yes is given.

    Example: sparklog topics reassign flights:0 --to 3,1,2 --throttle 50MB --wait --yes
    """
    wanted = [to is not None, replication_factor is not None, cancel, status]
    if sum(wanted) != 1:
        raise ConfigError("pass exactly one of --to, --replication-factor, --cancel, --status")
    if which is None and not status:
        raise ConfigError("no topic given: expected TOPIC or TOPIC:PARTITION")
    limit = byte_count(throttle, what="--throttle")
    with open_admin(bootstrap, 30.0) as admin:
        if status:
            show_moves(admin, [] if which is None else [which], as_json=as_json)
        elif cancel:
            confirm_cancel(which or "", yes=yes)
            cancel_moves(admin, [which or ""], as_json=as_json)
        else:
            targets = plan(admin, which or "", to=to, replication_factor=replication_factor)
            confirm_moves(which or "", yes=yes)
            begin_moves(admin, targets, limit, wait_s=timeout if wait else None, as_json=as_json)


def elect_leaders(
    which: Whichs = None,
    *,
    unclean: Annotated[
        bool,
        typer.Option("--unclean", help="Elect an out-of-sync replica if no in-sync one is alive. May lose records."),
    ] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Elect the preferred leader (the first replica) of the named partitions, default all. With --unclean, asks for
    confirmation unless --yes is given.

    Example: sparklog topics elect-leaders flights
    """
    if unclean and not which:
        raise ConfigError("--unclean may lose records: name the topics or partitions")
    if unclean and which:
        what = f"electing out-of-sync leaders of {', '.join(which)}"
        confirm("Elect out-of-sync leaders? Records may be lost.", what, yes=yes)
    with open_admin(bootstrap, timeout) as admin:
        partitions = None if not which else [tp for name in which for tp in _partitions(admin, name)]
        failed = admin.elect_leaders(partitions, unclean=unclean)
    for error in failed.values():
        note(f"sparklog: {error}")
    if as_json:
        print_json([{"partition": str(tp), "error": str(error)} for tp, error in failed.items()])
    if failed:
        raise typer.Exit(1)
    if not as_json:
        print_line("every partition is led by its preferred leader")


def print_moves(moves: Sequence[MoveDescription]) -> None:
    rows = [
        (
            f"{move.topic}:{move.partition}",
            ids(move.original),
            ids(move.target),
            ids(move.isr),
            f"{move.progress:.0%}",
            human_bytes(move.leader_bytes),
            f"{human_bytes(move.throttle_bytes)}/s" if move.throttle_bytes else None,
        )
        for move in moves
    ]
    print_table(
        ("partition", "from", "to", "in sync", "copied", "of", "limit"), rows, numeric=("copied", "of", "limit")
    )


def confirm_moves(what: str, *, yes: bool) -> None:
    """Ask for confirmation of moves, because replicas outside the target are deleted.

    Raises:
        typer.Abort: the answer is no.
        ConfigError: stdin is not a terminal.
    """
    question = f"Move replicas of {what}? Replicas outside the target are deleted once the others are in sync."
    confirm(question, f"moving replicas of {what}", yes=yes)


def confirm_cancel(what: str, *, yes: bool) -> None:
    """Ask for confirmation that moves are to be cancelled.

    Raises:
        typer.Abort: the answer is no.
        ConfigError: stdin is not a terminal.
    """
    question = f"Cancel the moves of {what}? The data copied so far is deleted."
    confirm(question, f"cancelling the moves of {what}", yes=yes)


def begin_moves(
    admin: Admin,
    targets: Mapping[TopicPartition, Sequence[int]],
    throttle_bytes: int,
    *,
    wait_s: float | None,
    as_json: bool,
) -> None:
    """Begin to move partitions to their ``targets``.

    With ``wait_s``, wait until the replicas are in sync, and show a progress bar on a terminal.
    """
    begun = admin.reassign(targets, throttle_bytes=throttle_bytes)
    if begun.warning:
        note(f"sparklog: {begun.warning}")
    if not as_json:
        print_line(f"{len(begun.targets)} partitions are being moved", flush=True)
    if wait_s is not None:
        await_moves(admin, begun.targets, timeout_s=wait_s)
        if not as_json:
            print_line(f"{len(begun.targets)} partitions are moved and in sync")
    if as_json:
        print_json({"partitions": plain_targets(begun.targets), "warning": begun.warning, "done": wait_s is not None})


def await_moves(admin: Admin, targets: Mapping[TopicPartition, tuple[int, ...]], *, timeout_s: float) -> None:
    """Wait until the moves to ``targets`` are complete. Raises ClientTimeout after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    with bar("moving", 1000, unit="") as progress:
        while progress.shown and time.monotonic() < deadline:
            under_way = {TopicPartition(m.topic, m.partition): m for m in admin.reassignments()}
            left = [under_way[tp] for tp in targets if tp in under_way]
            if not left:
                break
            shares = sum(move.progress for move in left) + len(targets) - len(left)
            progress.show(int(1000 * shares / len(targets)))
            time.sleep(0.5)
        admin.wait_until_moved(targets, timeout_s=max(0.0, deadline - time.monotonic()))


def plain_targets(targets: Mapping[TopicPartition, Sequence[int]]) -> list[dict[str, Any]]:
    """Return the targets in the format of Kafka's reassignment files."""
    return [{"topic": tp.topic, "partition": tp.partition, "replicas": list(to)} for tp, to in sorted(targets.items())]


def show_moves(admin: Admin, which: Sequence[str], *, as_json: bool) -> None:
    """Print the moves in progress, either of the named topics and partitions or of all."""
    found = admin.reassignments()
    if which:
        named = [_parse(one) for one in which]
        found = [m for m in found if any(m.topic == topic and part in {None, m.partition} for topic, part in named)]
    if as_json:
        print_json([{**asdict(move), "progress": move.progress} for move in found])
    elif found:
        print_moves(found)
    else:
        print_line("no partition is being moved")


def cancel_moves(admin: Admin, which: Sequence[str], *, as_json: bool) -> None:
    """Cancel the moves in progress of the named topics and partitions."""
    named: list[TopicPartition] = []
    found: list[TopicPartition] = []
    for one in which:
        topic, partition = _parse(one)
        if partition is not None:
            named.append(TopicPartition(topic, partition))
        else:
            admin.describe_topic(topic)  # raises if the topic does not exist
            found += [TopicPartition(topic, m.partition) for m in admin.reassignments() if m.topic == topic]
    taken = admin.cancel_reassignment(named, may_have_ended=found)
    done({"cancelled": [str(tp) for tp in taken]}, f"{len(taken)} moves cancelled", as_json=as_json)


def plan(
    admin: Admin, which: str, *, to: str | None, replication_factor: int | None
) -> dict[TopicPartition, tuple[int, ...]]:
    """Return the target replicas of each partition of ``which``.

    If ``to`` is given, it lists the ids of the target brokers. Otherwise this function chooses ``replication_factor``
    brokers for each partition.
    """
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
    """Return the topic and the partition in ``which``; the partition is None for all. A topic name has no colon."""
    topic, colon, number = which.partition(":")
    if colon and not (number.isascii() and number.isdigit()):
        raise ConfigError(f"expected TOPIC or TOPIC:PARTITION, found {which!r}")
    return topic, int(number) if colon else None


def _broker_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--to {text!r}: expected broker ids such as 1,2,3")
    return tuple(map(int, parts))


def _rotated(brokers: tuple[int, ...], turn: int) -> tuple[int, ...]:
    at = turn % len(brokers)
    return brokers[at:] + brokers[:at]
