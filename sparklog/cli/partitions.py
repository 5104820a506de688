"""``sparklog partitions``: reassignment plans, leader elections, and set-aside logs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from sparklog.cli.moves import (
    begin_moves,
    cancel_moves,
    confirm_cancel,
    confirm_moves,
    elect_leaders,
    plain_targets,
    plan,
    show_moves,
)
from sparklog.cli.options import AsJson, Bootstrap, Throttle, Timeout, Yes, byte_count, open_admin, topic_names
from sparklog.cli.output import ids, note, print_json, print_table
from sparklog.cli.set_aside import set_aside
from sparklog.errors import ConfigError
from sparklog.model import TopicPartition

partitions = typer.Typer(help="Reassign replicas and elect leaders.", no_args_is_help=True)
reassign = typer.Typer(help="Move replicas: plan, apply, progress, cancel.", no_args_is_help=True)
partitions.add_typer(reassign, name="reassign")
partitions.add_typer(set_aside, name="set-aside")

Which = Annotated[
    list[str], typer.Argument(metavar="TOPIC[:PARTITION]...", show_default=False, autocompletion=topic_names)
]


class _ReplicaMove(msgspec.Struct):
    topic: str
    partition: int
    replicas: tuple[int, ...]


class _MovePlan(msgspec.Struct):
    """The content of a plan file. Kafka's reassignment files are accepted too."""

    partitions: list[_ReplicaMove]
    version: int = 1


@reassign.command("plan")
def make_plan(
    which: Which,
    *,
    to: Annotated[
        str | None, typer.Option(metavar="ID,...", help="Target brokers, preferred leader first.", show_default=False)
    ] = None,
    replication_factor: Annotated[
        int | None, typer.Option("--replication-factor", "-r", help="Number of replicas; the cluster places them.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan to this file.")
    ] = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Print a reassignment plan without changing anything. The plan is JSON; review and edit it before 'apply'.

    --to with a whole topic assigns these brokers to every partition, each partition starting with the next broker.

    Example: sparklog partitions reassign plan flights --to 1,2 -o plan.json
    """
    if (to is None) == (replication_factor is None):
        raise ConfigError("pass exactly one of --to, --replication-factor")
    with open_admin(bootstrap, timeout) as admin:
        targets = {
            tp: target
            for one in which
            for tp, target in plan(admin, one, to=to, replication_factor=replication_factor).items()
        }
        now = {
            TopicPartition(topic.name, part.partition): part.replicas
            for topic in admin.describe_topics(sorted({tp.topic for tp in targets}))
            for part in topic.partitions
        }
    made = {"version": 1, "partitions": plain_targets(targets)}
    if output is not None:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
        note(f"sparklog: wrote a plan for {len(targets)} partitions to {output}")
    if as_json or (output is None and not sys.stdout.isatty()):
        print_json(made)
    else:
        rows = [(str(tp), ids(now.get(tp, ())), ids(target)) for tp, target in sorted(targets.items())]
        print_table(("partition", "from", "to"), rows)


@reassign.command("apply")
def apply(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file; '-' for standard input.")],
    *,
    throttle: Throttle = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return once the new replicas are in sync.")] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Maximum time to wait.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Begin the moves of a plan. Replicas that are not in the plan are deleted once the replicas in the plan are in
    sync. Asks for confirmation unless --yes is given.

    Example: sparklog partitions reassign apply plan.json --throttle 50MB --wait --yes
    """
    targets = _read(file)
    limit = byte_count(throttle, what="--throttle")
    confirm_moves(f"the {len(targets)} partitions of {file}", yes=yes)
    with open_admin(bootstrap, 30.0) as admin:
        begin_moves(admin, targets, limit, wait_s=timeout if wait else None, as_json=as_json)


@reassign.command("progress")
def progress(
    which: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC[:PARTITION]...]", show_default=False, autocompletion=topic_names),
    ] = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show the moves in progress, and how much of each is copied.

    Example: sparklog partitions reassign progress
    """
    with open_admin(bootstrap, timeout) as admin:
        show_moves(admin, which or [], as_json=as_json)


@reassign.command("cancel")
def cancel(
    which: Which, yes: Yes = False, bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False
) -> None:
    """Cancel moves in progress: the original replicas stay, copied data is deleted. Asks for confirmation unless --yes
    is given.

    Example: sparklog partitions reassign cancel flights --yes
    """
    confirm_cancel(", ".join(which), yes=yes)
    with open_admin(bootstrap, timeout) as admin:
        cancel_moves(admin, which, as_json=as_json)


partitions.command(
    "elect",
    help="""Elect the preferred leader (the first replica) of the named partitions, default all. With --unclean, asks
    for confirmation unless --yes is given.

    Example: sparklog partitions elect flights
    """,
)(elect_leaders)


def _read(file: Path) -> dict[TopicPartition, tuple[int, ...]]:
    text = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        found = msgspec.json.decode(text, type=_MovePlan).partitions
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file}: not a plan in the format of 'partitions reassign plan': {error}") from None
    if not found:
        raise ConfigError(f"{file}: the plan has no partitions")
    return {TopicPartition(move.topic, move.partition): move.replicas for move in found}
