"""``sparklog brokers``: show brokers, drain a broker, restart brokers."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from sparklog.cli.moves import await_moves, print_moves
from sparklog.cli.options import AsJson, Bootstrap, Throttle, Timeout, Yes, byte_count, confirm, open_admin
from sparklog.cli.output import done, human_bytes, note, print_json, print_line, print_table
from sparklog.client.admin.admin import Admin
from sparklog.client.admin.descriptions import BrokerDescription, ClusterDescription, Reassigned
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition, host_and_port

brokers = typer.Typer(invoke_without_command=True)

BrokerId = Annotated[int, typer.Argument(metavar="ID", show_default=False)]


@brokers.callback()
def show(context: typer.Context, bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """Show the live brokers: address, state, partitions led, replicas, size. Subcommands drain and restart brokers.

    Example: sparklog brokers --json
    """
    if context.invoked_subcommand is not None:
        # Options given before the subcommand's name apply to the subcommand too.
        context.obj = bootstrap
        return
    with open_admin(bootstrap, timeout) as admin:
        print_brokers(admin.describe_cluster(), admin.describe_brokers(), as_json=as_json)


def print_brokers(cluster: ClusterDescription, found: list[BrokerDescription], *, as_json: bool) -> None:
    if as_json:
        print_json(_plain(cluster, found))
        return
    rows = [
        (
            broker.address.broker_id,
            host_and_port(broker.address.host, broker.address.port),
            broker.address.rack,
            broker.state,
            broker.pid or None,
            broker.leaders,
            len(broker.replicas),
            human_bytes(broker.size_bytes),
        )
        for broker in found
    ]
    columns = ("broker", "address", "rack", "state", "pid", "leads", "replicas", "size")
    print_table(columns, rows, title=f"cluster {cluster.cluster_id}", numeric=("broker", "pid", "leads", "replicas"))
    for broker in found:
        if broker.error:
            note(f"sparklog: broker {broker.address.broker_id}: {broker.error}")


@brokers.command("describe")
def describe(
    context: typer.Context,
    broker_id: Annotated[int | None, typer.Argument(metavar="[ID]", show_default=False)] = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show the replicas and counters of broker ID, or of all brokers.

    Example: sparklog brokers describe 1
    """
    with open_admin(bootstrap or context.obj, timeout) as admin:
        found = admin.describe_brokers()
    if broker_id is not None:
        there = ", ".join(str(broker.address.broker_id) for broker in found)
        found = [broker for broker in found if broker.address.broker_id == broker_id]
        if not found:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {broker_id} is not alive; live brokers: {there}")
    if as_json:
        print_json([{**_plain_broker(broker), "hosted": broker.replicas} for broker in found])
        return
    for index, broker in enumerate(found):
        if index:
            print_line()
        _print_broker(broker)


def _print_broker(broker: BrokerDescription) -> None:
    address = broker.address
    for title, value in {
        "broker": f"{address.broker_id} ({broker.state})",
        "address": host_and_port(address.host, address.port),
        "rack": address.rack,
        "process": f"{broker.pid}, version {broker.version}, incarnation {address.incarnation}" if broker.pid else "",
        "directory": broker.log_dir,
        "error": broker.error,
        "counters": ", ".join(f"{name}={count}" for name, count in sorted(broker.counters.items()) if count),
    }.items():
        if value:
            print_line(f"{title:<10} {value}")
    rows = [
        (f"{one.topic}:{one.partition}", one.role, one.leader_epoch, one.log_start_offset, one.high_watermark,
         one.log_end_offset, human_bytes(one.size_bytes))
        for one in broker.replicas
    ]  # fmt: skip
    columns = ("partition", "role", "epoch", "start", "high watermark", "end", "size")
    print_table(columns, rows, numeric=("epoch", "start", "high watermark", "end", "size"))


@brokers.command("list")
def list_brokers(
    context: typer.Context, bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False
) -> None:
    """Show the live brokers. Same as 'sparklog brokers'.

    Example: sparklog brokers list
    """
    with open_admin(bootstrap or context.obj, timeout) as admin:
        print_brokers(admin.describe_cluster(), admin.describe_brokers(), as_json=as_json)


