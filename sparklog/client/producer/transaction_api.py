"""Begin, commit and abort as the user of a producer calls them: which of them the state allows, and what it is after.

In the caller's thread; what is asked of brokers runs on the sender's. Nothing is committed unless all that was handed
over since ``begin`` is acknowledged.
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
from sparklog.model import TopicPartition
from sparklog.protocol.messages import GroupOffset

#: What becomes of an open transaction when its producer is closed is waited for so long; then its time-out does it.
_ABORT_AT_CLOSE_S = 5.0


class State(Enum):
    NONE = auto()
    OPEN = auto()
    #: A commit may or may not have been decided.
    UNKNOWN = auto()
    FENCED = auto()
    #: A sink's, which it does not end itself.
    JOINED = auto()


def producer_run(transactional_id: str, timeout_s: float) -> TransactionRun:
    """One life of a transactional producer. Raises ConfigError."""
    if not transactional_id or len(transactional_id.encode()) > MAX_ID_BYTES:
        raise ConfigError(f"transactional_id={transactional_id!r}: expected 1 to {MAX_ID_BYTES} bytes of text")
    if not 0 < timeout_s <= 86_400:
        raise ConfigError(f"transaction_timeout_s={timeout_s!r}: expected more than 0, at most a day")
    return TransactionRun(f"id:{transactional_id}", uuid.uuid4().hex, -1, timeout_s)


class ProducerTransactions:
    """Owned by a producer. ``begin``, ``commit``, ``abort`` and ``send_offsets`` are called by one thread at a time."""

    def __init__(
        self,
        sender: Sender,
        run: TransactionRun,
        *,
        settle: Callable[[], BaseException | None],
        forget: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """``settle`` waits until all that was handed over has ended, and gives the first failure; ``forget`` drops
        failures that nobody is to be told of again. ``timeout_s`` bounds each call to the coordinator."""
        assert sender.transactions is not None
        self.run = run
        self.state = State.NONE
        self._sender = sender
        self._transactions = sender.transactions
        self._settle = settle
        self._forget = forget
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        #: The first failure of what was handed over since begin: there is nothing to do but to abort.
        self._failure: BaseException | None = None

    @property
    def may_write(self) -> bool:
        return self.state in {State.OPEN, State.JOINED}

    def require_open(self) -> None:
        """Raises TransactionStateError, ProducerFenced."""
        if not self.may_write:
            raise self._wrong("nothing can be written")

    def failed(self, error: BaseException) -> None:
        """A part of what was handed over has failed. From any thread."""
        self._failure = self._failure or error

    def join(self, identity: ProducerIdentity) -> None:
        """Take part in a transaction that others began and will end."""
        self._sender.call(lambda: self._transactions.take_part(self.run, identity))
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
            self._sender.refuse_own_thread("commit")
            if self.state is State.OPEN:
                failure = self._settle() or self._failure
                if isinstance(failure, ProducerFenced):
                    self.state = State.FENCED
                    raise ProducerFenced(failure.detail) from failure
                if failure is not None:
                    raise TransactionStateError(
                        f"{self.run} can only be aborted: a part of what was written failed: {failure}"
                    ) from failure
            self._end(commit=True)

    def abort(self) -> None:
        with self._lock:
            if self.state is State.FENCED:
                return
            if self.state is not State.OPEN:
                raise self._wrong("abort")
            self._sender.refuse_own_thread("abort")
            self._abort(self._timeout_s)

    def send_offsets(self, offsets: Mapping[TopicPartition, int], group: str | GroupMetadata) -> None:
        with self._lock:
            if self.state is not State.OPEN:
                raise self._wrong("send_offsets")
            if not offsets:  # as of a group's member that has no partitions yet: there is nothing to commit then
                return
            ids = group.topic_ids if isinstance(group, GroupMetadata) else {}
            named = [GroupOffset(tp[0], tp[1], offset, ids.get(tp[0], "")) for tp, offset in offsets.items()]
            try:
                self._sender.call(lambda: self._transactions.add_offsets(group, named, timeout_s=self._timeout_s))
            except BaseException as error:
                self.failed(error)
                raise

    def close(self) -> None:
        """The producer ends: what is open is aborted, as far as that is possible in short time."""
        with self._lock:
            if self.state is State.OPEN:
                self._abort(min(_ABORT_AT_CLOSE_S, self._timeout_s))

    def _abort(self, timeout_s: float) -> None:
        try:
            self._end(commit=False, timeout_s=timeout_s)
        except (ProducerFenced, TransactionStateError):
            pass  # it is aborted; who is fenced learns so from the next begin
        finally:
            self._forget()

    def _end(self, *, commit: bool, timeout_s: float | None = None) -> None:
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        # Also when Ctrl-C ends the wait: the request is on its way.
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
            if commit and asked:  # the thread has ended, and the request may be on its way
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

    def _wrong(self, wish: str) -> TransactionStateError | ProducerFenced:
        match self.state:
            case State.NONE:
                return TransactionStateError(f"{wish}: no transaction of {self.run} is open: call begin() first")
            case State.OPEN:
                return TransactionStateError(f"{wish}: {self.run} is open: commit or abort it first")
            case State.UNKNOWN:
                return TransactionStateError(
                    f"{wish}: whether {self.run} is committed is not known: call commit() again to ask, or make "
                    "another producer with this id"
                )
            case State.FENCED:
                return ProducerFenced(f"{wish}: {self.run}: this producer is fenced: make another")
            case State.JOINED:
                return TransactionStateError(f"{wish}: {self.run} is ended by whoever began it")
