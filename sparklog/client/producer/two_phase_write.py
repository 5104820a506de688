"""The transactions of a sink, whose writers are many tasks and whose end is decided by one driver. Blocking.

A task joins (``join``) and writes with a ``Producer(in_transaction=...)``, which registers its partitions and shows
that it is alive; the driver decides (``decide``) which of the producers that took part are committed. A version at or
below the last committed one of its key is a replay: nobody writes, and deciding it again succeeds. Where versions
count by topic (``by_topic``), everybody joins, and asks of each topic whether it has the version (``settled_version``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.blocking_coordinator import TRANSACTION, BlockingCoordinator
from sparklog.client.errors import ClientTimeout, transaction_error
from sparklog.client.producer.transaction_run import (
    MARKERS_WAIT_S,
    SERVER_SHARE,
    Joined,
    TransactionRun,
    end_error,
    may_have_acted,
)
from sparklog.errors import BrokerError
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
    """Nothing is to be written: ``last_version``, which is this version or a later one, is committed."""

    last_version: int


class Decided(NamedTuple):
    """The decision is durable. ``complete``: every partition shows it. ``replayed``: it had been made before."""

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
) -> Joined | AlreadyCommitted:
    """Take part in version ``version`` of ``key`` as run ``run_id``; many tasks of one run may.

    Args:
        version: 0 or more, growing from transaction to transaction.
        run_id: a run that was not seen before fences the earlier ones, and aborts what they have open.
        timeout_s: without a sign of life of any task for so long the transaction is aborted.
        max_block_s: how long to try.
        by_topic: versions count for each topic that is written to; then this is never AlreadyCommitted.

    Raises:
        ProducerFenced: a later run has come.
        ClientTimeout: no coordinator answered.
    """
    assert version >= 0, version
    run = TransactionRun(key, run_id, version, timeout_s)
    request = BeginTransaction(0, key, run_id, version, max(1, int(timeout_s * 1000)), by_topic=by_topic)
    with _link(bootstrap, max_block_s) as link:
        try:
            reply = BlockingCoordinator(link).ask(
                TRANSACTION, key, request, BeginTransactionReply, timeout_s=max_block_s
            )
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
) -> int:
    """The last committed version of ``key``, in the topic with this id if one is given; -1: none.

    Settled: what any run but ``run_id`` has open under the key is aborted first, and can never be committed.

    Raises:
        ProducerFenced: ``run_id`` may do nothing any more under this key.
        ClientTimeout: no coordinator answered.
    """
    request = SettleVersion(0, key, run_id, topic_id)
    with _link(bootstrap, max_block_s) as link:
        try:
            found = BlockingCoordinator(link).ask(TRANSACTION, key, request, SettleVersionReply, timeout_s=max_block_s)
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
) -> Decided:
    """Commit what the producer ids ``winners`` wrote and abort all else of this version; or abort all of it.

    Waits up to 30 s for the partitions to show it, so that who reads next finds the rows; a decision that some do not
    show yet is as durable. Committing with no winners says that the version holds nothing.

    Raises:
        ProducerFenced, TransactionStateError: it is not committed, and will not be.
        CommitOutcomeUnknown: nobody could be asked within ``timeout_s``, the broker failed in a way it did not foresee,
            or it was refused after an answer was lost.
        ClientTimeout: as that, of an abort: the next run does it, or the transaction's time-out.
    """
    run = TransactionRun(key, run_id, version, timeout_s)
    began = time.monotonic()
    chosen = tuple(sorted(winners)) if commit else ()
    decided: EndTransactionReply | None = None
    uncertain = False

    def attempt() -> EndTransactionReply:
        nonlocal uncertain
        left_s = max(0.001, timeout_s - (time.monotonic() - began))
        server_ms = max(1, int(min(link.request_timeout_s, left_s) * 1000 * SERVER_SHARE))
        request = EndTransaction(0, key, run_id, version, commit, chosen, server_ms)
        try:
            return coordination.ask_once(TRANSACTION, key, request, EndTransactionReply)
        except BrokerError as error:
            uncertain = uncertain or may_have_acted(error)
            raise

    with _link(bootstrap, timeout_s) as link:
        coordination = BlockingCoordinator(link)
        while decided is None or not decided.complete:
            left_s = timeout_s - (time.monotonic() - began)
            try:
                decided = link.retrying(f"deciding {run}", attempt, timeout_s=max(0.0, left_s))
            except (BrokerError, ClientTimeout) as error:
                if decided is None:
                    raise end_error(error, run, commit=commit, uncertain=uncertain) from error
                break
            if time.monotonic() - began >= min(MARKERS_WAIT_S, timeout_s):
                break
    if not decided.complete:
        _log.warning("%s: it is decided, but some partitions do not show it yet", run)
    return Decided(decided.complete, decided.replayed)


@contextmanager
def _link(bootstrap: str | Iterable[str] | BlockingCluster, timeout_s: float) -> Iterator[BlockingCluster]:
    """A link to share stays open, one made here does not."""
    if isinstance(bootstrap, BlockingCluster):
        yield bootstrap
        return
    with BlockingCluster(bootstrap, client_id="sparklog-sink", timeout_s=timeout_s) as link:
        yield link
