"""The invariants of a simulated cluster, checked after every step. A broken invariant raises ``SimViolation``.

A checker sees the state of the whole cluster at once: all logs, all high watermarks, ZooKeeper, and every response to a
client. There is one checker for each partition of a topic id. Each check examines only what the last step has changed;
by induction, all invariants hold. For example, if the first batches of a log equal the committed batches, they stay
equal until the log is truncated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection
from typing import NoReturn

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH, NO_LEADER, NO_PRODUCER, LeaderAndIsr, Reassignment, VersionedState
from sparklog.testing.sim_log import SimBatch, SimLog

_Place = tuple[int, int]


class SimViolation(AssertionError):
    """The error for a violated guarantee of the log. ``rule`` names the guarantee.

    ``partition`` is empty if the violation does not concern a single partition.
    """

    def __init__(self, what: str, *, rule: str = "", partition: str = "") -> None:
        super().__init__(what)
        self.rule = rule
        self.partition = partition


class PartitionChecker:
    """The checker of the invariants of one partition. A part of ``SimCluster``.

    The simulation calls it for each append, truncation, response, and write of partition state.
    """

    def __init__(self, name: str, replicas: tuple[int, ...], *, min_isr: int) -> None:
        self.name = name
        self.replicas = replicas
        self.min_isr = min_isr
        #: The lowest replication factor so far, because leaders may learn late of a higher one.
        self._fewest = len(replicas)
        #: The logs of the brokers that host the partition now.
        self.logs: dict[int, SimLog] = {}
        #: Every batch that any replica has ever had below its high watermark, in offset order. ``_next_offsets`` has
        #: their ends.
        self.committed: list[SimBatch] = []
        self.committed_end = 0
        self._next_offsets: list[int] = []
        #: By leader epoch: the end of the committed records when the epoch ended.
        self._ends: dict[int, int] = {}
        #: The responses with acks=all: the base offset by the batch's body.
        self.acked: dict[str, int] = {}
        self.leaders: dict[int, tuple[int, int]] = {}
        self.isr: tuple[int, ...] = ()
        #: The last write of the partition's state: the states before and after it.
        self._last: tuple[VersionedState | None, VersionedState] | None = None
        self._move: Reassignment | None = None
        #: The ISR writes that may still arrive in ZooKeeper: the expected version and the new ISR.
        self.proposed: set[tuple[int, tuple[int, ...]]] = set()
        #: The brokers whose page cache was lost, with the incarnation that lost it. Their logs need not have committed
        #: records until a later incarnation is in an ISR.
        self.lost: dict[int, int] = {}
        #: True after a power failure of all hosts or an unclean election. The log of the next leader then counts as
        #: committed.
        self.bereft = False
        #: True if an unclean election is allowed by the topic's setting or by a request.
        self.unclean_allowed = False
        #: ``unclean`` is the number of unclean elections. ``_line`` is the epoch of the last unclean election; later
        #: commits in earlier epochs do not count.
        self.unclean = 0
        self._line = NO_EPOCH
        #: Each batch that was ever appended, by base offset and epoch, with base offset and epoch of the batch before
        #: it.
        self._places: dict[_Place, tuple[SimBatch, _Place | None]] = {}
        #: If the producers are Kafka's: the function to call for each committed batch, instead of the check of
        #: idempotence.
        self.on_commit: Callable[[SimBatch], None] | None = None
        #: By producer id: the epoch and the next sequence after the committed batches.
        self._sequences: dict[int, tuple[int, int]] = {}

    def assigned(self, replicas: tuple[int, ...], move: Reassignment | None) -> None:
        """Store the partition's replicas and its reassignment (None if there is none) from new metadata of the topic.

        If a reassignment has ended with this metadata, check its result.
        """
        ended, self._move = self._move, move
        if ended is not None and move is None and set(self.replicas) != set(replicas):
            self._move_ended(ended)
        self.replicas = replicas
        factor = min(len(move.target), len(move.original)) if move else len(replicas)
        self._fewest = min(self._fewest, factor)

    def _move_ended(self, move: Reassignment) -> None:
        """Check that the target of an ended move is in sync, in a new leader epoch, which fences the removed replicas.

        ``_last`` is the state write that belongs to the end of the move, because it comes first in the multi.
        """
        assert self._last is not None
        before, after = self._last
        target, isr = set(move.target), set(after.state.isr)
        if not isr <= target or (isr != target and target != set(move.original)):
            self.fail("moves end in sync", f"to {move.target} with ISR {after.state.isr}")
        if before is None or after.state.leader_epoch <= before.state.leader_epoch:
            self.fail("moves end in a new epoch", f"to {move.target} in epoch {after.state.leader_epoch}")

    def fail(self, rule: str, what: str) -> NoReturn:
        raise SimViolation(f"{self.name}: {rule}: {what}", rule=rule, partition=self.name)

    # --- logs ---------------------------------------------------------------------------------------------------

    def appended(self, broker: int, count: int) -> None:
        """Check log matching for the last ``count`` batches of a broker's log.

        If batches of two logs have the same offset and epoch, the batches and their predecessors must be equal.
        """
        batches = self.logs[broker].batches
        first = len(batches) - count
        before = _place(batches[first - 1]) if first else None
        for at in range(first, len(batches)):
            batch = batches[at]
            place = _place(batch)
            known = self._places.setdefault(place, (batch, before))
            if known[0] is not batch and known[0] != batch:
                self.fail("log matching", f"broker {broker} holds {batch} where {known[0]} was")
            if known[1] != before:
                self.fail("log matching", f"broker {broker}: before {place} comes {before}, elsewhere {known[1]}")
            before = place

    def cut(self, broker: int) -> None:
        """Check StrongIsr after a truncation: no member of the ISR truncates committed records."""
        if broker in self.isr:
            self.holds(broker, self.committed_end, "StrongIsr", "cut its log in the ISR")

    def forgot(self, broker: int) -> None:
        """Check that the broker may delete its log, and remove the log from the checker."""
        self.logs.pop(broker, None)
        self.lost.pop(broker, None)
        if broker in self.isr and self.committed_end:
            self.fail("StrongIsr", f"broker {broker} deleted its log in the ISR {self.isr}")

    def spared(self, victim: int, node: VersionedState | None, *, leaving: Collection[int] = ()) -> bool:
        """Return whether enough data remains if ``victim`` loses its page cache or leaves the ISR.

        Enough data means: the current ISR, and each ISR that may be written next, keeps a member that has not lost its
        page cache. Without such a member, the log guarantees nothing. Brokers that are ``leaving`` the ISR do not
        count. ``node`` is the partition's state in ZooKeeper.
        """
        if node is None:
            return True
        sets = [node.state.isr, *(isr for version, isr in self.proposed if version >= node.version)]
        return all(set(isr) - self.lost.keys() - {victim, *leaving} for isr in sets)

    def power_cut(self, incarnation: Callable[[int], int]) -> None:
        """Accept a power failure of all hosts at once, which loses all data that is not on a disk."""
        self.bereft = True
        self.lost = {broker: incarnation(broker) for broker in self.logs}

    # --- high watermarks and responses --------------------------------------------------------------------------

    def high_watermark_moved(self, broker: int, mark: int, *, before: int, epoch: int) -> None:
        """Check consistent reads and StrongIsr, and commit the batches below a risen high watermark.

        Consistent reads: every replica has the same records below its high watermark at all times. StrongIsr: every
        member of the ISR has all committed records. A high watermark lower than ``before`` commits nothing, because the
        records below it are committed already. After an unclean election, a log is truncated in several steps. Until
        the last step, the high watermark may be above the offset from which the log differs from the new leader's log.
        """
        log = self.logs[broker]
        if mark > log.log_end_offset:
            self.fail("valid high watermark", f"{mark} of broker {broker} is above its log end {log.log_end_offset}")
        if self.bereft or epoch < self._line:
            return
        if not self._same(log, self._count_below(min(mark, self.committed_end))):
            self.fail("consistent reads", f"broker {broker} shows other records below {mark} than were committed")
        if mark > before and mark > self.committed_end:
            self._commit(broker, log, mark)
            self._ends[epoch] = self.committed_end
            copies = sum(b in self.lost or log.log_end_offset >= mark for b, log in self.logs.items())
            needed = min(self.min_isr, self._fewest)
            if copies < needed:
                self.fail("min.insync.replicas", f"high watermark {mark} with {copies} copies, {needed} needed")
            for member in self.isr:
                self.holds(member, mark, "StrongIsr", "in the ISR")

    def _commit(self, broker: int, log: SimLog, mark: int) -> None:
        while self.committed_end < mark:
            batch = log.batch_at(self.committed_end)
            if batch is None:
                self.fail("dense offsets", f"broker {broker} has no batch at {self.committed_end}")
            self._follow_sequence(batch)
            self.committed.append(batch)
            self.committed_end = batch.header.next_offset
            self._next_offsets.append(self.committed_end)
        if self.committed_end != mark:
            self.fail("valid high watermark", f"{mark} of broker {broker} is inside a batch")
        log.verified = len(self.committed)

    def _follow_sequence(self, batch: SimBatch) -> None:
        """Check idempotence: the sequences of each producer are committed once and in order, from 0 in each epoch."""
        if self.on_commit is not None:
            self.on_commit(batch)
            return
        header = batch.header
        if header.producer_id == NO_PRODUCER:
            return
        epoch, expected = self._sequences.get(header.producer_id, (-1, 0))
        if header.producer_epoch > epoch:
            epoch, expected = header.producer_epoch, 0
        if (header.producer_epoch, header.first_sequence) != (epoch, expected):
            found = f"epoch {header.producer_epoch} sequence {header.first_sequence}"
            self.fail("idempotence", f"{batch.body}: {found} at {header.base_offset}, {epoch} and {expected} expected")
        self._sequences[header.producer_id] = (epoch, expected + header.record_count)

    def sequence_refused(self, error: BrokerError, *, unknown: bool) -> None:
        """Check the refusal of a sequence. ``unknown`` means that the log does not know the batch's Kafka producer."""
        if unknown and error.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            self.fail("unknown producers begin anywhere", str(error))

    def holds(self, broker: int, end: int, rule: str, why: str) -> None:
        """Check that the broker's log has all committed records below ``end``.

        The error for a violation has the name of the violated guarantee (``rule``), and the reason for which the broker
        must have the records (``why``).
        """
        if broker in self.lost or self.bereft or not end:
            return
        log = self.logs.get(broker)
        if log is None:
            self.fail(rule, f"broker {broker}, {why}, has no log; committed end is {end}")
        if not self._same(log, self._count_below(end)):
            self.fail(rule, f"broker {broker}, {why}, ends at {log.log_end_offset}, or differs; committed end is {end}")

    def _same(self, log: SimLog, count: int) -> bool:
        """Return whether the first ``count`` batches of the log equal the committed batches."""
        at = log.verified
        if at < count:
            if log.batches[at:count] != self.committed[at:count]:
                return False
            log.verified = count
        return True

    def _count_below(self, end: int) -> int:
        return bisect_right(self._next_offsets, end)

    def answered(self, body: str, acks: int, base_offset: int, *, epoch: int) -> None:
        """Check that a batch acknowledged with acks=all is committed at the returned offset."""
        if acks != -1 or self.bereft or epoch < self._line:
            return
        self.acked[body] = base_offset
        at = self._count_below(base_offset)
        if at >= len(self.committed) or self.committed[at].body != body:
            end = self.committed_end
            self.fail("acks=all", f"{body} acknowledged at {base_offset}, which is not committed (end {end})")

    # --- leaders and states -------------------------------------------------------------------------------------

    def became_leader(self, broker: int, process: int, epoch: int) -> None:
        """Check that only this process leads in ``epoch``, and that it has all records of earlier epochs.

        The second check is leader completeness. A leader may learn of its epoch late, when newer epochs have already
        committed more records.
        """
        holder = self.leaders.setdefault(epoch, (broker, process))
        if holder != (broker, process):
            self.fail("one leader an epoch", f"epoch {epoch} led by broker {broker} process {process}, and by {holder}")
        if epoch < self._line:
            return  # the leader learns of its epoch late, after a later unclean election
        if self.bereft:
            self._begin_again(broker)
        end = max((end for earlier, end in self._ends.items() if earlier < epoch), default=0)
        self.holds(broker, end, "leader completeness", f"leading epoch {epoch}")

    def _begin_again(self, broker: int) -> None:
        """Count the log of the first leader after a power failure or an unclean election as committed."""
        self.bereft = False
        log = self.logs[broker]
        self.lost.pop(broker, None)
        limit = min(len(log.batches), len(self.committed))
        kept = next((at for at in range(limit) if log.batches[at] != self.committed[at]), limit)
        committed, self.committed = self.committed[:kept], []
        self._sequences.clear()
        for batch in committed:
            self._follow_sequence(batch)
        self.committed = committed
        del self._next_offsets[kept:]
        self.committed_end = self._next_offsets[-1] if kept else 0
        self._ends = {epoch: min(end, self.committed_end) for epoch, end in self._ends.items()}
        self.acked = {body: offset for body, offset in self.acked.items() if offset < self.committed_end}
        for other in self.logs.values():
            other.verified = min(other.verified, kept)

    def written(
        self,
        before: VersionedState | None,
        after: VersionedState,
        *,
        controller_epoch: int,
        incarnation: Callable[[int], int],
    ) -> None:
        """Check a write of the partition's state to ZooKeeper, from ``before`` to ``after``.

        ``controller_epoch`` is the newest controller epoch in ZooKeeper. ``incarnation`` is a function that returns the
        last registered incarnation of a broker.
        """
        new = after.state
        self._last = before, after
        self._type_ok(before, after)
        if new.leader != NO_LEADER and new.leader not in new.isr:
            self.fail("leader in ISR", f"leader {new.leader} written outside its ISR {new.isr}")
        if before is None or new.leader_epoch > before.state.leader_epoch:
            if new.controller_epoch != controller_epoch:
                found = f"epoch {new.leader_epoch} given by controller epoch {new.controller_epoch}"
                self.fail("control requests fenced", f"{found}, {controller_epoch} is the newest")
        elif new.leader != before.state.leader:
            self.fail("one leader an epoch", f"leader changed in epoch {new.leader_epoch}")
        if before is not None and self._is_unclean(before.state, new):
            self._elected_uncleanly(before.state, new)
        self.isr = new.isr
        self.proposed = {(version, isr) for version, isr in self.proposed if version >= after.version}
        for member in new.isr:
            if before is None or member not in before.state.isr:
                if not self.bereft and self.lost.get(member, -1) < incarnation(member):
                    self.lost.pop(member, None)
                if before is not None:
                    self.holds(member, self.committed_end, "StrongIsr", f"added to the ISR {new.isr}")

    def _is_unclean(self, before: LeaderAndIsr, new: LeaderAndIsr) -> bool:
        """Return whether the new leader was not in sync or, where that is allowed, had lost its page cache."""
        if new.leader == NO_LEADER or new.leader_epoch == before.leader_epoch:
            return False
        if new.leader not in before.isr:
            return True
        return self.unclean_allowed and new.leader in self.lost and new.isr == (new.leader,) != before.isr

    def _elected_uncleanly(self, before: LeaderAndIsr, new: LeaderAndIsr) -> None:
        """Check an unclean election. The election may lose records, and later commits of the old ISR do not count."""
        if not self.unclean_allowed:
            self.fail("unclean elections where allowed", f"{new} written after {before}")
        if new.isr != (new.leader,):
            self.fail("an unclean leader is alone in sync", f"{new} written after {before}")
        self.unclean += 1
        self.bereft = True
        self._line = new.leader_epoch

    def _type_ok(self, before: VersionedState | None, after: VersionedState) -> None:
        new = after.state
        known = {NO_LEADER, *self.replicas}
        if not new.isr or len(set(new.isr)) != len(new.isr) or not {new.leader, *new.isr} <= known:
            self.fail("TypeOk", f"{new} written for replicas {self.replicas}")
        if before is not None and (
            new.leader_epoch < before.state.leader_epoch or new.controller_epoch < before.state.controller_epoch
        ):
            self.fail("TypeOk", f"{new} written after {before.state}")

    # --- the end ------------------------------------------------------------------------------------------------

    def settled(self, leader_log: SimLog) -> None:
        """Check, after the faults, that every replica has all acknowledged records, and that all logs are equal."""
        bodies = {batch.body: batch.header.base_offset for batch in leader_log.batches}
        for body, offset in self.acked.items():
            if bodies.get(body) != offset:
                self.fail("acks=all", f"{body}, acknowledged at {offset}, is gone")
        if set(self.logs) != set(self.replicas):
            self.fail("replicas settle", f"logs on {sorted(self.logs)}, replicas are {self.replicas}")
        for broker, log in self.logs.items():
            if log.batches != leader_log.batches:
                ends = f"log of broker {broker} ends at {log.log_end_offset}, leader's at {leader_log.log_end_offset}"
                self.fail("replicas settle", ends)


def _place(batch: SimBatch) -> _Place:
    header = batch.header
    return header.base_offset, header.leader_epoch
