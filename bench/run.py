"""The comparison of sparklog with Apache Kafka on this machine: one table of ratios, as text, as JSON and as a picture.

Each system has three brokers, replication factor 3, acks=all and min.insync.replicas 2. All brokers and clients run on
this machine; the two systems run in turns. Kafka's jars are fetched once (see ``bench/kafka_jars.py``), its Python
clients come with ``./spark-submit.sh --setup bench``. If Kafka is not available, only sparklog's figures are printed,
without ratios.

With ``--compiled`` as the first argument, it measures the compiled modules from ``./spark-submit.sh --setup compiled``.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from bench import machine, report
from bench.ending import end_in_order
from bench.measure import Line, Row, measure
from bench.picture import svg
from bench.rows import ROWS
from bench.sides import Bench

_RUNS = 3
_NAMES = [row.name for row in ROWS]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    end_in_order()
    if options.secure:
        from bench import secure  # needs the library cryptography

        print(secure.text(secure.measure_all(options.runs, options.scale, quick=options.quick)))
        return 0
    results = options.out / "results.json"
    if options.show:
        print(report.text(report.load(results)))
        return 0
    # A session with Delta starts with a request to Maven Central, which takes seconds.
    everything = [row for row in ROWS if not (options.quick and row.needs_delta)]
    chosen = [row for row in ROWS if row.name in options.rows] if options.rows else everything
    with_kafka = {"yes": True, "no": False, "cached": None}[options.kafka or ("no" if options.quick else "yes")]
    lines: list[Line] = []
    failed: list[str] = []
    with_delta = any(row.needs_delta for row in chosen)
    with Bench(quick=options.quick, scale=options.scale, with_kafka=with_kafka, with_delta=with_delta) as bench:
        for row in chosen:
            found = _measured(row, bench, options.runs)
            if found is None:
                failed.append(row.name)
                continue
            lines += found
            if not options.quick:  # also for an error that ends the bench later
                lines = report.merged(results, found, _NAMES)
                report.save(results, lines, machine.describe())
                (options.out / "results.svg").write_text(svg(lines))
        missing = bench.missing
    if options.quick:
        print("Tiny sizes: whether it works, and nothing else.\n")
    if missing:
        print(f"Kafka is missing, and so are the ratios: {missing}\n")
    print(report.text(lines))
    if failed:
        print(f"\nFailed: {', '.join(failed)}")
    return 1 if failed else 0


def _measured(row: Row, bench: Bench, runs: int) -> list[Line] | None:
    """Measure a row. Return None if a run failed, after printing the error. The other rows are still measured."""
    began = time.monotonic()
    try:
        found = measure(row, bench, runs)
        return [line._replace(goal=None) for line in found] if bench.quick else report.named(found, bench.scale)
    except Exception:
        bench.say(traceback.format_exc())
        return None
    finally:
        bench.say(f"{row.name}: {time.monotonic() - began:.1f} s")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench/run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--rows", type=_names, default=[], help=f"rows to measure, of {','.join(_NAMES)} (default: all)"
    )
    parser.add_argument("--runs", type=int, default=_RUNS, help="runs of each contestant, in turns; the medians count")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the numbers of records")
    quick = "tiny sizes, one run, no Kafka, and Delta only if named; to try the programs"
    parser.add_argument("--quick", action="store_true", help=quick)
    secure = "measure what TLS, logins and ACLs cost, in at least 10 pairs of turns; no Kafka, no results.json"
    parser.add_argument("--secure", action="store_true", help=secure)
    parser.add_argument(
        "--kafka", choices=["yes", "no", "cached"], help="cached: only with jars that are already here (default: yes)"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of results.json and the picture")
    parser.add_argument("--show", action="store_true", help="measure nothing, and print the results in the folder")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    found = text.split(",")
    for name in found:
        if name not in _NAMES:
            raise argparse.ArgumentTypeError(f"no row {name!r}: there are {', '.join(_NAMES)}")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
