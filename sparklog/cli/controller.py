"""``sparklog controller``: a standalone controller, on any host, that takes over when the driver's controller fails."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from sparklog.broker.lifecycle.logging_setup import LineFormatter
from sparklog.broker.lifecycle.secret_file import read_secret_file
from sparklog.cli.output import print_line
from sparklog.cluster.cluster_secret import found_on_host
from sparklog.cluster.controller_loop import ControllerLoop, ControllerStatus
from sparklog.cluster.options import add_setting, merged, read_settings
from sparklog.cluster.stop_request import StopRequest
from sparklog.config import BrokerConfig, broker_config
from sparklog.errors import ClusterError, ConfigError
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.security import zookeeper_security
from sparklog.zk.session import ZkSession


def controller(
    zookeeper: Annotated[
        str,
        typer.Option(
            "--zookeeper",
            "-z",
            envvar="SPARKLOG_ZOOKEEPER",
            metavar="HOST:PORT,.../CHROOT",
            help="ZooKeeper of the cluster; required.",
        ),
    ] = "",
    *,
    standby: Annotated[bool, typer.Option("--standby", help="Wait while another controller is active.")] = False,
    broker_conf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of the cluster's broker settings and topic defaults.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting that overrides the file; repeatable."),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SPARKLOG_SECRET_FILE",
            metavar="FILE",
            help="Copy of cluster.secret from the driver's data directory, mode 600. Not needed on brokers' hosts.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log the controller's actions.")] = False,
) -> None:
    """Run a controller until Ctrl-C or SIGTERM. The controller needs the same settings as the cluster's driver.

    Example: sparklog controller --standby --zookeeper zk1:2181,zk2:2181/sparklog --broker-conf conf/broker.conf
    """
    if not zookeeper:
        raise ConfigError("no ZooKeeper given: pass --zookeeper host:port/chroot or set SPARKLOG_ZOOKEEPER")
    over: dict[str, str] = {}
    for text in settings or []:
        add_setting(over, text, where="--set")
    chosen = merged(read_settings(broker_conf) if broker_conf else {}, over)
    config = broker_config(chosen)
    if verbose:
        output = logging.StreamHandler(sys.stderr)
        output.setFormatter(LineFormatter("%(asctime)s %(name)s: %(message)s"))
        logging.basicConfig(handlers=[output], level=logging.INFO)
    found = asyncio.run(_read_cluster(zookeeper, config))
    cluster_id, holder, proves = found
    keys = read_secret_file(secret_file) if secret_file else found_on_host(cluster_id)
    if proves and not keys:
        raise ConfigError(
            f"the brokers of cluster {cluster_id} accept requests only from a controller that knows the cluster secret:"
            " copy cluster.secret from the driver's data directory, mode 600, and pass the copy as --secret-file"
        )
    if holder and not standby:
        raise ClusterError("another controller is active: pass --standby to wait until it stops")
    _serve(
        ControllerLoop(
            zookeeper, cluster_id, settings=chosen, on_change=_StatusPrinter(zookeeper, cluster_id), keys=keys
        )
    )


async def _read_cluster(zookeeper: str, config: BrokerConfig) -> tuple[str, bool, bool]:
    """Return the cluster id, whether a controller is active, and whether any broker has the cluster secret.

    Raises:
        ClusterError: ZooKeeper does not respond, or has no cluster. This command never creates a cluster, so that a
            mistyped chroot does not create an empty one.
    """
    from sparklog.zk import paths

    session = await ZkSession.open(
        zookeeper,
        session_timeout_ms=config.session_timeout_ms,
        connect_timeout_ms=config.zk_connection_timeout_ms,
        security=zookeeper_security(config),
    )
    try:
        store = ClusterStore(session)
        cluster_id, holder = await store.cluster_id(create=False), await session.exists(paths.CONTROLLER)
        return cluster_id, holder, any(broker.proves for broker in await store.live_brokers())
    finally:
        await session.close()


def _serve(loop: ControllerLoop) -> None:
    """Run the controller until SIGTERM or SIGINT. Raises ClusterError with the reason if the controller fails."""
    asked = StopRequest()
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        loop.start()
        while not asked.wait(0.2):
            if loop.status.state == "failed":
                raise ClusterError(f"the controller failed: {loop.status.detail}")
        _say("stopping")
    finally:
        loop.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


class _StatusPrinter:
    """A callback that prints a line for each change of the controller's state. Called in the controller's thread."""

    def __init__(self, zookeeper: str, cluster_id: str) -> None:
        self._name = f"cluster {cluster_id} at {zookeeper}"
        self._said = ""

    def __call__(self, status: ControllerStatus) -> None:
        line = self._line(status)
        if line and line != self._said:
            self._said = line
            _say(line)

    def _line(self, status: ControllerStatus) -> str:
        match status.state:
            case "standby":
                return f"standing by: another controller is active in {self._name}"
            case "active":
                return f"active controller of {self._name}, epoch {status.controller_epoch}"
            case "connecting" if status.controller_epoch >= 0:
                return f"epoch {status.controller_epoch} ended: {status.detail}"
            case "connecting" if status.detail:
                return f"not active: {status.detail}"
            case _:
                return ""


def _say(line: str) -> None:
    print_line(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
