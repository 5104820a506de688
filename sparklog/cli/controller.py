"""``sparklog controller``: a controller of its own, on any host, that takes over when the driver's goes away."""

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
from sparklog.config import broker_config
from sparklog.errors import ClusterError, ConfigError
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.session import ZkSession


def controller(
    zookeeper: Annotated[
        str,
        typer.Option(
            "--zookeeper", "-z", envvar="SPARKLOG_ZOOKEEPER", metavar="HOST:PORT,.../CHROOT", help="Required."
        ),
    ] = "",
    *,
    standby: Annotated[bool, typer.Option("--standby", help="Wait while another controller is at work.")] = False,
    broker_conf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The cluster's broker settings and topic defaults.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting over that file's; repeatable.")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SPARKLOG_SECRET_FILE",
            metavar="FILE",
            help="A copy of cluster.secret in the driver's data directory, mode 600. Not needed on the brokers' hosts.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what it does.")] = False,
) -> None:
    """Run a controller until Ctrl-C or SIGTERM. Give it the settings that the cluster's driver has.

    Example: sparklog controller --standby --zookeeper zk1:2181,zk2:2181/sparklog --broker-conf conf/broker.conf
    """
    if not zookeeper:
        raise ConfigError("no ZooKeeper named: give --zookeeper host:port/chroot or set SPARKLOG_ZOOKEEPER")
    over: dict[str, str] = {}
    for text in settings or []:
        add_setting(over, text, where="--set")
    chosen = merged(read_settings(broker_conf) if broker_conf else {}, over)
    config = broker_config(chosen)
    if verbose:
        output = logging.StreamHandler(sys.stderr)
        output.setFormatter(LineFormatter("%(asctime)s %(name)s: %(message)s"))
        logging.basicConfig(handlers=[output], level=logging.INFO)
    found = asyncio.run(_look(zookeeper, config.session_timeout_ms, config.zk_connection_timeout_ms))
    cluster_id, holder, proves = found
    keys = read_secret_file(secret_file) if secret_file else found_on_host(cluster_id)
    if proves and not keys:
        raise ConfigError(
            f"the brokers of cluster {cluster_id} take orders only from a controller that knows the cluster's secret:"
            " copy cluster.secret from the driver's data directory, mode 600, and name the copy by --secret-file"
        )
    if holder and not standby:
        raise ClusterError("another controller is at work: give --standby to wait for its end")
    _serve(
        ControllerLoop(
            zookeeper, cluster_id, settings=chosen, on_change=_StatusPrinter(zookeeper, cluster_id), keys=keys
        )
    )


async def _look(zookeeper: str, session_timeout_ms: int, connect_timeout_ms: int) -> tuple[str, bool, bool]:
    """Return the id of the cluster that is there, whether a controller is at work, and whether a broker proves itself.

    Raises:
        ClusterError: nobody answers; there is no cluster: one is not made here, where a mistyped chroot would do it.
    """
    from sparklog.zk import paths

    session = await ZkSession.open(
        zookeeper, session_timeout_ms=session_timeout_ms, connect_timeout_ms=connect_timeout_ms
    )
    try:
        store = ClusterStore(session)
        cluster_id, holder = await store.cluster_id(create=False), await session.exists(paths.CONTROLLER)
        return cluster_id, holder, any(broker.proves for broker in await store.live_brokers())
    finally:
        await session.close()


def _serve(loop: ControllerLoop) -> None:
    """Until a signal, or until it can do no more. Raises ClusterError with the reason then."""
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
    """Says in one line each what has become of the controller. Called in the controller's thread."""

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
                return f"standing by: another controller is at work in {self._name}"
            case "active":
                return f"controller of {self._name} in epoch {status.controller_epoch}"
            case "connecting" if status.controller_epoch >= 0:
                return f"epoch {status.controller_epoch} is over: {status.detail}"
            case "connecting" if status.detail:
                return f"not at work: {status.detail}"
            case _:
                return ""


def _say(line: str) -> None:
    print_line(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
