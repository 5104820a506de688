"""The transactions of a producer's sender, one after the other: begun, fed with what is sent, ended.

Lives on the I/O thread. Between two transactions nothing may be sent: what is handed over then fails. What was handed
over to a transaction that is aborted fails as well, sent or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparklog.client.cluster.blocking_coordinator import TRANSACTION
from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.loop_coordinator import LoopCoordinator
from sparklog.client.consumer.group_session import GroupMetadata
from sparklog.client.errors import CommitOutcomeUnknown, TransactionStateError
from sparklog.client.producer.partition_queues import PartitionQueues, ProducerIdentity
from sparklog.client.producer.transaction_run import TransactionRun
from sparklog.client.producer.transaction_session import OpenTransaction, begin, end
from sparklog.model import TopicPartition
from sparklog.protocol.messages import GroupOffset


class SenderTransactions:
    """Owned by the sender; every method is called on its thread."""

    def __init__(
        self,
        link: LoopCluster,
        accumulator: PartitionQueues,
        key: str,
        *,
        request_timeout_s: float,
        discard: Callable[[BaseException], None],
        changed: Callable[[], None],
    ) -> None:
        """``discard`` fails all that is handed over and not acknowledged; ``changed`` has the sender look again."""
        self.key = key
        self._link = link
        self._accumulator = accumulator
        self._coordination = LoopCoordinator(link, TRANSACTION, key, request_timeout_s=request_timeout_s)
        self._discard = discard
        self._changed = changed
        #: How many this run has begun.
        self._turn = 0
        self._open: OpenTransaction | None = None
        #: The last one, for who did not wait until it had ended and asks again.
        self._ended: OpenTransaction | None = None

    def __str__(self) -> str:
        return f"transaction {self.key!r}"

    # --- by the sender ---

    def look(self) -> None:
        """Before anything is sent: see that partitions come to be registered, and fail what can go nowhere."""
        if self._open is None:
            self._discard(TransactionStateError("no transaction is open"))
        elif self._open.refused is not None:
            self._discard(self._open.refused)
        else:
            self._open.register(self._accumulator.busy_partitions)

    def may_send(self, tp: TopicPartition) -> bool:
        """Whether the partition is registered."""
        return self._open is not None and tp in self._open.registered

    # --- by the producer ---

    async def begin(self, run: TransactionRun, *, timeout_s: float) -> None:
        """The next of this run. Raises as ``transaction.begin``; called again, it is the same one that begins."""
        run = run._replace(turn=self._turn)
        begun = await begin(self._coordination, run, timeout_s=timeout_s)
        self._turn += 1
        await self.take_part(run, ProducerIdentity(begun.producer_id, begun.producer_epoch))

    async def take_part(self, run: TransactionRun, identity: ProducerIdentity) -> None:
        """What is handed over from now on belongs to this transaction."""
        self._discard(TransactionStateError("no transaction was open when this was handed over"))
        if self._open is not None:  # begun by a call whose caller did not wait for it
            self._open.close()
        self._accumulator.begin(identity)
        self._open = OpenTransaction(self._link, self._coordination, run, identity, changed=self._changed)

    async def add_offsets(
        self, group: str | GroupMetadata, offsets: Sequence[GroupOffset], *, timeout_s: float
    ) -> None:
        """Raises as ``OpenTransaction.add_offsets``."""
        assert self._open is not None
        await self._open.add_offsets(group, offsets, timeout_s=timeout_s)

    async def end(self, *, commit: bool, timeout_s: float) -> None:
        """Everything is acknowledged, or all of it is to go. Raises as ``transaction.end``; after
        CommitOutcomeUnknown it may be called again."""
        now = self._open or self._ended
        assert now is not None
        if not commit:
            self._discard(TransactionStateError(f"{now.run} was aborted"))
        winners = (now.identity.producer_id,) if commit and now.used else ()
        asked_before, now.commit_asked = now.commit_asked, commit
        try:
            await end(
                self._coordination,
                now.run,
                winners=winners,
                commit=commit,
                timeout_s=timeout_s,
                asked_before=asked_before,
            )
        except CommitOutcomeUnknown:
            raise
        except BaseException:
            self._leave(now)
            raise
        self._leave(now)

    def _leave(self, ended: OpenTransaction) -> None:
        ended.close()
        if self._open is ended:
            self._open, self._ended = None, ended
