"""The identity of a transaction, and the errors of a commit or abort. All clients with transactions use them.

This module is pure. The module imports no event loop, so that a process that only commits a sink's transaction need not
load an event loop.
"""

from __future__ import annotations

from typing import NamedTuple

from sparklog.client.errors import ClientTimeout, CommitOutcomeUnknown, transaction_error
from sparklog.errors import BrokerError, ErrorCode

#: The maximum length in bytes of a transactional id or a sink's name. With its prefix, a key may have 255 bytes.
MAX_ID_BYTES = 200
#: The maximum time that a client waits for the markers of a committed or aborted transaction. Readers see the records
#: of a committed transaction only after its markers.
MARKERS_WAIT_S = 30.0
#: The fraction of a request's timeout that the coordinator may use.
SERVER_SHARE = 0.8


class TransactionRun(NamedTuple):
    """The identity of a transaction.

    ``key`` names a producer (by its transactional id) or a sink. ``run_id`` is unique for each producer object, and for
    each start of the Spark query that writes to a sink. A later ``run_id`` of the same key fences the earlier ones.

    A producer's transaction has ``version`` -1, and ``turn`` is its number, from 0, since the creation of the producer.
    A sink's transaction has ``turn`` 0, and ``version`` is the batch id or txnVersion of the write. See
    ``messages.BeginTransaction``.
    """

    key: str
    run_id: str
    version: int
    timeout_s: float
    turn: int = 0

    def __str__(self) -> str:
        return f"transaction {self.key!r}" + (f" version {self.version}" if self.version >= 0 else "")


class Joined(NamedTuple):
    """A task's membership in a sink's transaction, for ``Producer(in_transaction=)``.

    ``number`` is the number of this start of the query, among all starts that have begun a transaction of the sink.
    """

    run: TransactionRun
    producer_id: int
    producer_epoch: int
    number: int


def end_error(
    error: BrokerError | ClientTimeout,
    run: TransactionRun,
    *,
    commit: bool,
    uncertain: bool,
    asked_before: bool = False,
) -> BrokerError | ClientTimeout:
    """Return the error to raise for a commit or abort that failed with ``error``.

    ``uncertain``: an earlier attempt of this call may have taken effect. ``asked_before``: an earlier call may have
    taken effect. The coordinator reports the outcome of an earlier call, unless a later producer or query has begun a
    transaction with the same key.
    """
    code = getattr(error, "code", None)
    uncertain = uncertain or (asked_before and code == ErrorCode.UNKNOWN_PRODUCER_ID)
    uncertain = uncertain or code == ErrorCode.UNKNOWN_SERVER_ERROR  # the coordinator may still write the decision
    refused = error if isinstance(error, ClientTimeout) else transaction_error(error, str(run))
    if commit and (uncertain or isinstance(error, ClientTimeout)):
        return CommitOutcomeUnknown(f"{run} may be committed or aborted, as a whole: {refused}")
    return refused
