"""``sparklog brokers``: what runs where, emptying a broker, restarting them all."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from sparklog.cli.moves import print_moves
from sparklog.cli.options import FIRST_CONTACT_S, AsJson, Bootstrap, Throttle, Timeout, byte_count, servers
from sparklog.cli.output import human_bytes, note, print_json, print_table
from sparklog.client.admin import Admin
from sparklog.client.descriptions import BrokerDescription, ClusterDescription, Reassigned
from sparklog.errors import BrokerError, ErrorCode

brokers = typer.Typer(invoke_without_command=True)

BrokerId = Annotated[int, typer.Argument(metavar="ID", show_default=False)]


@brokers.callback()
def show(context: typer.Context, bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """Show the live brokers: address, state, partitions led, replicas, size. Commands empty a broker, or restart them.

    Example: sparklog brokers --json
    """
    if context.invoked_subcommand is not None:
        # What is said before the command's name holds for it as well.
        context.obj = bootstrap
        return
    with _admin(bootstrap, timeout) as admin:
        cluster = admin.describe_cluster()
        found = admin.describe_brokers()
    if as_json:
        print_json(_plain(cluster, found))
        return
    rows = [
        (
            broker.address.broker_id,
            f"{broker.address.host}:{broker.address.port}",
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


@brokers.command("drain")
def drain(
    context: typer.Context,
    broker_id: BrokerId,
    *,
    throttle: Throttle = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it holds nothing any more.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Wait no longer than this.")] = 3600.0,
) -> None:
    """Move everything a broker holds to the others. It need not be alive.

    Nothing keeps new topics and partitions off the broker: with --wait it is looked at again when the moves are done,
    until it is found empty.

    Example: sparklog brokers drain 2 --throttle 50MB --wait
    """
    limit = byte_count(throttle, what="--throttle")
    deadline = time.monotonic() + timeout
    with _admin(bootstrap or context.obj, 30.0) as admin:
        begun = admin.drain_broker(broker_id, throttle_bytes=limit)
        _tell(f"broker {broker_id}: {len(begun.targets)} partitions move")
        if not wait:
            _warn(begun)
            if begun.targets:
                print_moves(admin.reassignments())
                note("sparklog: what is made meanwhile may land on it: drain it again, or with --wait")
            return
        while begun.targets:
            _warn(begun)
            admin.wait_until_moved(begun.targets, timeout_s=max(0.0, deadline - time.monotonic()))
            begun = _drain_again(admin, broker_id, limit)
            if begun.targets:
                names = ", ".join(sorted(map(str, begun.targets)))
                _tell(f"broker {broker_id}: {len(begun.targets)} more that were made meanwhile move: {names}")
        _tell(f"broker {broker_id}: holds no replica any more")


def _drain_again(admin: Admin, broker_id: int, limit: int) -> Reassigned:
    try:
        return admin.drain_broker(broker_id, throttle_bytes=limit)
    except BrokerError as error:
        if error.code != ErrorCode.BROKER_NOT_AVAILABLE:
            raise
        return Reassigned({})  # not alive, and nothing names it any more


def _warn(begun: Reassigned) -> None:
    if begun.warning:
        note(f"sparklog: {begun.warning}")


@brokers.command("restart")
def restart(context: typer.Context, broker_id: BrokerId, bootstrap: Bootstrap = None, timeout: Timeout = 120.0) -> None:
    """Restart one broker in an orderly way, and wait until it is in sync and leads again what it should.

    Example: sparklog brokers restart 1
    """
    with _admin(bootstrap or context.obj, 30.0) as admin:
        admin.rolling_restart([broker_id], timeout_s=timeout, tell=_tell)


@brokers.command("rolling-restart")
def rolling_restart(context: typer.Context, bootstrap: Bootstrap = None, timeout: Timeout = 120.0) -> None:
    """Restart all brokers, one after the other, each when every replica is in sync. Clients go on.

    --timeout bounds each wait. Where a broker does not come back, those after it are left as they are.

    Example: sparklog brokers rolling-restart
    """
    with _admin(bootstrap or context.obj, 30.0) as admin:
        restarted = admin.rolling_restart(timeout_s=timeout, tell=_tell)
    print(f"{len(restarted)} brokers restarted, every replica in sync")


def _admin(bootstrap: str | None, timeout_s: float) -> Admin:
    return Admin(servers(bootstrap), timeout_s=timeout_s, first_contact_s=FIRST_CONTACT_S)


def _tell(line: str) -> None:
    print(line, flush=True)


def _plain(cluster: ClusterDescription, found: list[BrokerDescription]) -> dict[str, Any]:
    return {
        "cluster_id": cluster.cluster_id,
        "controller_epoch": cluster.controller_epoch,
        "brokers": [
            {
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
            for broker in found
        ],
    }
