"""``sparklog zookeeper secure`` and ``open``: the ACLs of a cluster's nodes in ZooKeeper."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import typer

from sparklog.broker.lifecycle.secret_file import read_secret_file
from sparklog.cli.options import AsJson, Yes, confirm
from sparklog.cli.output import done
from sparklog.cli.progress import bar
from sparklog.cli.zookeeper_options import Connect, SecretFile, ZookeeperConfig, security_in
from sparklog.cluster.cluster_secret import driver_secret_file
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.zookeeper_acls import secure, secure_embedded, unsecure, unsecure_embedded
from sparklog.errors import ConfigError
from sparklog.protocol.proof import KeyRing
from sparklog.zk.security import ZooKeeperSecurity
from sparklog.zk.tree_acls import TreeCount

DataDir = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads this on Python 3.10 as well
    typer.Option(metavar="DIRECTORY", help="Data directory of a cluster with an embedded ZooKeeper."),
]
Force = Annotated[bool, typer.Option("--force", help="Continue although running processes have other settings.")]


def secure_tree(
    connect: Connect = "",
    *,
    data_dir: DataDir = None,
    zookeeper_config: ZookeeperConfig = None,
    secret_file: SecretFile = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Close all ZooKeeper nodes of a cluster. Sessions without the cluster's credentials can then not change any node,
    and cannot read the nodes of users, tokens and ACLs. The cluster may be running. Repeat the command if it was
    interrupted.

    Example: sparklog zookeeper secure --zookeeper zk1:2181/sparklog --zookeeper-config conf/broker.conf
    """
    security = security_in(_one_target(connect, data_dir, zookeeper_config))
    with bar("closing nodes", None, unit="nodes") as shown:
        if data_dir is None:
            count = asyncio.run(secure(connect, security, force=force, progress=shown.show))
        else:
            keys = _keys(data_dir, secret_file)
            with _embedded(data_dir, security) as address:
                count = asyncio.run(secure_embedded(address, keys, security, force=force, progress=shown.show))
    _report(count, "closed", as_json=as_json)


def open_tree(
    connect: Connect = "",
    *,
    data_dir: DataDir = None,
    zookeeper_config: ZookeeperConfig = None,
    secret_file: SecretFile = None,
    with_secrets: Annotated[
        bool, typer.Option("--with-secrets", help="Open the nodes of users, tokens and ACLs as well.")
    ] = False,
    force: Force = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Open all ZooKeeper nodes of a cluster to every session, as without zookeeper.set.acl. The cluster may be running,
    except with --data-dir. Repeat the command if it was interrupted.

    Example: sparklog zookeeper open --zookeeper zk1:2181/sparklog --zookeeper-config conf/broker.conf
    """
    security = security_in(_one_target(connect, data_dir, zookeeper_config))
    confirm(
        f"Let every program that reaches ZooKeeper at {connect or data_dir} change the cluster?",
        "opening ZooKeeper",
        yes=yes,
    )
    with bar("opening nodes", None, unit="nodes") as shown:
        if data_dir is None:
            count = asyncio.run(
                unsecure(connect, security, with_secrets=with_secrets, force=force, progress=shown.show)
            )
        else:
            keys = _keys(data_dir, secret_file)
            with _embedded(data_dir, security) as address:
                count = asyncio.run(
                    unsecure_embedded(address, keys, security, with_secrets=with_secrets, progress=shown.show)
                )
    _report(count, "open", as_json=as_json)


def _one_target(connect: str, data_dir: Path | None, config: Path | None) -> Path | None:
    if bool(connect) == bool(data_dir):
        raise ConfigError("pass either --zookeeper or --data-dir")
    return config


def _keys(data_dir: Path, secret_file: Path | None) -> KeyRing:
    return read_secret_file(secret_file or driver_secret_file(data_dir))


@contextmanager
def _embedded(data_dir: Path, security: ZooKeeperSecurity) -> Iterator[str]:
    """Yield the address of the running embedded ZooKeeper, or start it for the ``with`` block."""
    directory = data_dir.resolve() / "zookeeper"
    if not directory.is_dir():
        raise ConfigError(f"--data-dir {data_dir}: it has no embedded ZooKeeper")
    server = EmbeddedZookeeper.start(directory, security=security)
    try:
        yield server.connect
    finally:
        if server.adopted:
            server.leave()
        else:
            server.stop()


def _report(count: TreeCount, what: str, *, as_json: bool) -> None:
    done(
        {"nodes": count.nodes, "changed": count.changed},
        f"{count.nodes} nodes are {what}; the ACLs of {count.changed} were changed",
        as_json=as_json,
    )
