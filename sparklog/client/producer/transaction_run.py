"""The identity of a transaction and the errors of its end, which all clients of transactions share.

It needs no event loop: a sink's driver commits from a process that does nothing else, and should not have to load one.
Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from sparklog.client.errors import ClientTimeout, CommitOutcomeUnknown, transaction_error
from sparklog.errors import BrokerError, ErrorCode

#: The maximum length of the name of a transactional producer or a sink. With its prefix the limit is 255 bytes.
MAX_ID_BYTES = 200
#: How long a client waits for the markers of a decided transaction. Readers see its records after the markers.
MARKERS_WAIT_S = 30.0
#: The part of a request's timeout that the coordinator may use.
SERVER_SHARE = 0.8


class TransactionRun(NamedTuple):
    """The identity of a transaction.

    A producer's transaction has ``version`` -1, and ``turn`` is its number in the run. A sink's transaction has the
    version of its write (batch id or txnVersion), and ``turn`` 0. See ``messages.BeginTransaction``.
    """

    key: str
    run_id: str
    version: int
    timeout_s: float
    turn: int = 0

    def __str__(self) -> str:
        return f"transaction {self.key!r}" + (f" version {self.version}" if self.version >= 0 else "")


class Joined(NamedTuple):
    """A part in a sink's transaction, for ``Producer(in_transaction=)``.

    ``number`` is the number of the run, in the order in which runs began.
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
    """Return the error for a failed end request.

    ``uncertain``: an earlier attempt may have had an effect. ``asked_before``: an attempt of an earlier call may have
    had one, which the coordinator reports unless the next run has begun since.
    """
    code = getattr(error, "code", None)
    uncertain = uncertain or (asked_before and code == ErrorCode.UNKNOWN_PRODUCER_ID)
    uncertain = uncertain or code == ErrorCode.UNKNOWN_SERVER_ERROR  # the decision may be on its way into the log
    refused = error if isinstance(error, ClientTimeout) else transaction_error(error, str(run))
    if commit and (uncertain or isinstance(error, ClientTimeout)):
        return CommitOutcomeUnknown(f"{run} may be committed or aborted, as a whole: {refused}")
    return refused
