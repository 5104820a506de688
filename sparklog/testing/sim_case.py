"""The parameters of one run of the simulator.

With the parameters, the run can be played again, even in another process or with fewer actions.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from sparklog.replica.replica import Replica
from sparklog.testing.sim_checks import SimViolation
from sparklog.testing.sim_cluster import SimCluster
from sparklog.testing.sim_mutants import BY_NAME, SOUND, Mutant
from sparklog.testing.sim_network import FINE
from sparklog.testing.sim_schedule import Action, draw_schedule
from sparklog.testing.sim_trace import about, traced

#: The length of the schedule in which actions are found by their numbers.
SCHEDULE_MS = 120_000
NO_ACTIONS = "none"


class Found(NamedTuple):
    """A violation of one of the log's guarantees that a run of the simulator has found."""

    at_ms: int
    #: The description, without seed and trace.
    what: str
    #: The name of the guarantee.
    rule: str
    #: The partition of the violation; empty if it does not concern a single partition.
    partition: str


class Play(NamedTuple):
    """The outcome of a run: the violation, or None, and the lines of the trace."""

    found: Found | None
    lines: tuple[str, ...]


class _CaseCluster(SimCluster):
    """A cluster that plays the selected actions of its seed's schedule."""

    case: Case

    def schedule(self, fault_ms: int) -> tuple[Action, ...]:
        if self.case.only is None:
            return self._drawn(fault_ms)
        known = {action.number: action for action in self._drawn(SCHEDULE_MS)}
        return tuple(known[number]._replace(at_ms=at_ms) for number, at_ms in self.case.only if number in known)

    def _drawn(self, until_ms: int) -> tuple[Action, ...]:
        likely = dict(self.case.variant.likely)
        return draw_schedule(Random(f"schedule {self.seed}"), until_ms=until_ms, restless=self.restless, likely=likely)


@dataclass(frozen=True, slots=True)
class Case:
    """The parameters of one run of the simulator. It is a small value that can be pickled.

    ``mutant`` is the name of a deliberately broken variant; None means the production code.
    """

    seed: int
    mutant: str | None = None
    brokers: int = 3
    partitions: int = 6
    fault_ms: int = 6000
    heal_ms: int = 4000
    page_cache_loss: float | None = None
    #: The actions to play: their numbers in the seed's schedule, and their times. None means all actions, as scheduled.
    only: tuple[tuple[int, int], ...] | None = None
    #: The seed of the network. Another number plays the same actions with other delays and losses.
    salt: int = 0
    #: True for a network that neither loses nor duplicates messages.
    calm: bool = False
    #: The mean pause between two batches of a partition's producer; None means the default of the cluster.
    produce_ms: int | None = None

    def schedule(self) -> tuple[Action, ...]:
        """Return the actions on the cluster that the run plays."""
        return self._cluster().schedule(self.fault_ms)

    def play(self) -> Found | None:
        """Play the case; return the violation, or None if there was none."""
        return self._run(self._cluster())

    def play_counted(self) -> tuple[Found | None, Counter[str]]:
        """Play the case; return the violation and the number of events of each kind."""
        cluster = self._cluster()
        return self._run(cluster), cluster.world.happened

    def play_traced(self) -> Play:
        """Play the case; return the violation and the trace of the partition that it concerns.

        Without a violation, the trace has the steps of all replicas.
        """
        cluster = self._cluster()
        cluster.world.trace = deque()

        def tell(replica: Replica, line: str) -> None:
            for broker in cluster.brokers.values():
                for tp, hosted in broker.hosted.items():
                    if hosted.replica is replica:
                        cluster.world.note(f"b{broker.broker_id} {tp} {line}")

        cluster.replica_type = traced(cluster.replica_type, tell)
        found = self._run(cluster)
        lines = list(cluster.world.trace)
        if found is not None and found.partition:
            lines = about(found.partition, lines)
        return Play(found, tuple(lines))

    @property
    def variant(self) -> Mutant:
        return SOUND if self.mutant is None else BY_NAME[self.mutant]

    def _cluster(self) -> SimCluster:
        variant = self.variant
        loss = variant.page_cache_loss if self.page_cache_loss is None else self.page_cache_loss
        cluster = _CaseCluster(
            self.seed,
            brokers=self.brokers,
            partitions=self.partitions,
            replica_type=variant.replica_type,
            controller_type=variant.controller_type,
            broker_type=variant.broker_type,
            log_type=variant.log_type,
            lease_type=variant.lease_type,
            check_cores=variant.sound,
            weather=variant.weather,
            restless=variant.restless,
            page_cache_loss=loss,
            salt=self.salt,
            produce_ms=self.produce_ms,
            kafka=variant.kafka,
        )
        cluster.case = self
        if self.calm:
            cluster.world.weather = FINE
        return cluster

    def _run(self, cluster: SimCluster) -> Found | None:
        with self.variant.applied(), _without_collector_and_log():
            try:
                cluster.run(fault_ms=self.fault_ms, heal_ms=self.heal_ms)
            except SimViolation as broken:
                return Found(cluster.world.now_ms, str(broken.__cause__ or broken), broken.rule, broken.partition)
        return None

    def command(self) -> str:
        """Return the command line that plays the case again."""
        words = [f"python -m sparklog.testing.simulate --seeds {self.seed}"]
        if self.mutant is not None:
            words.append(f"--mutant '{self.mutant}'")
        words.append(f"--brokers {self.brokers} --partitions {self.partitions} --steps {self.fault_ms}")
        words.append(f"--heal {self.heal_ms}")
        if self.page_cache_loss is not None:
            words.append(f"--page-cache-loss {self.page_cache_loss}")
        if self.only is not None:
            words.append(f"--only {format_actions(self.only)}")
        if self.salt:
            words.append(f"--salt {self.salt}")
        if self.calm:
            words.append("--calm")
        if self.produce_ms is not None:
            words.append(f"--produce-ms {self.produce_ms}")
        return " ".join(words)


@contextmanager
def _without_collector_and_log() -> Iterator[None]:
    """Disable the cyclic garbage collector, which took a fifth of a run's time and finds few cycles.

    Disable the log as well: a coordinator's log has a line for each fault.
    """
    enabled, disabled = gc.isenabled(), logging.root.manager.disable
    gc.disable()
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        if enabled:
            gc.enable()


def format_actions(only: tuple[tuple[int, int], ...]) -> str:
    """Return actions (number, time) as a text that ``parse_actions`` reads, such as ``7@300,12@410``."""
    return ",".join(f"{number}@{at_ms}" for number, at_ms in only) or NO_ACTIONS


def parse_actions(text: str) -> tuple[tuple[int, int], ...]:
    """Return the actions (number, time) in a text from ``format_actions``.

    Raises:
        ValueError: the text has another format.
    """
    if text == NO_ACTIONS:
        return ()
    pairs = (part.split("@") for part in text.split(","))
    return tuple((int(number), int(at_ms)) for number, at_ms in pairs)
