"""The invariants of Kafka's producers in a simulated cluster (ADR 31).

The checks see each committed batch in the order of its partition, each response of a coordinator, and the outcomes that
clients received. A broken invariant raises ``SimViolation``. One more check is part of ``PartitionChecker``: the first
batch of an unknown producer is never refused for its sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparklog.record.header import Flag
from sparklog.testing.sim_checks import PartitionChecker
from sparklog.testing.sim_log import SimBatch

_TRANSACTIONAL = int(Flag.TRANSACTIONAL)


@dataclass(slots=True)
class _Producer:
    """The committed batches of one producer id in one partition."""

    epoch: int = -1
    next_sequence: int = 0
    #: The offset of the last batch, and the offset below which brokers may have forgotten the batches.
    last_offset: int = -1
    forgotten_below: int = 0
    #: The transaction of the batches since the last marker, and these batches.
    transaction: str = ""
    opened: list[str] = field(default_factory=list)


class KafkaChecks:
    """The checker of the guarantees that a cluster gives to Kafka producers."""

    def __init__(self) -> None:
        self._producers: dict[tuple[str, int], _Producer] = {}
        self._bodies: set[str] = set()
        #: The newest epoch of each producer id that an InitProducerId request has got.
        self._given: dict[int, int] = {}
        #: The outcome of each transaction by the markers, with the partitions that have the marker.
        self._fates: dict[str, bool] = {}
        self._closed: set[tuple[str, str]] = set()
        self._committed: set[str] = set()
        #: The outcome that a client has learned, and the batches that were acknowledged to it.
        self._learned: dict[str, bool] = {}
        self._acked: dict[str, set[str]] = {}

    # --- clients and coordinators ----------------------------------------------------------------------------------

    def given(self, producer_id: int, epoch: int) -> None:
        """Record the response to InitProducerId. The transactions of earlier epochs have ended."""
        self._given[producer_id] = max(epoch, self._given.get(producer_id, -1))

    def acked(self, transaction: str, body: str) -> None:
        self._acked.setdefault(transaction, set()).add(body)

    def learned(self, checker: PartitionChecker, transaction: str, *, commit: bool) -> None:
        """Record the outcome that a client received for its transaction, in the response to EndTxn."""
        self._learned[transaction] = commit
        if self._fates.get(transaction, commit) != commit:
            checker.fail("transactions are atomic", f"{transaction}: the client learned commit={commit}")

    def forgotten(self, checker: PartitionChecker, producer_id: int) -> None:
        """Record that brokers may have forgotten an idle producer in a partition.

        Some of its batches may not be committed yet.
        """
        producer = self._producers.setdefault((checker.name, producer_id), _Producer())
        producer.forgotten_below = max((log.log_end_offset for log in checker.logs.values()), default=0)

    # --- logs ------------------------------------------------------------------------------------------------------

    def committed(self, checker: PartitionChecker, batch: SimBatch) -> None:
        """Check a batch that is now below a high watermark for the first time."""
        if batch.marker is not None:
            for commit, ended in ((True, batch.marker.committed), (False, batch.marker.aborted)):
                for producer_id, _ in ended:
                    self._ended(checker, producer_id, commit=commit)
        elif batch.header.producer_id >= 0:
            self._appended(checker, batch)

    def _appended(self, checker: PartitionChecker, batch: SimBatch) -> None:
        header, body = batch.header, batch.body
        producer_id, epoch = header.producer_id, header.producer_epoch
        producer = self._producers.setdefault((checker.name, producer_id), _Producer())
        if body in self._bodies:
            checker.fail("retries are duplicates", f"{body} is in the log again at {header.base_offset}")
        self._bodies.add(body)
        newest = max(producer.epoch, self._given.get(producer_id, -1))
        if epoch < newest:
            checker.fail("epochs fence", f"{body}: epoch {epoch} at {header.base_offset} after epoch {newest}")
        expected = producer.next_sequence if epoch == producer.epoch else 0
        if header.first_sequence != expected and producer.last_offset >= producer.forgotten_below:
            found = f"sequence {header.first_sequence} of epoch {epoch} at {header.base_offset}"
            checker.fail("sequences have no gaps", f"{body}: {found}, {expected} expected")
        producer.epoch, producer.next_sequence = epoch, header.first_sequence + header.record_count
        producer.last_offset = header.base_offset
        if header.flags & _TRANSACTIONAL:
            assert isinstance(batch.content, str)
            self._in_transaction(checker, producer, batch.content, batch)

    def _in_transaction(
        self, checker: PartitionChecker, producer: _Producer, transaction: str, batch: SimBatch
    ) -> None:
        """Check that a batch belongs to the transaction that is open, and that this one has not ended."""
        where = f"{batch.body} at {batch.header.base_offset}"
        if (checker.name, transaction) in self._closed:
            checker.fail("late batches stay out", f"{where} comes after the marker of its transaction")
        if producer.opened and producer.transaction != transaction:
            checker.fail("late batches stay out", f"{where} is inside of {producer.transaction}")
        producer.transaction = transaction
        producer.opened.append(batch.body)

    def _ended(self, checker: PartitionChecker, producer_id: int, *, commit: bool) -> None:
        producer = self._producers.get((checker.name, producer_id))
        if producer is None or not producer.opened:
            return
        transaction, bodies = producer.transaction, producer.opened
        if self._fates.setdefault(transaction, commit) != commit or self._learned.get(transaction, commit) != commit:
            checker.fail("transactions are atomic", f"{transaction} has a marker with commit={commit}")
        self._closed.add((checker.name, transaction))
        if commit:
            self._committed.update(bodies)
        producer.opened = []

    # --- the end ---------------------------------------------------------------------------------------------------

    def settled(self, checker: PartitionChecker) -> None:
        """Check, after the last transactions, that each one ended with the outcome that its client received."""
        for (partition, producer_id), producer in self._producers.items():
            if partition == checker.name and producer.opened:
                checker.fail("transactions end", f"{producer.transaction} of producer {producer_id} is open")
        for transaction, commit in self._learned.items():
            lost = self._acked.get(transaction, set()) - self._committed if commit else set()
            if lost:
                checker.fail("transactions are atomic", f"{transaction} is committed without {sorted(lost)}")

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of transactions that ended in partitions, and the number of outcomes that clients know."""
        commits = sum(self._learned.values())
        return {
            "kafka batches": len(self._bodies),
            "kafka markers": len(self._closed),
            "kafka commits": commits,
            "kafka aborts": len(self._learned) - commits,
        }
