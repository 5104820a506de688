"""Archive topics in Delta tables, exactly once, until Ctrl-C or SIGTERM: ./spark-submit.sh archive [arguments]"""

from __future__ import annotations

import sparklog.cli.starting  # noqa: F401  before the imports that take a long time

# isort: split

import argparse
import os
import signal
import sys

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from sparklog.cluster.spark_access import share_secret
from sparklog.cluster.spark_environment import close_to_others
from sparklog.cluster.start import end_spark
from sparklog.cluster.stop_request import StopRequest
from sparklog.delta.job import error_line, maintain, run_archives
from sparklog.delta.options import (
    ArchiveOptions,
    MaintenanceOptions,
    parse_every,
    parse_retention,
    parse_schemas,
    parse_size,
    parse_trigger,
)
from sparklog.errors import SparklogError
from sparklog.spark.configure import configure

BOOTSTRAP = os.environ.get("SPARKLOG_BOOTSTRAP") or os.environ.get("SPARKLOG_BOOTSTRAP_SERVERS")


def names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spark-submit.sh archive", description=__doc__)
    parser.add_argument(
        "--topics", type=names, required=True, metavar="A,B", help="topics to archive, one table per topic"
    )
    parser.add_argument("--to", required=True, metavar="PATH", help="directory of the tables: PATH/<topic>")
    parser.add_argument("--bootstrap", default=BOOTSTRAP, metavar="HOST:PORT", help="$SPARKLOG_BOOTSTRAP")
    parser.add_argument(
        "--mode",
        choices=("append", "upsert"),
        default="append",
        help="append: all records; upsert: the newest record of each key, without deleted keys (append)",
    )
    parser.add_argument(
        "--trigger",
        default="30s",
        metavar="T",
        help="interval of batches (30s), or available-now: archive existing records and exit",
    )
    parser.add_argument("--group", metavar="NAME", help="consumer group that reports the lag (archive-<topic>)")
    parser.add_argument(
        "--partition-by", type=names, metavar="A,B", help="partition columns of new tables (_date), or none"
    )
    parser.add_argument(
        "--schema",
        action="append",
        default=[],
        metavar="[TOPIC=]DDL",
        help="parse values as JSON objects with these columns: 'customer string, price double'",
    )
    parser.add_argument(
        "--max-offsets-per-batch", type=int, default=5_000_000, metavar="N", help="maximum offsets per commit (5000000)"
    )
    parser.add_argument(
        "--fail-on-data-loss",
        choices=("true", "false"),
        default="true",
        help="stop archiving a topic if records were deleted before they were archived (true)",
    )
    parser.add_argument(
        "--target-file-size", default="128m", metavar="SIZE", help="target size of compacted files (128m)"
    )
    parser.add_argument(
        "--optimize-every", default="1h", metavar="T", help="interval of compaction of small files, or never (1h)"
    )
    parser.add_argument(
        "--vacuum-every", default="1d", metavar="T", help="interval of removal of unreferenced files, or never (1d)"
    )
    parser.add_argument(
        "--retain",
        metavar="T",
        help="how long unreferenced files are kept for readers, at least 7d (the table's setting, or 7d)",
    )
    parser.add_argument(
        "--maintain-only",
        action="store_true",
        help="run the compaction and vacuum that are due, archive nothing, and exit",
    )
    given = parser.parse_args()
    if not (given.bootstrap or given.maintain_only):
        parser.error("the following arguments are required: --bootstrap")
    return given


def options(given: argparse.Namespace) -> list[ArchiveOptions]:
    schemas = parse_schemas(given.schema, given.topics, parse=StructType.fromDDL)
    partition_by = () if given.partition_by == ("none",) else given.partition_by
    maintenance = MaintenanceOptions(
        target_file_size=parse_size("--target-file-size", given.target_file_size),
        optimize_every_s=parse_every("--optimize-every", given.optimize_every),
        vacuum_every_s=parse_every("--vacuum-every", given.vacuum_every),
        retain_h=parse_retention(given.retain) if given.retain else None,
    )
    return [
        ArchiveOptions(
            bootstrap=given.bootstrap or "",
            topic=topic,
            to=given.to,
            group=given.group or f"archive-{topic}",
            partition_by=partition_by,
            interval=parse_trigger(given.trigger),
            max_offsets=given.max_offsets_per_batch,
            fail_on_data_loss=given.fail_on_data_loss == "true",
            json=schemas.get(topic),
            mode=given.mode,
            maintenance=maintenance,
        )
        for topic in given.topics
    ]


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    given = arguments()
    stopping = StopRequest()
    close_to_others(os.environ)
    share_secret()
    spark = SparkSession.builder.appName("sparklog archive").getOrCreate()
    # Until this point, Ctrl-C ends the job immediately. The handlers are installed after Spark's own handler, which
    # would cancel the running batch.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        wanted = options(given)
        if given.maintain_only:
            failed = maintain(spark, wanted, stopping=stopping, tell=tell)
        else:
            configure(spark, bootstrap=given.bootstrap)
            failed = run_archives(spark, wanted, stopping=stopping, tell=tell)
    except SparklogError as error:
        print(f"error: {error_line(error)}", file=sys.stderr)
        return 2
    finally:
        end_spark(spark.sparkContext)
    for topic, reason in failed.items():
        print(f"error: {topic}: {error_line(reason)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