@brokers.command("drain")
def drain(
    context: typer.Context,
    broker_id: BrokerId,
    *,
    throttle: Throttle = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the broker holds no replica.")] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Maximum time to wait.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Move all replicas of a broker to the other brokers. The broker does not have to be alive.

    New topics and partitions can still be placed on the broker during the drain. With --wait, the command also moves
    these partitions, until the broker is empty. Asks for confirmation unless --yes is given.

    Example: sparklog brokers drain 2 --throttle 50MB --wait --yes
    """
    limit = byte_count(throttle, what="--throttle")
    question = (
        f"Move all replicas of broker {broker_id} to the other brokers?"
        " Its copies are deleted once the new replicas are in sync."
    )
    confirm(question, f"draining broker {broker_id}", yes=yes)
    deadline = time.monotonic() + timeout
    tell = note if as_json else _print_now
    moved: list[TopicPartition] = []
    with open_admin(bootstrap or context.obj, 30.0) as admin:
        begun = admin.drain_broker(broker_id, throttle_bytes=limit)
        tell(f"broker {broker_id}: {len(begun.targets)} partitions are being moved")
        _warn(begun)
        moved += begun.targets
        if begun.targets and not wait:
            if not as_json:
                print_moves(admin.reassignments())
            note("sparklog: partitions created meanwhile may be placed on this broker; drain it again, or use --wait")
        while begun.targets and wait:
            await_moves(admin, begun.targets, timeout_s=max(0.0, deadline - time.monotonic()))
            begun = _drain_again(admin, broker_id, limit)
            _warn(begun)
            moved += begun.targets
            if begun.targets:
                names = ", ".join(sorted(map(str, begun.targets)))
                tell(f"broker {broker_id}: {len(begun.targets)} partitions created meanwhile are being moved: {names}")
        if wait:
            tell(f"broker {broker_id}: holds no replicas")
    if as_json:
        print_json({"broker_id": broker_id, "partitions": [str(tp) for tp in moved], "empty": wait})


def _drain_again(admin: Admin, broker_id: int, limit: int) -> Reassigned:
    try:
        return admin.drain_broker(broker_id, throttle_bytes=limit)
    except BrokerError as error:
        if error.code != ErrorCode.BROKER_NOT_AVAILABLE:
            raise
        return Reassigned({})  # the broker is not alive, and no partition has a replica on it


def _warn(begun: Reassigned) -> None:
    if begun.warning:
        note(f"sparklog: {begun.warning}")


@brokers.command("restart")
def restart(
    context: typer.Context,
    broker_id: BrokerId,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Restart one broker with a controlled shutdown, and wait until it is in sync and leads its preferred partitions.

    Example: sparklog brokers restart 1
    """
    with open_admin(bootstrap or context.obj, 30.0) as admin:
        restarted = admin.rolling_restart([broker_id], timeout_s=timeout, tell=note if as_json else _print_now)
    if as_json:
        print_json({"restarted": restarted})


@brokers.command("rolling-restart")
def rolling_restart(
    context: typer.Context, bootstrap: Bootstrap = None, timeout: Timeout = 120.0, as_json: AsJson = False
) -> None:
    """Restart all brokers one at a time, each after all replicas are in sync. Clients keep working.

    --timeout limits each wait. If a broker does not come back, the remaining brokers are not restarted.

    Example: sparklog brokers rolling-restart
    """
    with open_admin(bootstrap or context.obj, 30.0) as admin:
        restarted = admin.rolling_restart(timeout_s=timeout, tell=note if as_json else _print_now)
    done({"restarted": restarted}, f"restarted {len(restarted)} brokers, every replica is in sync", as_json=as_json)


def _print_now(line: str) -> None:
    print_line(line, flush=True)


def _plain(cluster: ClusterDescription, found: list[BrokerDescription]) -> dict[str, Any]:
    return {
        "cluster_id": cluster.cluster_id,
        "controller_epoch": cluster.controller_epoch,
        "brokers": [_plain_broker(broker) for broker in found],
    }


def _plain_broker(broker: BrokerDescription) -> dict[str, Any]:
    return {
        **asdict(broker.address),
        "state": broker.state,
        "pid": broker.pid,
        "version": broker.version,
        "log_dir": broker.log_dir,
        "leaders": broker.leaders,
        "replicas": len(broker.replicas),
        "size_bytes": broker.size_bytes,
        "counters": dict(broker.counters),
        "error": broker.error,
    }
