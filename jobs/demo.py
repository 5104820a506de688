"""Write real data, kill an executor and a broker, and read the same data: ./spark-submit.sh demo [arguments]"""

from __future__ import annotations

import sparklog.cli.starting  # isort: split

import argparse
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from rich.console import Console

from sparklog.broker.lifecycle.logging_setup import LineFormatter
from sparklog.cluster.local import LocalCluster
from sparklog.cluster.spark_access import share_secret
from sparklog.cluster.spark_environment import prepare, remove_spark_home
from sparklog.cluster.start import active_here, end_spark
from sparklog.cluster.stop_request import StopRequest, exit_on_first, unless_asked
from sparklog.demo.run import run
from sparklog.demo.story import Story
from sparklog.errors import SparklogError
from sparklog.escaping import escaped

BROKERS = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spark-submit.sh demo", description=__doc__)
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="keep the cluster's data in this new directory (a temporary directory)",
    )
    return parser.parse_args()


def demonstrate(data_dir: Path, console: Console, stop: StopRequest, *, keep: bool) -> bool:
    prepare(os.environ, brokers=BROKERS, data_dir=data_dir)
    log = logging.FileHandler(data_dir / "demo.log") if keep else logging.NullHandler()
    log.setFormatter(LineFormatter("%(asctime)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[log], level=logging.INFO)
    story = Story(console)
    share_secret()
    spark = SparkSession.builder.appName("sparklog demo").getOrCreate()
    try:
        with LocalCluster(spark, brokers=BROKERS, data_dir=data_dir / "cluster") as cluster:
            story.tell("cluster ready", f"{BROKERS} brokers at {cluster.bootstrap}")
            return unless_asked(
                stop, lambda: run(active_here(spark), cluster.bootstrap, scratch=data_dir / "scratch", story=story)
            )
    finally:
        spark.stop()
        end_spark(spark.sparkContext)
        remove_spark_home(data_dir)


def main() -> int:
    sparklog.cli.starting.started()
    stop = StopRequest()
    exit_on_first(signal.SIGTERM, stop=stop)  # so that the exit stops the cluster
    console = Console(width=None if sys.stdout.isatty() else 110)
    chosen = arguments().data_dir
    if chosen is not None and chosen.exists():
        console.print(f"error: {chosen} exists; pass a new directory", markup=False)
        return 2
    with tempfile.TemporaryDirectory(prefix="sparklog-demo-", ignore_cleanup_errors=True) as temporary:
        data_dir = chosen or Path(temporary)
        data_dir.mkdir(parents=True, exist_ok=True)
        try:
            is_equal = demonstrate(data_dir.resolve(), console, stop, keep=chosen is not None)
        except SparklogError as error:
            console.print(f"error: {escaped(str(error))}", markup=False)
            return 1
        except KeyboardInterrupt:
            return 130
    console.print("[bold green]All data is equal." if is_equal else "[bold red]Not equal: see the table.")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
