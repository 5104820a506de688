"""``sparklog cluster``: start a cluster on Spark, show its status, stop it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sparklog.cli.options import AsJson, Bootstrap, Timeout, Yes, confirm, open_admin
from sparklog.cli.output import done, human_bytes, print_json, print_line, print_lines
from sparklog.client.admin.admin import Admin
from sparklog.client.errors import ClientTimeout
from sparklog.cluster.client_file import client_file
from sparklog.cluster.driver_pidfile import DriverPidfile, noted_driver
from sparklog.cluster.options import (
    DEFAULT_KAFKA_PORT,
    DEFAULT_PORT,
    TRUSTED_NETWORK,
    ClusterOptions,
    add_setting,
    create_data_dir,
    merged,
    read_settings,
)
from sparklog.cluster.process import is_alive, send_signal
from sparklog.errors import ClusterError, ConfigError
from sparklog.extras import require_spark
from sparklog.net.client_security import CLIENT_CONFIG
from sparklog.storage.disk import private_opener

cluster = typer.Typer(help="Start a cluster, show its status, stop it.", no_args_is_help=True)

DataDir = Annotated[
    Path, typer.Option("--data-dir", "-d", metavar="DIR", help="Directory for all data of the cluster.")
]

_LOG = "cluster.log"


@cluster.command("start")
def start(
    *,
    brokers: Annotated[int, typer.Option("--brokers", min=1, help="Number of brokers.")] = 3,
    data_dir: DataDir = Path("data"),
    port: Annotated[int, typer.Option("--port", help="First port assigned to new log directories.")] = DEFAULT_PORT,
    kafka_port: Annotated[
        int, typer.Option("--kafka-port", help="First port for Kafka clients on this machine; 0: none.")
    ] = DEFAULT_KAFKA_PORT,
    master: Annotated[
        str | None, typer.Option(metavar="URL", help="Spark master. Default: local-cluster, one executor per broker.")
    ] = None,
    log_dirs: Annotated[
        str | None, typer.Option(metavar="A,B", help="Log directories on each host, one broker per directory.")
    ] = None,
    zookeeper: Annotated[
        str,
        typer.Option("--zookeeper", "-z", metavar="HOST:PORT/CHROOT", help="Existing ZooKeeper; default: embedded."),
    ] = "",
    advertised_host: Annotated[
        str, typer.Option(metavar="HOST", help="Address that brokers advertise to clients.")
    ] = "",
    broker_conf: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of broker settings and topic defaults. Default: conf/broker.conf."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting that overrides the file; repeatable."),
    ] = None,
    trusted_network: Annotated[
        bool,
        typer.Option(
            "--trusted-network", help="Listen on the network without TLS and authentication: network.trusted=true."
        ),
    ] = False,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="Set up TLS, a login and ACLs; prints the client file."),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the cluster is ready, and leave it running.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Maximum time to wait with --detach.")
    ] = 180.0,
) -> None:
    """Start a cluster on this machine, or with --master on a Spark cluster. The cluster runs until Ctrl-C, unless
    --detach is given. A cluster started on existing data keeps all of it, and adopts brokers that are still running.

    Example: sparklog cluster start --brokers 3 --data-dir data --detach
    """
    chosen = ClusterOptions(
        data_dir=data_dir,
        brokers=brokers,
        port=port,
        kafka_port=kafka_port,
        log_dirs=tuple(Path(path) for path in (log_dirs or "").split(",") if path),
        zookeeper=zookeeper,
        advertised_host=advertised_host,
        settings=merged(
            _settings("broker.conf", broker_conf),
            merged(_given(settings or []), TRUSTED_NETWORK if trusted_network else {}),
        ),
        zookeeper_settings=_settings("zoo.cfg", None),
        secure=secure,
    ).checked()
    require_spark("cluster start")
    if running := noted_driver(data_dir):
        raise ClusterError(f"process {running.process.pid} already runs the cluster in {data_dir}")
    if detach:
        _detach(data_dir, timeout)
        return
    if master is not None:
        os.environ["PYSPARK_SUBMIT_ARGS"] = (
            f"--master {master} {os.environ.get('PYSPARK_SUBMIT_ARGS', 'pyspark-shell')}"
        )
    if _conf_dir() is not None:
        os.environ.setdefault("SPARK_CONF_DIR", str(_conf_dir()))
    from sparklog.cluster.start import run_cluster  # importing Spark takes a second, and only this command needs it

    raise typer.Exit(run_cluster(chosen, tell=print_lines))


def _detach(data_dir: Path, timeout_s: float) -> None:
    """Run the same command without --detach in a new process session, with its output in a file.

    Raises:
        ClusterError: the process ended, or was not ready in time; the message has the last lines of its output.
    """
    create_data_dir(data_dir)
    log = data_dir / _LOG
    words = [word for word in sys.argv[1:] if word != "--detach"]
    with open(log, "wb", opener=private_opener) as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "sparklog.cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s
    while (found := noted_driver(data_dir)) is None:
        if process.poll() is not None:
            raise ClusterError(f"the cluster did not start: {_last_words(log)} (full output: {log})")
        if time.monotonic() > deadline:
            raise ClusterError(f"the cluster is not ready after {timeout_s:g} s; it is still starting, see {log}")
        time.sleep(0.1)
    print_line(f"running as process {found.process.pid}; brokers at {found.bootstrap}")
    if found.kafka:
        print_line(f"Kafka clients connect to {found.kafka}")
    if (clients := client_file(data_dir)).exists():
        print_line(f"clients log in with --client-config {clients}")


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if line.startswith(("error:", "sparklog:"))), lines[-1] if lines else ""
    )


def _conf_dir() -> Path | None:
    named = os.environ.get("SPARKLOG_CONF_DIR")
    found = Path(named) if named else Path("conf")
    return found.resolve() if (found / "broker.conf").is_file() else None


def _settings(name: str, file: Path | None) -> dict[str, str]:
    """Return the settings in ``file``, or else in the file ``name`` in conf/; empty if neither exists."""
    if file is not None:
        return read_settings(file)
    directory = _conf_dir()
    return read_settings(directory / name) if directory is not None and (directory / name).is_file() else {}


def _given(settings: list[str]) -> dict[str, str]:
    over: dict[str, str] = {}
    for text in settings:
        add_setting(over, text, where="--set")
    return over


@cluster.command("status")
def status(
    *,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", "-d", metavar="DIR", help="Data directory of the running cluster.")
    ] = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 10.0,
    as_json: AsJson = False,
) -> None:
    """Show a summary of the cluster. The exit code is 1 while a partition has no leader or is under-replicated.

    Example: sparklog cluster status
    """
    driver = noted_driver(data_dir) if data_dir is not None else None
    if data_dir is not None and driver is None:
        raise ClusterError(f"no cluster driver for {data_dir} runs on this host")
    security = _own_client_file(data_dir)
    with open_admin(driver.bootstrap if driver is not None else bootstrap, timeout, security=security) as admin:
        found = _status(admin, driver)
    if as_json:
        print_json(found)
    else:
        for name, value in found.items():
            shown = (
                human_bytes(value) if name == "size_bytes" else _counted(value) if isinstance(value, list) else value
            )
            print_line(f"{name.removesuffix('_bytes').replace('_', ' '):<18} {'-' if shown in {'', None} else shown}")
    if found["without_leader"] or found["under_replicated"] or found["not_answering"]:
        raise typer.Exit(1)


def _own_client_file(data_dir: Path | None) -> Path | None:
    """Return the client file of a secure cluster in ``data_dir``, unless the user has named another one."""
    if data_dir is None or os.environ.get(CLIENT_CONFIG):
        return None
    found = client_file(data_dir)
    return found if found.exists() else None


def _counted(broker_ids: list[int]) -> str:
    """Return the number of brokers and their ids, such as ``3 (0, 1, 2)``.

    The id of a single broker alone could be mistaken for a number of brokers.
    """
    return f"{len(broker_ids)} ({', '.join(map(str, broker_ids))})" if broker_ids else "0"


def _status(admin: Admin, driver: DriverPidfile | None) -> dict[str, Any]:
    described = admin.describe_cluster()
    brokers = admin.describe_brokers()
    topics = admin.describe_topics()
    partitions = [part for topic in topics for part in topic.partitions]
    return {
        "cluster_id": described.cluster_id,
        "driver": driver.process.pid if driver is not None else None,
        "controller_epoch": described.controller_epoch,
        "brokers": [broker.address.broker_id for broker in brokers],
        "kafka_bootstrap": ",".join(broker.kafka for broker in brokers if broker.kafka) or None,
        "not_answering": [broker.address.broker_id for broker in brokers if broker.error],
        "topics": len(topics),
        "partitions": len(partitions),
        "under_replicated": sum(part.under_replicated for part in partitions),
        "without_leader": sum(part.leader is None for part in partitions),
        "moving": len(admin.reassignments()),
        "size_bytes": sum(broker.size_bytes for broker in brokers),
    }


@cluster.command("stop")
def stop(
    data_dir: DataDir = Path("data"),
    yes: Yes = False,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Maximum time to wait.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Stop the cluster of a data directory cleanly: brokers refuse new writes, let followers catch up, and write all
    data to disk. Asks for confirmation unless --yes is given.

    Example: sparklog cluster stop --data-dir data --yes
    """
    if not data_dir.is_dir():
        raise ConfigError(f"--data-dir {data_dir}: no such directory")
    found = noted_driver(data_dir)
    if found is None:
        raise ClusterError(f"no cluster driver for {data_dir} runs on this host")
    confirm(f"Stop the cluster in {data_dir}?", f"stopping the cluster in {data_dir}", yes=yes)
    began = time.monotonic()
    send_signal(found.process, signal.SIGTERM)
    while is_alive(found.process):
        if time.monotonic() - began > timeout:
            raise ClientTimeout(f"process {found.process.pid} did not stop within {timeout:g} s")
        time.sleep(0.05)
    seconds = time.monotonic() - began
    done({"process": found.process.pid, "seconds": round(seconds, 3)}, f"stopped in {seconds:.1f} s", as_json=as_json)
