"""Whose a transaction is, and what is said of its end: what every client of transactions shares.

Without a loop: a sink's driver commits from a process that does nothing else, and should not have to load one. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from sparklog.client.errors import ClientTimeout, CommitOutcomeUnknown, transaction_error
from sparklog.errors import BrokerError, ErrorCode

#: Of the name of a transactional producer or of a sink, which shares 255 bytes with what is put before it.
MAX_ID_BYTES = 200
#: A decided transaction's markers are waited for so long; after that readers see its records a little later.
MARKERS_WAIT_S = 30.0
#: Of the patience for an answer, the part the coordinator may use.
SERVER_SHARE = 0.8
#: After these it is certain that the request has done nothing; after other retriable ones it may have.
_NOTHING_DONE = frozenset({ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.CONCURRENT_TRANSACTIONS})


class TransactionRun(NamedTuple):
    """Whose transaction this is. ``version`` -1: a producer's, ``turn`` counts those of its run; else a sink's. See
    ``messages.BeginTransaction``."""

    key: str
    run_id: str
    version: int
    timeout_s: float
    turn: int = 0

    def __str__(self) -> str:
        return f"transaction {self.key!r}" + (f" version {self.version}" if self.version >= 0 else "")


class Joined(NamedTuple):
    """A part in a sink's transaction, for ``Producer(in_transaction=)``. ``number``: of the run, in order of
    appearance."""

    run: TransactionRun
    producer_id: int
    producer_epoch: int
    number: int


def may_have_acted(error: BrokerError) -> bool:
    """Whether a request that failed so, and may be repeated, can have taken effect all the same."""
    return error.retriable and error.code not in _NOTHING_DONE


def end_error(
    error: BrokerError | ClientTimeout,
    run: TransactionRun,
    *,
    commit: bool,
    uncertain: bool,
    asked_before: bool = False,
) -> BrokerError | ClientTimeout:
    """What an end request that failed says. ``uncertain``: an earlier attempt may have taken effect; ``asked_before``:
    or one of an earlier call, which the coordinator tells unless the next run has begun since."""
    code = getattr(error, "code", None)
    uncertain = uncertain or (asked_before and code == ErrorCode.UNKNOWN_PRODUCER_ID)
    uncertain = uncertain or code == ErrorCode.UNKNOWN_SERVER_ERROR  # the decision may be on its way into the log
    refused = error if isinstance(error, ClientTimeout) else transaction_error(error, str(run))
    if commit and (uncertain or isinstance(error, ClientTimeout)):
        return CommitOutcomeUnknown(f"{run} may be committed or aborted, as a whole: {refused}")
    return refused
