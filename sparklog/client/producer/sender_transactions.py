"""The transactions of a producer's sender, one at a time.

All code runs on the I/O thread. Between two transactions nothing may be sent, so a record fails if the producer
accepts it at such a time. The records of an aborted transaction fail too, whether they were sent or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparklog.client.cluster.coordinator_search import TRANSACTION
from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.loop_coordinator import LoopCoordinator
from sparklog.client.consumer.group_session import GroupMetadata
from sparklog.client.errors import CommitOutcomeUnknown, TransactionStateError
from sparklog.client.producer.partition_queues import PartitionQueues, ProducerIdentity
from sparklog.client.producer.send_loop import SendLoop
from sparklog.client.producer.sender_settings import SenderSettings
from sparklog.client.producer.transaction_run import TransactionRun
from sparklog.client.producer.transaction_session import OngoingTransaction, begin, end
from sparklog.model import TopicPartition
from sparklog.protocol.messages import GroupOffset


class SenderTransactions:
    """A part of the ``Sender`` that manages its current transaction.

    Not thread-safe: use it only on the producer's event loop.
    """

    def __init__(
        self,
        sender: SendLoop,
        cluster: LoopCluster,
        queues: PartitionQueues,
        settings: SenderSettings,
    ) -> None:
        """Create the object, without an open transaction."""
        self.key = key = settings.transaction
        self._sender = sender
        self._cluster = cluster
        self._queues = queues
        self._coordinator = LoopCoordinator(cluster, TRANSACTION, key, request_timeout_s=settings.request_timeout_s)
        #: The number of transactions that this run of the producer has begun.
        self._turn = 0
        self._open: OngoingTransaction | None = None
        #: The last transaction. A caller that did not wait for its end may request the end again.
        self._ended: OngoingTransaction | None = None

    def __str__(self) -> str:
        return f"transaction {self.key!r}"

    # --- called by the sender ---

    def run_once(self) -> None:
        """Register the partitions of waiting batches with the coordinator. The sender calls this before each send.

        Fail all batches if no transaction is open, or if the coordinator has refused the transaction.
        """
        if self._open is None:
            self._sender.discard(TransactionStateError("no transaction is open"))
        elif self._open.refused is not None:
            self._sender.discard(self._open.refused)
        else:
            self._open.register(self._queues.busy_partitions)

    def may_send(self, tp: TopicPartition) -> bool:
        """Return whether the coordinator has registered the partition for the open transaction."""
        return self._open is not None and tp in self._open.registered

    # --- called for the producer ---

    async def begin(self, run: TransactionRun, *, timeout_s: float) -> None:
        """Begin the producer's next transaction. ``run`` identifies the producer.

        After a failure, a second call begins the same transaction. Raises the same errors as
        ``transaction_session.begin``.
        """
        run = run._replace(turn=self._turn)
        reply = await begin(self._coordinator, run, timeout_s=timeout_s)
        self._turn += 1
        await self.join(run, ProducerIdentity(reply.producer_id, reply.producer_epoch))

    async def join(self, run: TransactionRun, identity: ProducerIdentity) -> None:
        """Take part in a transaction that has begun with the producer id and epoch in ``identity``.

        ``run`` identifies the transaction.

        Records that are accepted from now on belong to this transaction.
        """
        self._sender.discard(TransactionStateError("no transaction was open when the record was sent"))
        if self._open is not None:  # the caller did not wait for the response to ``begin``
            self._open.close()
        self._queues.begin(identity)
        self._open = OngoingTransaction(self._cluster, self._coordinator, run, identity, changed=self._sender.run_once)

    async def add_offsets(
        self, group: str | GroupMetadata, offsets: Sequence[GroupOffset], *, timeout_s: float
    ) -> None:
        """Add a group's offsets to the transaction. Raises the same errors as ``OngoingTransaction.add_offsets``."""
        assert self._open is not None
        await self._open.add_offsets(group, offsets, timeout_s=timeout_s)

    async def end(self, *, commit: bool, timeout_s: float) -> None:
        """Commit or abort the transaction.

        Call this with ``commit`` only after all records are acknowledged. An abort discards all records.

        Raises the same errors as ``transaction_session.end``. After CommitOutcomeUnknown, call this method again to
        learn the outcome.
        """
        now = self._open or self._ended
        assert now is not None
        if not commit:
            self._sender.discard(TransactionStateError(f"{now.run} was aborted"))
        winners = (now.identity.producer_id,) if commit and now.used else ()
        asked_before, now.commit_asked = now.commit_asked, commit
        try:
            await end(
                self._coordinator,
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

    def _leave(self, ended: OngoingTransaction) -> None:
        ended.close()
        if self._open is ended:
            self._open, self._ended = None, ended
