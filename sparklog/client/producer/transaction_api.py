"""The transaction methods of a producer, and the states in which each may be called.

The methods run in the caller's thread. The I/O thread sends the requests to brokers. A commit requires that all records
since ``begin`` are acknowledged.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from enum import Enum, auto
from typing import Any

from sparklog.client.consumer.group_session import GroupMetadata
from sparklog.client.errors import CommitOutcomeUnknown, ProducerClosed, ProducerFenced, TransactionStateError
from sparklog.client.producer.partition_queues import ProducerIdentity
from sparklog.client.producer.sender import Sender
from sparklog.client.producer.transaction_run import MAX_ID_BYTES, TransactionRun
from sparklog.errors import ConfigError, SparklogError
from sparklog.model import TRANSACTIONAL_ID_PREFIX, TopicPartition
from sparklog.protocol.messages import GroupOffset

#: The maximum time that ``close`` waits for the abort of an open transaction. If the abort takes longer, the
#: transaction's timeout aborts the transaction.
_ABORT_AT_CLOSE_S = 5.0


class State(Enum):
    """The state of a transactional producer. NONE: no transaction is open."""

    NONE = auto()
    OPEN = auto()
    #: A commit was requested, and it is unknown whether the coordinator has decided it.
    UNKNOWN = auto()
    FENCED = auto()
    #: The transaction belongs to a sink, and this producer cannot end it.
    JOINED = auto()


def producer_run(transactional_id: str, timeout_s: float) -> TransactionRun:
    """Return the identity of a new producer for its transactions: its transactional id and a unique ``run_id``.

    Raises ConfigError for an invalid argument.
    """
    if not transactional_id or len(transactional_id.encode()) > MAX_ID_BYTES:
        raise ConfigError(f"transactional_id={transactional_id!r}: expected 1 to {MAX_ID_BYTES} bytes of text")
    if not 0 < timeout_s <= 86_400:
        raise ConfigError(f"transaction_timeout_s={timeout_s!r}: expected more than 0, at most a day")
    return TransactionRun(TRANSACTIONAL_ID_PREFIX + transactional_id, uuid.uuid4().hex, -1, timeout_s)


class ProducerTransactions:
    """The transaction methods of one producer.

    Each method raises an error if the producer's state does not allow the call. Only one thread at a time may call
    ``begin``, ``commit``, ``abort`` and ``send_offsets``.
    """

    def __init__(
        self,
        sender: Sender,
        run: TransactionRun,
        *,
        settle: Callable[[], BaseException | None],
        drop_failures: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """Create the object, without an open transaction.

        ``settle`` waits until all accepted records have ended, and returns the first failure. ``drop_failures`` drops
        the failures that ``flush`` must not raise. ``timeout_s`` bounds each call to the coordinator.
        """
        assert sender.transactions is not None
        self.run = run
        self.state = State.NONE
        self._sender = sender
        self._transactions = sender.transactions
        self._settle = settle
        self._drop_failures = drop_failures
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        #: The first failure of a record since ``begin``. With a failure the transaction can only be aborted.
        self._failure: BaseException | None = None

    @property
    def may_write(self) -> bool:
        return self.state in {State.OPEN, State.JOINED}

    def require_open(self) -> None:
        """Raise TransactionStateError or ProducerFenced unless records can be written in a transaction."""
        if not self.may_write:
            raise self._wrong("nothing can be written")

    def failed(self, error: BaseException) -> None:
        """Record that a write has failed, so that the transaction can only be aborted.

        Any thread may call this method.
        """
        self._failure = self._failure or error

    def join(self, identity: ProducerIdentity) -> None:
        """Take part in a transaction that another process begins and ends."""
        self._sender.call(lambda: self._transactions.join(self.run, identity))
        self.state = State.JOINED

    def begin(self) -> None:
        with self._lock:
            if self.state is not State.NONE:
                raise self._wrong("begin")
            try:
                self._sender.call(lambda: self._transactions.begin(self.run, timeout_s=self._timeout_s))
            except ProducerFenced:
                self.state = State.FENCED
                raise
            self._failure = None
            self.state = State.OPEN

    def commit(self) -> None:
        with self._lock:
            if self.state not in {State.OPEN, State.UNKNOWN}:
                raise self._wrong("commit")
            self._sender.thread.refuse_own_thread("commit")
            if self.state is State.OPEN:
                failure = self._settle() or self._failure
                if isinstance(failure, ProducerFenced):
                    self.state = State.FENCED
                    raise ProducerFenced(failure.detail) from failure
                if failure is not None:
                    raise TransactionStateError(
                        f"{self.run} can only be aborted: a write failed: {failure}"
                    ) from failure
            self._end(commit=True)

    def abort(self) -> None:
        with self._lock:
            if self.state is State.FENCED:
                return
            if self.state is not State.OPEN:
                raise self._wrong("abort")
            self._sender.thread.refuse_own_thread("abort")
            self._abort(self._timeout_s)

    def send_offsets(self, offsets: Mapping[TopicPartition, int], group: str | GroupMetadata) -> None:
        with self._lock:
            if self.state is not State.OPEN:
                raise self._wrong("send_offsets")
            if not offsets:  # a member without partitions has no offsets to commit
                return
            ids = group.topic_ids if isinstance(group, GroupMetadata) else {}
            named = [GroupOffset(tp[0], tp[1], offset, ids.get(tp[0], "")) for tp, offset in offsets.items()]
            try:
                self._sender.call(lambda: self._transactions.add_offsets(group, named, timeout_s=self._timeout_s))
            except BaseException as error:
                self.failed(error)
                raise

    def close(self) -> None:
        """Try for a short time to abort an open transaction, because the producer ends."""
        with self._lock:
            if self.state is State.OPEN:
                self._abort(min(_ABORT_AT_CLOSE_S, self._timeout_s))

    def _abort(self, timeout_s: float) -> None:
        try:
            self._end(commit=False, timeout_s=timeout_s)
        except (ProducerFenced, TransactionStateError):
            pass  # the transaction is aborted; the next ``begin`` raises the error if the producer is fenced
        finally:
            self._drop_failures()

    def _end(self, *, commit: bool, timeout_s: float | None = None) -> None:
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        # The state if Ctrl-C ends the wait below: the request may have been sent.
        after = State.UNKNOWN if commit else State.NONE
        asked = self.state is State.UNKNOWN

        def end() -> Coroutine[Any, Any, None]:
            nonlocal asked
            asked = True
            return self._transactions.end(commit=commit, timeout_s=wait_s)

        try:
            self._sender.call(end)
            after = State.NONE
        except CommitOutcomeUnknown:
            raise
        except ProducerClosed as error:
            if commit and asked:  # the I/O thread has ended, and the request may have been sent before
                detail = f"{self.run} may be committed or aborted, as a whole: {error}"
                raise CommitOutcomeUnknown(detail) from error
            after = State.NONE
            raise
        except ProducerFenced:
            after = State.FENCED
            raise
        except SparklogError:
            after = State.NONE
            raise
        finally:
            self.state = after

    def _wrong(self, action: str) -> TransactionStateError | ProducerFenced:
        match self.state:
            case State.NONE:
                return TransactionStateError(f"{action}: no transaction of {self.run} is open: call begin() first")
            case State.OPEN:
                return TransactionStateError(f"{action}: {self.run} is still open: commit or abort it first")
            case State.UNKNOWN:
                return TransactionStateError(
                    f"{action}: the outcome of the commit of {self.run} is unknown: call commit() again, or create "
                    "another producer with this id"
                )
            case State.FENCED:
                return ProducerFenced(f"{action}: {self.run}: this producer is fenced: create another one")
            case State.JOINED:
                return TransactionStateError(f"{action}: {self.run} is ended by the process that began it")
