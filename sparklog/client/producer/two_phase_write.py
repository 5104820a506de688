"""The transactions of a sink: many tasks write, and one driver commits or aborts. All calls block.

A key names the sink. The version of a write is a number that is higher for each later write, such as a batch id. A task
joins the transaction with ``join`` and writes with a ``Producer(in_transaction=...)``, which registers its partitions
and keeps the transaction alive. The driver calls ``decide`` with the producers whose records are committed. A write
whose version is not above the last committed version of its key is a replay: no task writes, and the same decision
succeeds again.

With ``by_topic``, each topic has its own last committed version. Then every task joins, and asks for the last committed
version of each topic with ``settled_version``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.blocking_coordinator import BlockingCoordinator
from sparklog.client.cluster.coordinator_search import TRANSACTION
from sparklog.client.cluster.retry import may_have_acted
from sparklog.client.errors import ClientTimeout, transaction_error
from sparklog.client.producer.transaction_run import (
    MARKERS_WAIT_S,
    SERVER_SHARE,
    Joined,
    TransactionRun,
    end_error,
)
from sparklog.errors import BrokerError, ClusterError
from sparklog.net.client_security import Security
from sparklog.protocol.fields import MAX_PLAIN
from sparklog.protocol.messages import (
    BeginTransaction,
    BeginTransactionReply,
    EndTransaction,
    EndTransactionReply,
    SettleVersion,
    SettleVersionReply,
)

_log = logging.getLogger(__name__)


class AlreadyCommitted(NamedTuple):
    """The result of ``join`` if the write is already committed. The task must write nothing.

    ``last_version`` is the version of the sink's last committed write.
    """

    last_version: int


class WriteDecision(NamedTuple):
    """The durable result of ``decide``.

    ``complete``: every partition has its marker. ``replayed``: an earlier call made the decision.
    """

    complete: bool
    replayed: bool


def join(
    bootstrap: str | Iterable[str] | BlockingCluster,
    *,
    key: str,
    version: int,
    run_id: str,
    timeout_s: float = 60.0,
    max_block_s: float = 60.0,
    by_topic: bool = False,
    security: Security = None,
) -> Joined | AlreadyCommitted:
    """Join the transaction of one write of a sink, as one of the tasks that write. Begin it if no task has joined yet.

    Args:
        key: the key of the sink.
        version: the version of the write: 0 or more, and higher for each later write.
        run_id: the id of one start of the query that writes. A new id fences the earlier ones of this key, and aborts
            their open transactions.
        timeout_s: the coordinator aborts the transaction if it gets no request of any task for this time.
        max_block_s: how long this call may retry.
        by_topic: each topic has its own last committed version. Then the result is never AlreadyCommitted.
        security: the settings for TLS and login. Ignored if ``bootstrap`` is a cluster client, which has its own.

    Raises:
        ProducerFenced: a later start of the query has fenced ``run_id``.
        ClientTimeout: no coordinator responded.
    """
    assert version >= 0, version
    run = TransactionRun(key, run_id, version, timeout_s)
    request = BeginTransaction(0, key, run_id, version, max(1, int(timeout_s * 1000)), by_topic=by_topic)
    with _open_cluster(bootstrap, max_block_s, security) as cluster:
        try:
            coordinator = BlockingCoordinator(cluster, TRANSACTION, key)
            reply = coordinator.ask(request, BeginTransactionReply, timeout_s=max_block_s)
        except BrokerError as error:
            raise transaction_error(error, str(run)) from error
    if reply.committed:
        return AlreadyCommitted(reply.last_version)
    return Joined(run, reply.producer_id, reply.producer_epoch, reply.run)


def settled_version(
    bootstrap: str | Iterable[str] | BlockingCluster,
    *,
    key: str,
    run_id: str,
    topic_id: str = "",
    max_block_s: float = 60.0,
    security: Security = None,
) -> int:
    """Return the version (batch id or txnVersion) of the last committed write of the sink ``key``, or -1.

    With ``topic_id``, return the version of the last committed write to this topic.

    First, the coordinator aborts the open transactions of the sink except those with this ``run_id``, so that they can
    never be committed. ``run_id`` identifies one start of the query that writes.

    Raises:
        ProducerFenced: a later start of the query has fenced ``run_id``.
        ClientTimeout: no coordinator responded.
    """
    request = SettleVersion(0, key, run_id, topic_id)
    with _open_cluster(bootstrap, max_block_s, security) as cluster:
        try:
            coordinator = BlockingCoordinator(cluster, TRANSACTION, key)
            found = coordinator.ask(request, SettleVersionReply, timeout_s=max_block_s)
        except BrokerError as error:
            raise transaction_error(error, f"transaction {key!r}") from error
    return found.last_version


def decide(
    bootstrap: str | Iterable[str] | BlockingCluster,
    *,
    key: str,
    version: int,
    run_id: str,
    winners: Iterable[int] = (),
    commit: bool = True,
    timeout_s: float = 60.0,
    security: Security = None,
) -> WriteDecision:
    """Commit or abort one write of the sink ``key``. ``version`` is the write's batch id or txnVersion.

    A commit commits the records of the producer ids ``winners``, and aborts the write's other records. A commit without
    winners means that the write has no records.

    Wait up to 30 s for the markers in all partitions, so that the next reader finds the rows. The decision is durable
    even if some markers are missing.

    Raises:
        ClusterError: there are more winners than one commit may name; nothing is decided.
        ProducerFenced, TransactionStateError: the write is not committed, and will not be.
        CommitOutcomeUnknown: no coordinator was reachable within ``timeout_s``, the broker had an unexpected error, or
            it refused the request after an earlier response was lost.
        ClientTimeout: an abort failed for one of the reasons listed for CommitOutcomeUnknown. The next start of the
            query, or the transaction's timeout, aborts the write.
    """
    run = TransactionRun(key, run_id, version, timeout_s)
    began = time.monotonic()
    chosen = tuple(sorted(winners)) if commit else ()
    if len(chosen) > MAX_PLAIN:
        detail = f"{len(chosen)} tasks found with rows, at most {MAX_PLAIN} expected: write with fewer tasks (coalesce)"
        raise ClusterError(f"{run}: {detail}")
    decided: EndTransactionReply | None = None
    uncertain = False

    def attempt() -> EndTransactionReply:
        nonlocal uncertain
        left_s = max(0.001, timeout_s - (time.monotonic() - began))
        server_ms = max(1, int(min(cluster.request_timeout_s, left_s) * 1000 * SERVER_SHARE))
        request = EndTransaction(0, key, run_id, version, commit, chosen, server_ms)
        try:
            return coordinator.ask_once(request, EndTransactionReply)
        except BrokerError as error:
            uncertain = uncertain or may_have_acted(error)
            raise

    with _open_cluster(bootstrap, timeout_s, security) as cluster:
        coordinator = BlockingCoordinator(cluster, TRANSACTION, key)
        while decided is None or not decided.complete:
            left_s = timeout_s - (time.monotonic() - began)
            try:
                decided = cluster.retrying(f"deciding {run}", attempt, timeout_s=max(0.0, left_s))
            except (BrokerError, ClientTimeout) as error:
                if decided is None:
                    raise end_error(error, run, commit=commit, uncertain=uncertain) from error
                break
            if time.monotonic() - began >= min(MARKERS_WAIT_S, timeout_s):
                break
    if not decided.complete:
        _log.warning("%s: the decision is durable, but some partitions have no marker yet", run)
    return WriteDecision(decided.complete, decided.replayed)


@contextmanager
def _open_cluster(
    bootstrap: str | Iterable[str] | BlockingCluster, timeout_s: float, security: Security
) -> Iterator[BlockingCluster]:
    """Yield a cluster client. Close the client at the end only if this function has created it."""
    if isinstance(bootstrap, BlockingCluster):
        yield bootstrap
        return
    with BlockingCluster(bootstrap, client_id="sparklog-sink", timeout_s=timeout_s, security=security) as cluster:
        yield cluster
