"""``sparklog zookeeper``: recovery from the loss of ZooKeeper's data, and the ACLs of its nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from sparklog.broker.lifecycle.secret_file import read_secret_file
from sparklog.cli.options import AsJson, Yes, confirm
from sparklog.cli.output import note, print_json, print_table
from sparklog.cli.zookeeper_options import Connect, SecretFile, ZookeeperConfig, security_in
from sparklog.cluster.cluster_secret import driver_secret_file, found_on_host
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.controller.rebuild import RebuiltCluster, rebuild_cluster
from sparklog.errors import ConfigError, StorageError
from sparklog.model import DirectoryInventory
from sparklog.protocol.proof import KeyRing
from sparklog.storage.survey import survey
from sparklog.zk.rebuild_store import RebuildStore
from sparklog.zk.security import ZooKeeperSecurity
from sparklog.zk.session import ZkSession

zookeeper = typer.Typer(
    help="Rebuild ZooKeeper's data from the brokers' log directories, close its nodes to strangers, open them.",
    no_args_is_help=True,
)


@zookeeper.command("inventory")
def inventory(
    log_dirs: Annotated[list[Path], typer.Argument(metavar="DIRECTORY...", help="Log directories of this host.")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the inventory to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the content of one host's log directories, for a rebuild on another host. Changes nothing. Stop the brokers
    first.

    Example: sparklog zookeeper inventory /disk1/log /disk2/log -o host-1.json
    """
    found = [survey(path) for path in log_dirs]
    if output is not None:
        output.write_bytes(msgspec.json.encode(found) + b"\n")
        note(f"sparklog: wrote the inventory of {len(log_dirs)} log directories to {output}")
    if as_json:
        print_json(found)
    elif output is None:
        columns = ("directory", "cluster", "broker", "logs", "topics", "problems")
        rows = [
            (one.path, one.cluster_id, one.broker_id, len(one.logs), len(one.topics), len(one.problems))
            for one in found
        ]
        print_table(columns, rows, numeric=columns[2:])


@zookeeper.command("rebuild")
def rebuild(
    log_dirs: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIRECTORY]...", help="Log directories of this host.")
    ] = None,
    *,
    inventories: Annotated[
        list[Path] | None,
        typer.Option(
            "--inventory", metavar="FILE", help="Output of 'zookeeper inventory' on another host; repeatable."
        ),
    ] = None,
    connect: Connect = "",
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Data directory of a cluster with an embedded ZooKeeper, which the command starts.",
        ),
    ] = None,
    secret_file: SecretFile = None,
    zookeeper_config: ZookeeperConfig = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the changes without writing them.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Write topics, assignments and counters from the brokers' log directories into an empty ZooKeeper.

    Pass the directories of all brokers: in each partition, the replica with the highest log end offset becomes the
    leader. Stop the cluster first. The command fails if ZooKeeper already has topics. --data-dir uses the log
    directories below that directory.

    Example: sparklog zookeeper rebuild /disk1/log --inventory host-2.json --zookeeper zk1:2181/sparklog
    """
    if bool(connect) == bool(data_dir):
        raise ConfigError("pass either --zookeeper or --data-dir as the target of the rebuild")
    security = security_in(zookeeper_config)
    paths = list(log_dirs or [])
    if data_dir is not None:
        paths += sorted(path for path in data_dir.glob("slot-*") if path.is_dir() and path not in paths)
    found = [survey(path) for path in paths] + [one for file in inventories or [] for one in _read(file)]
    cluster = rebuild_cluster(found)
    _show(cluster, as_json=as_json)
    if dry_run:
        return
    confirm(f"Write this to ZooKeeper at {connect or data_dir}?", "rebuilding ZooKeeper", yes=yes)
    if secret_file is None and data_dir is not None and driver_secret_file(data_dir).exists():
        secret_file = driver_secret_file(data_dir)
    keys = read_secret_file(secret_file) if secret_file is not None else found_on_host(cluster.cluster_id)
    if data_dir is None:
        asyncio.run(_write(connect, cluster, keys, security))
        return
    server = EmbeddedZookeeper.start(data_dir.resolve() / "zookeeper", security=security)
    try:
        asyncio.run(_write(server.connect, cluster, keys, security))
    finally:
        if not server.adopted:
            server.stop()


def _read(file: Path) -> list[DirectoryInventory]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[DirectoryInventory])
    except msgspec.DecodeError as error:
        raise StorageError(f"{file}: not an inventory of log directories: {error}") from None


async def _write(connect: str, cluster: RebuiltCluster, keys: KeyRing, security: ZooKeeperSecurity) -> None:
    session = await ZkSession.open(connect, keys=keys, security=security)
    try:
        store = RebuildStore(session)
        await store.begin(cluster.cluster_id)
        await store.counters(
            controller_epoch=cluster.controller_epoch,
            producer_ids=cluster.producer_ids,
            next_broker_id=max(cluster.brokers) + 1,
        )
        for broker_id, incarnation in cluster.brokers.items():
            await store.broker(broker_id, incarnation)
        for record, states in cluster.topics:
            await store.topic(record, states)
    finally:
        await session.close()
    note(f"sparklog: wrote {len(cluster.topics)} topics of cluster {cluster.cluster_id} to ZooKeeper at {connect}")


def _show(cluster: RebuiltCluster, *, as_json: bool) -> None:
    topics = [
        {
            "topic": topic.record.name,
            "topic_id": topic.record.topic_id,
            "partitions": len(topic.record.assignment),
            "with_records": len(topic.states),
            "leader_epoch": max((state.leader_epoch for state in topic.states.values()), default=0),
        }
        for topic in cluster.topics
    ]
    if as_json:
        print_json(
            {
                "cluster_id": cluster.cluster_id,
                "controller_epoch": cluster.controller_epoch,
                "brokers": sorted(cluster.brokers),
                "topics": topics,
                "findings": list(cluster.findings),
            }
        )
        return
    print_table(
        ("topic", "topic id", "partitions", "with records", "leader epoch"),
        [tuple(topic.values()) for topic in topics],
        title=f"cluster {cluster.cluster_id}, brokers {', '.join(map(str, sorted(cluster.brokers)))}",
        numeric=("partitions", "with records", "leader epoch"),
    )
    for finding in cluster.findings:
        note(f"sparklog: {finding}")
