"""The administration of transactions: listing and aborting them, and finding hanging transactions."""

from __future__ import annotations

from sparklog.client.admin.descriptions import (
    HangingTransaction,
    TransactionDescription,
    describe_hanging,
    describe_transaction,
)
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.blocking_coordinator import BlockingCoordinator, ask_all_brokers
from sparklog.client.cluster.coordinator_search import TRANSACTION
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import (
    AbortHanging,
    AbortTransaction,
    Ack,
    FindHanging,
    FindHangingReply,
    ListTransactions,
    ListTransactionsReply,
)


def list_transactions(cluster: BlockingCluster) -> list[TransactionDescription]:
    """Return the transactions of all coordinators, sorted by key.

    Raises ClientTimeout if a broker did not respond, or BrokerError for an error that is not retriable.
    """
    replies = ask_all_brokers(cluster, "transactions", ListTransactions(0), ListTransactionsReply)
    found = [describe_transaction(one) for reply in replies for one in reply.transactions]
    return sorted(found, key=lambda one: one.key)


def abort_transaction(cluster: BlockingCluster, key: str) -> None:
    """Abort a transaction. See ``Admin.abort_transaction`` for the errors."""
    coordinator = BlockingCoordinator(cluster, TRANSACTION, key)
    uncertain = False

    def attempt() -> None:
        nonlocal uncertain
        try:
            coordinator.ask_once(AbortTransaction(0, key), Ack)
        except BrokerError as error:
            if error.code == ErrorCode.INVALID_TXN_STATE and uncertain:
                return  # an earlier attempt, whose response was lost, has aborted it
            uncertain = uncertain or error.retriable
            raise

    cluster.retrying(f"aborting transaction {key!r}", attempt)


def find_hanging(cluster: BlockingCluster, *, open_s: float) -> list[HangingTransaction]:
    """Return hanging transactions, sorted by partition and offset.

    Raises ClientTimeout if a broker did not respond or not every coordinator was reachable, or BrokerError for an error
    that is not retriable.
    """
    request = FindHanging(0, max(0, int(open_s * 1000)))
    replies = ask_all_brokers(cluster, "hanging transactions", request, FindHangingReply)
    found = [describe_hanging(one) for reply in replies for one in reply.transactions]
    return sorted(found, key=lambda one: (one.partition, one.first_offset))


def abort_hanging(cluster: BlockingCluster, tp: TopicPartition, producer_id: int) -> None:
    """Abort a hanging transaction.

    Raises BrokerError INVALID_TXN_STATE if the producer has no open transaction in the partition, or if a coordinator
    knows the transaction. Raises ClientTimeout if the leader does not respond.
    """
    uncertain = False

    def attempt() -> None:
        nonlocal uncertain
        leader = cluster.leader(tp, refresh=True).broker_id
        try:
            cluster.ask_broker(leader, AbortHanging(0, tp.topic, tp.partition, producer_id), Ack)
        except BrokerError as error:
            if error.code == ErrorCode.INVALID_TXN_STATE and uncertain:
                return  # an earlier attempt, whose response was lost, has aborted it
            uncertain = uncertain or error.retriable
            raise

    cluster.retrying(f"aborting the hanging transaction of producer {producer_id} in {tp}", attempt)
