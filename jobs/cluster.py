"""Runs a cluster of brokers on Spark's executors until Ctrl-C or SIGTERM: ./spark-submit.sh [cluster] [arguments]"""

from __future__ import annotations

import sparklog.cli.starting  # isort: split

import argparse
import os
import sys
from pathlib import Path

from sparklog.cluster.options import DEFAULT_PORT, ClusterOptions, add_setting, merged, read_settings
from sparklog.cluster.start import run_cluster
from sparklog.errors import ConfigError

CONF = Path(os.environ.get("SPARKLOG_CONF_DIR", Path(__file__).resolve().parent.parent / "conf"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spark-submit.sh cluster", description=__doc__)
    parser.add_argument("--brokers", type=int, default=3, metavar="N", help="brokers in the cluster (3)")
    parser.add_argument(
        "--brokers-per-executor", type=int, default=0, metavar="K", help="new brokers an executor may start (1)"
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where all data goes (data)")
    parser.add_argument(
        "--log-dirs",
        type=lambda text: tuple(Path(path) for path in text.split(",") if path),
        default=(),
        metavar="A,B",
        help="log directories of each host, one broker each (made below the data directory)",
    )
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"first port for new log directories ({DEFAULT_PORT})"
    )
    parser.add_argument("--advertised-host", default="", metavar="HOST", help="address that clients are given")
    parser.add_argument(
        "--zookeeper", default="", metavar="HOST:PORT/CHROOT", help="a ZooKeeper that is there (one is started)"
    )
    parser.add_argument(
        "--broker-conf", type=Path, metavar="FILE", help="broker settings and topic defaults (conf/broker.conf)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one setting over that file's")
    return parser.parse_args()


def options(given: argparse.Namespace) -> ClusterOptions:
    over: dict[str, str] = {}
    for text in given.set:
        add_setting(over, text, where="--set")
    return ClusterOptions(
        data_dir=given.data_dir,
        brokers=given.brokers,
        brokers_per_executor=given.brokers_per_executor,
        log_dirs=given.log_dirs,
        port=given.port,
        advertised_host=given.advertised_host,
        zookeeper=given.zookeeper,
        settings=merged(read_settings(given.broker_conf) if given.broker_conf else shipped("broker.conf"), over),
        zookeeper_settings=shipped("zoo.cfg"),
    ).checked()


def shipped(name: str) -> dict[str, str]:
    """Settings of a file in conf/; none, and so the built-in ones, where a job runs without it."""
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
