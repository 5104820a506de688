"""Plays seeds of the simulated cluster: ``python -m sparklog.testing.simulate --seeds 0..500``.

Prints what was played and how fast; at the first seed that breaks a promise, its trace and the command that plays that
seed again. With ``--mutant`` a variant broken on purpose is played instead, and not finding it is the failure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from sparklog.testing.sim_checks import Violation
from sparklog.testing.sim_cluster import SimCluster
from sparklog.testing.sim_controller_core import CoreController
from sparklog.testing.sim_mutants import MUTANTS

HEAL_MS = 4000


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when nothing was found (with ``--mutant``: when it was caught), 1 otherwise."""
    options = _parser().parse_args(arguments)
    if options.mutant is not None:
        mutant = next(mutant for mutant in MUTANTS if mutant.name == options.mutant)
        return 0 if _play(options, mutant.run) else 1
    return 1 if _play(options, lambda seed: _run(seed, options)) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparklog.testing.simulate", description=__doc__)
    parser.add_argument("--seeds", type=_seed_range, default=range(500), metavar="A..B", help="seeds A to B-1 (0..500)")
    parser.add_argument("--brokers", type=int, default=3, metavar="N", help="brokers (3)")
    parser.add_argument("--partitions", type=int, default=6, metavar="N", help="partitions (6)")
    parser.add_argument("--steps", type=int, default=6000, metavar="MS", help="simulated milliseconds of faults (6000)")
    parser.add_argument(
        "--page-cache-loss", type=float, default=0.3, metavar="P", help="chance that a crash takes unflushed data (0.3)"
    )
    parser.add_argument(
        "--mutant", choices=[mutant.name for mutant in MUTANTS], help="play a variant broken on purpose"
    )
    return parser


def _seed_range(text: str) -> range:
    first, separator, end = text.partition("..")
    try:
        seeds = range(int(first), int(end)) if separator else range(int(first), int(first) + 1)
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r}: expected A..B with A < B, or one seed")
    return seeds


def _run(seed: int, options: argparse.Namespace) -> None:
    cluster = SimCluster(
        seed,
        brokers=options.brokers,
        partitions=options.partitions,
        controller_type=CoreController,
        page_cache_loss=options.page_cache_loss,
    )
    cluster.run(fault_ms=options.steps, heal_ms=HEAL_MS)


def _play(options: argparse.Namespace, run: Callable[[int], None]) -> bool:
    """Play seeds until one breaks a promise; whether one did."""
    began = time.perf_counter()
    played, broken, seed = 0, None, 0
    for seed in options.seeds:
        played += 1
        try:
            run(seed)
        except Violation as violation:
            broken = violation
            break
    wall_s = time.perf_counter() - began
    simulated_s = played * (options.steps + HEAL_MS) / 1000
    print(  # noqa: T201  this is a command
        f"{played} schedules of {options.brokers} brokers and {options.partitions} partitions in {wall_s:.1f} s: "
        f"{played / wall_s:.1f} schedules/s, {1000 * wall_s / simulated_s:.1f} ms for each simulated second"
    )
    if broken is not None:
        print(broken)  # noqa: T201
        print(f"again: {_again(options, seed)}")  # noqa: T201
    return broken is not None


def _again(options: argparse.Namespace, seed: int) -> str:
    command = f"python -m sparklog.testing.simulate --seeds {seed}"
    if options.mutant is not None:
        return f"{command} --mutant '{options.mutant}'"
    return (
        f"{command} --brokers {options.brokers} --partitions {options.partitions} --steps {options.steps} "
        f"--page-cache-loss {options.page_cache_loss}"
    )


if __name__ == "__main__":
    sys.exit(main())
