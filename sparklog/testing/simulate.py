"""The command that plays seeds of the simulated cluster: ``python -m sparklog.testing.simulate --seeds 0..500``.

It prints the number of runs and their speed. If a seed violates a guarantee, the command searches for a small case that
violates the same guarantee, and prints the trace of the case and the command that plays it again. With ``--mutant`` it
plays a variant that is broken on purpose, and fails if no seed finds the bug.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from sparklog.testing.sim_case import Case, Found, parse_actions
from sparklog.testing.sim_minimise import BUDGET, minimised
from sparklog.testing.sim_mutants import BY_NAME

HEAL_MS = 4000
#: The number of seeds that a worker process gets at once.
CHUNK = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if no guarantee was violated (with ``--mutant``: if one was), otherwise 1."""
    options = _parser().parse_args(arguments)
    cases = [_case(seed, options) for seed in options.seeds]
    broken = _play(cases, options)
    for case, found in broken[: 1 if options.minimise else 0]:
        _show(case, found, options)
    sound = options.mutant is None or BY_NAME[options.mutant].sound
    return bool(broken) if sound else not broken


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparklog.testing.simulate", description=__doc__)
    add = parser.add_argument
    add("--seeds", type=_seed_range, default=range(500), metavar="A..B", help="seeds A to B-1 (0..500)")
    add("--brokers", type=int, default=3, metavar="N", help="brokers (3)")
    add("--partitions", type=int, metavar="N", help="partitions (6; 1 for most mutants)")
    add("--steps", type=int, default=6000, metavar="MS", help="simulated milliseconds of faults (6000)")
    add("--heal", type=int, default=HEAL_MS, metavar="MS", help=f"simulated milliseconds without ({HEAL_MS})")
    add("--page-cache-loss", type=float, metavar="P", help="chance that a crash takes unflushed data (0.3)")
    add("--mutant", choices=list(BY_NAME), metavar="NAME", help=f"a variant broken on purpose: {', '.join(BY_NAME)}")
    add("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    add("--all", action="store_true", help="continue after a seed that breaks a promise; list all, minimise the first")
    add("--no-minimise", dest="minimise", action="store_false", help="do not look for a smaller case, print no trace")
    add("--budget", type=int, default=BUDGET, metavar="N", help=f"runs to spend on a smaller case ({BUDGET})")
    add("--only", type=_actions, metavar="N@MS,...", help="play these actions of the seed's schedule, at these times")
    add("--salt", type=int, default=0, metavar="N", help="another network for the same actions")
    add("--calm", action="store_true", help="a network that loses, doubles and delays nothing")
    add("--produce-ms", type=int, metavar="MS", help="mean pause between two produces of a partition")
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


def _actions(text: str) -> tuple[tuple[int, int], ...]:
    try:
        return parse_actions(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NUMBER@MILLISECONDS,... or none") from None


def _case(seed: int, options: argparse.Namespace) -> Case:
    partitions = options.partitions or (6 if options.mutant is None else BY_NAME[options.mutant].partitions)
    return Case(
        seed,
        mutant=options.mutant,
        brokers=options.brokers,
        partitions=partitions,
        fault_ms=options.steps,
        heal_ms=options.heal,
        page_cache_loss=options.page_cache_loss,
        only=options.only,
        salt=options.salt,
        calm=options.calm,
        produce_ms=options.produce_ms,
    )


def _play(cases: Sequence[Case], options: argparse.Namespace) -> list[tuple[Case, Found]]:
    """Play the cases until one violates a guarantee, or all with ``--all``; return the cases that violated one."""
    began = time.perf_counter()
    played, broken = 0, []
    with _results(cases, options.jobs) as results:
        for case, found in zip(cases, results, strict=False):
            played += 1
            if found is None:
                continue
            broken.append((case, found))
            if not options.all:
                break
            print(f"seed {case.seed} at {found.at_ms} ms: {found.what}", flush=True)  # noqa: T201  this is a command
    wall_s = time.perf_counter() - began
    simulated_s = played * (options.steps + options.heal) / 1000
    text = (
        f"{played} schedules of {options.brokers} brokers and {cases[0].partitions} partitions in {wall_s:.1f} s: "
        f"{played / wall_s:.1f} schedules/s, {1000 * wall_s / simulated_s:.1f} ms for each simulated second"
    )
    print(text + (f", {len(broken)} broke a promise" if options.all else ""), flush=True)  # noqa: T201
    return broken


@contextmanager
def _results(cases: Sequence[Case], jobs: int) -> Iterator[Iterable[Found | None]]:
    """Yield the result of each case in order, lazily."""
    if jobs == 1:
        yield map(Case.play, cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            yield pool.map(Case.play, cases, chunksize=CHUNK)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _show(case: Case, found: Found, options: argparse.Namespace) -> None:
    """Print the violation in the smallest case found that has it."""

    def tell(line: str) -> None:
        print(line, flush=True)  # noqa: T201

    tell(f"seed {case.seed} at {found.at_ms} ms: {found.what}")
    smallest = case if case.only is not None else minimised(case, budget=options.budget, tell=tell)
    play = smallest.play_traced()
    tell("\n".join(play.lines))
    if play.found is not None:
        tell(f"{play.found.at_ms:>6} {play.found.what}")
    tell(f"again: {smallest.command()}")


if __name__ == "__main__":
    sys.exit(main())
