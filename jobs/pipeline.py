"""Run several exactly-once steps over topics on a new cluster: ./spark-submit.sh pipeline [arguments]"""

from __future__ import annotations

import sparklog.cli.starting  # isort: split

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from rich.console import Console

from sparklog.cluster.local import LocalCluster
from sparklog.cluster.spark_access import share_secret
from sparklog.cluster.spark_environment import prepare, remove_spark_home
from sparklog.cluster.start import active_here, end_spark
from sparklog.cluster.stop_request import StopRequest, exit_on_first, unless_asked
from sparklog.demo.pipeline import run
from sparklog.demo.story import Story
from sparklog.errors import SparklogError
from sparklog.escaping import escaped

BROKERS = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spark-submit.sh pipeline", description=__doc__)
    parser.add_argument("--flights", type=int, metavar="N", help="process only the first N flights (all 336,776)")
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="keep topics and checkpoints in this directory; a later run continues from them",
    )
    return parser.parse_args()


def submit(data_dir: Path, flights: int | None, console: Console, stop: StopRequest) -> bool:
    prepare(os.environ, brokers=BROKERS, data_dir=data_dir)
    story = Story(console)
    story.tell("starting", "Spark, ZooKeeper, brokers")
    share_secret()
    spark = SparkSession.builder.appName("sparklog pipeline").getOrCreate()
    try:
        with LocalCluster(spark, brokers=BROKERS, data_dir=data_dir / "cluster") as cluster:
            story.tell("cluster ready", f"{BROKERS} brokers at {cluster.bootstrap}")
            return unless_asked(
                stop, lambda: run(active_here(spark), scratch=data_dir / "scratch", flights=flights, tell=story.tell)
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
    chosen = arguments()
    with tempfile.TemporaryDirectory(prefix="sparklog-pipeline-", ignore_cleanup_errors=True) as temporary:
        data_dir = chosen.data_dir or Path(temporary)
        data_dir.mkdir(parents=True, exist_ok=True)
        try:
            is_complete = submit(data_dir.resolve(), chosen.flights, console, stop)
        except SparklogError as error:
            print(f"error: {escaped(str(error))}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    print("Every complete day occurs exactly once." if is_complete else "Not equal to the result of a batch job.")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
