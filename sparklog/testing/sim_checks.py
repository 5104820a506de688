"""What must hold of a simulated cluster after every step. A violation raises ``Violation`` with what was found.

The checker sees everything at once, which no process does: all logs, all marks, ZooKeeper, and every answer given to
a client. One checker per partition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from sparklog.model import NO_LEADER, VersionedState
from sparklog.testing.sim_log import SimBatch, SimLog


class Violation(AssertionError):
    """A promise of the log was broken."""


class PartitionChecker:
    """Mutable; told about marks, answers, roles and ISR writes as they happen."""

    def __init__(self, name: str, logs: Mapping[int, SimLog], *, min_copies: int) -> None:
        self.name = name
        self.logs = logs
        #: replicas that must hold what is committed, at the moment it is: min(min.insync.replicas, replicas)
        self.min_copies = min_copies
        #: every batch that any replica ever showed as committed, in offset order
        self.committed: list[SimBatch] = []
        self.committed_end = 0
        #: committed end as each leader epoch left it
        self._ends: dict[int, int] = {}
        #: acks=all answers: base offset by body
        self.acked: dict[str, int] = {}
        self.leaders: dict[int, tuple[int, int]] = {}
        self.isr: tuple[int, ...] = ()
        #: ISR writes that may still arrive: expected version and set
        self.proposed: set[tuple[int, tuple[int, ...]]] = set()
        #: brokers whose page cache was lost, with the incarnation that lost it; no promise counts on them until a
        #: later incarnation is in an ISR
        self.lost: dict[int, int] = {}

    def fail(self, what: str) -> None:
        raise Violation(f"{self.name}: {what}")

    def spared(self, victim: int, node: VersionedState, *, leaving: Collection[int] = ()) -> bool:
        """Whether a member with its data is left, in the ISR and in each that may be written next, when ``victim``
        loses its page cache or leaves: the condition under which the log promises anything. Brokers that are
        ``leaving`` the ISR are not counted on."""
        sets = [node.state.isr, *(isr for version, isr in self.proposed if version >= node.version)]
        return all(set(isr) - self.lost.keys() - {victim, *leaving} for isr in sets)

    def high_watermark_moved(self, broker: int, mark: int, *, epoch: int) -> None:
        """Consistent reads: what is shown below a mark is the same wherever and whenever. StrongIsr: whatever is
        committed is on every member of the ISR."""
        log = self.logs[broker]
        if mark > log.log_end_offset:
            self.fail(f"high watermark {mark} of broker {broker} is above its log end {log.log_end_offset}")
        self.same_prefix(broker, min(mark, self.committed_end))
        if mark > self.committed_end:
            while self.committed_end < mark:
                batch = log.batch_at(self.committed_end)
                if batch is None:
                    self.fail(f"broker {broker} has no batch at {self.committed_end}")
                    return
                self.committed.append(batch)
                self.committed_end = batch.header.next_offset
            self._ends[epoch] = self.committed_end
            if self.committed_end != mark:
                self.fail(f"high watermark {mark} of broker {broker} is inside a batch")
            copies = sum(b in self.lost or log.log_end_offset >= mark for b, log in self.logs.items())
            if copies < self.min_copies:
                self.fail(f"high watermark {mark} with {copies} copies, {self.min_copies} needed")
            for member in self.isr:
                self.holds(member, self.committed_end, "in the ISR")

    def same_prefix(self, broker: int, end: int) -> None:
        log = self.logs[broker]
        if not self.committed or not end or not log.batches:
            return
        at = self._count_below(end)
        if log.batches[:at] != self.committed[:at]:
            self.fail(f"broker {broker} shows other records below {end} than were committed")

    def holds(self, broker: int, end: int, why: str) -> None:
        """What is committed below ``end`` is on the broker's log."""
        if broker in self.lost:
            return
        log, count = self.logs[broker], self._count_below(end)
        if log.batches[:count] != self.committed[:count]:
            self.fail(f"broker {broker}, {why}, ends at {log.log_end_offset}, or differs; committed end is {end}")

    def _count_below(self, end: int) -> int:
        low, high = 0, len(self.committed)
        while low < high:
            middle = (low + high) // 2
            if self.committed[middle].header.next_offset <= end:
                low = middle + 1
            else:
                high = middle
        return low

    def became_leader(self, broker: int, process: int, epoch: int) -> None:
        """One process per epoch, and it holds all that was committed in earlier ones (leader completeness). It may
        hear late of its epoch, when newer ones have committed more."""
        holder = self.leaders.setdefault(epoch, (broker, process))
        if holder != (broker, process):
            self.fail(f"epoch {epoch} led by broker {broker} process {process}, and by {holder}")
        end = max((end for earlier, end in self._ends.items() if earlier < epoch), default=0)
        self.holds(broker, end, f"leading epoch {epoch}")

    def answered(self, body: str, acks: int, base_offset: int) -> None:
        """Success for acks=all means committed."""
        if acks != -1:
            return
        self.acked[body] = base_offset
        at = self._count_below(base_offset)
        if at >= len(self.committed) or self.committed[at].body != body:
            self.fail(f"{body} acknowledged at {base_offset}, which is not committed (end {self.committed_end})")

    def isr_written(self, before: VersionedState, after: VersionedState, *, incarnation: Callable[[int], int]) -> None:
        """``incarnation`` gives the last registered one of a broker."""
        old, new = before.state, after.state
        if not new.isr:
            self.fail("empty ISR written")
        if new.leader != NO_LEADER and new.leader not in new.isr:
            self.fail(f"leader {new.leader} written outside its ISR {new.isr}")
        if new.leader != old.leader and new.leader_epoch <= old.leader_epoch:
            self.fail(f"leader changed in epoch {new.leader_epoch}")
        self.isr = new.isr
        for member in new.isr:
            if member not in old.isr:
                if self.lost.get(member, -1) < incarnation(member):
                    self.lost.pop(member, None)
                self.holds(member, self.committed_end, f"added to the ISR {new.isr}")

    def logs_match(self) -> None:
        """Two logs that hold the same epoch at the same offset are equal up to there."""
        brokers = list(self.logs)
        for i, first in enumerate(brokers):
            for second in brokers[i + 1 :]:
                a, b = self.logs[first].batches, self.logs[second].batches
                at = min(len(a), len(b))
                while at and _place(a[at - 1]) != _place(b[at - 1]):
                    at -= 1
                if a[:at] != b[:at]:
                    self.fail(f"logs of {first} and {second} agree in offset and epoch at batch {at}, not before")

    def settled(self, leader_log: SimLog) -> None:
        """After the faults have stopped: everything acknowledged is on every replica, and all logs are equal."""
        bodies = {batch.body: batch.header.base_offset for batch in leader_log.batches}
        for body, offset in self.acked.items():
            if bodies.get(body) != offset:
                self.fail(f"{body}, acknowledged at {offset}, is gone")
        for broker, log in self.logs.items():
            if log.batches != leader_log.batches:
                self.fail(
                    f"log of broker {broker} ends at {log.log_end_offset}, leader's at {leader_log.log_end_offset}"
                )


def _place(batch: SimBatch) -> tuple[int, int]:
    return batch.header.base_offset, batch.header.leader_epoch
