"""Run a cluster of brokers on Spark's executors until Ctrl-C or SIGTERM: ./spark-submit.sh [cluster] [arguments]"""

from __future__ import annotations

import sparklog.cli.starting  # isort: split

import argparse
import os
import sys
from pathlib import Path

from sparklog.cluster.options import (
    DEFAULT_KAFKA_PORT,
    DEFAULT_PORT,
    TRUSTED_NETWORK,
    ClusterOptions,
    add_setting,
    merged,
    read_settings,
)
from sparklog.cluster.start import run_cluster
from sparklog.errors import ConfigError

CONF = Path(os.environ.get("SPARKLOG_CONF_DIR", Path(__file__).resolve().parent.parent / "conf"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spark-submit.sh cluster", description=__doc__)
    parser.add_argument("--brokers", type=int, default=3, metavar="N", help="number of brokers (3)")
    parser.add_argument(
        "--brokers-per-executor", type=int, default=0, metavar="K", help="maximum new brokers per executor (1)"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="directory for all data of the cluster (data)",
    )
    parser.add_argument(
        "--log-dirs",
        type=lambda text: tuple(Path(path) for path in text.split(",") if path),
        default=(),
        metavar="A,B",
        help="log directories on each host, one broker per directory (created in the data directory)",
    )
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"first port assigned to new log directories ({DEFAULT_PORT})"
    )
    parser.add_argument(
        "--kafka-port",
        type=int,
        default=DEFAULT_KAFKA_PORT,
        help=f"first port for Kafka clients on this machine; 0: none ({DEFAULT_KAFKA_PORT})",
    )
    parser.add_argument(
        "--advertised-host", default="", metavar="HOST", help="address that brokers advertise to clients"
    )
    parser.add_argument("--zookeeper", default="", metavar="HOST:PORT/CHROOT", help="existing ZooKeeper (embedded)")
    parser.add_argument(
        "--broker-conf", type=Path, metavar="FILE", help="file of broker settings and topic defaults (conf/broker.conf)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="setting that overrides the file"
    )
    parser.add_argument("--secure", action="store_true", help="set up TLS, a login and ACLs; prints the client file")
    parser.add_argument(
        "--trusted-network", action="store_true", help="listen on the network without TLS and authentication"
    )
    return parser.parse_args()


def options(given: argparse.Namespace) -> ClusterOptions:
    over: dict[str, str] = dict(TRUSTED_NETWORK) if given.trusted_network else {}
    for text in given.set:
        add_setting(over, text, where="--set")
    return ClusterOptions(
        data_dir=given.data_dir,
        brokers=given.brokers,
        brokers_per_executor=given.brokers_per_executor,
        log_dirs=given.log_dirs,
        port=given.port,
        kafka_port=given.kafka_port,
        advertised_host=given.advertised_host,
        zookeeper=given.zookeeper,
        settings=merged(read_settings(given.broker_conf) if given.broker_conf else shipped("broker.conf"), over),
        zookeeper_settings=shipped("zoo.cfg"),
        secure=given.secure,
    ).checked()


def shipped(name: str) -> dict[str, str]:
    """Return the settings in a file of conf/. If there is no such file, return none, so built-in defaults apply."""
    return read_settings(CONF / name) if (CONF / name).is_file() else {}


def main() -> int:
    sparklog.cli.starting.started()
    try:
        chosen = options(arguments())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run_cluster(chosen, tell=lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
