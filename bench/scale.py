"""The cost of thousands of partitions: ``bench/scale --help``.

Three brokers, replication factor 3, min.insync.replicas 2, acks=all. For a number of partitions in one topic, the bench
measures the time until they are created and in sync, and until each has one record; the processor time of idle brokers;
a controlled shutdown under a steady stream; SIGKILL and the recovery; and batches over all partitions against batches
over six. ``--core``: the controller's core alone at 100 brokers and 200,000 partitions.

Brokers, ZooKeeper, the controller and the load share this machine; what else runs on it is kept with the figures.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from bench import machine, scale_cluster, scale_core, scale_slots, scale_table
from bench.ending import end_in_order
from bench.scale_picture import svg


def main() -> int:
    options = _parse()
    end_in_order()
    path = options.out / "results.json"
    if options.core:
        print(scale_core.text(scale_core.measure()))
        return 0
    if options.slots:
        print(scale_slots.text(scale_slots.measure(share=0.15, megabytes=150)))
        return 0
    if options.show:
        print(scale_table.text(scale_table.load(path)))
        return 0
    results = {} if options.quick else scale_table.load(path)
    print(f"{os.cpu_count()} cores, load before {os.getloadavg()[0]:.2f}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="scale-", dir=options.dir))
    try:
        for partitions in options.partitions:
            results[partitions] = {**results.get(partitions, {}), **_measured(partitions, options, directory)}
            if not options.quick:
                scale_table.save(path, results, machine.describe())
                (options.out / "cost.svg").write_text(svg(results))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(scale_table.text(results))
    print("\n".join(["", *scale_table.missed(results)]))
    return 0


def _measured(partitions: int, options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Return the medians of ``options.runs`` runs, each with a new cluster."""
    runs = [
        scale_cluster.measure(partitions, pieces=options.pieces, directory=directory, quick=options.quick)
        for _ in range(options.runs)
    ]
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {**found, "others": max(run["others"] for run in runs)}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bench/scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--partitions", nargs="+", type=int, default=[100, 1_000, 5_000, 10_000])
    parser.add_argument(
        "--pieces",
        nargs="+",
        default=scale_cluster.PIECES,
        choices=scale_cluster.PIECES,
        help="pieces of work to measure (default: all)",
    )
    parser.add_argument("--runs", type=int, default=1, help="runs of each number of partitions; the medians count")
    parser.add_argument(
        "--core", action="store_true", help="measure the controller's core alone, at 200,000 partitions"
    )
    parser.add_argument("--slots", action="store_true", help="measure two broker slots against one")
    parser.add_argument(
        "--quick", action="store_true", help="as little work as possible, to try the programs; stores nothing"
    )
    parser.add_argument("--out", type=Path, default=Path("build/scale"), help="folder of results.json and the picture")
    parser.add_argument("--show", action="store_true", help="measure nothing, and print the results in the folder")
    parser.add_argument("--dir", type=Path, help="directory of the brokers' data during the run; default: the system's")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
