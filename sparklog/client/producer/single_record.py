"""What becomes of a record that is a batch of its own, and who is told of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from sparklog.client.producer.futures import BatchOutcome, CompletionLatch, RecordMetadata, abandon_listener, tell

if TYPE_CHECKING:
    from sparklog.client.producer.direct_send import DirectSender


class SingleRecordCompletion:
    """What became of a record that is a batch of its own: what a ``RecordChunk`` is to many. Told in the thread that
    acts for the producer's, asked in any."""

    def __init__(self, owner: DirectSender, topic: str, partition: int, time_us: int) -> None:
        self.lock = threading.Lock()
        self.finished = CompletionLatch()
        self._owner = owner
        self._topic = topic
        self._partition = partition
        self._time_us = time_us
        self._outcome: RecordMetadata | BaseException | None = None
        self._listeners: list[Callable[[RecordMetadata | BaseException], None]] = []
        self._error_seen = False

    # --- what its future asks ---

    def outcome(self, index: int) -> RecordMetadata | BaseException | None:
        return self._outcome

    def attend(self, index: int) -> RecordMetadata | BaseException | None:
        if self._outcome is None:
            self._owner.stand_in.attend(self._known)
        return self._outcome

    def _known(self) -> bool:
        return self._outcome is not None

    def hurry(self) -> None:
        self._owner.lease.recall()

    def listen(self, index: int, resolve: Callable[[RecordMetadata | BaseException], None]) -> None:
        """As a chunk's. The outcome is looked at again behind it, as it is there before listeners are told: this thread
        calls ``resolve``, or the one that tells, or both do, perhaps at once."""
        outcome = self._outcome
        if outcome is None:  # else who was told would be kept here, and would keep this
            self._listeners.append(resolve)
            outcome = self._outcome
        if outcome is not None:
            resolve(outcome)

    def error_seen(self) -> None:
        self._error_seen = True

    # --- what the producer asks and tells ---

    @property
    def failed(self) -> bool:
        return isinstance(self._outcome, BaseException)

    @property
    def error(self) -> BaseException | None:
        return self._outcome if isinstance(self._outcome, BaseException) else None

    def take_failure(self) -> BaseException | None:
        if self._error_seen:
            return None
        self._error_seen = True
        return self.error

    def acknowledged(self, offset: int) -> None:
        """It is in the log; ``tell`` follows."""
        if self._outcome is None:
            self._outcome = RecordMetadata(self._topic, self._partition, offset, self._time_us)

    def batch_done(self, index: int, outcome: BatchOutcome) -> None:
        if outcome.error is None:
            self.acknowledged(outcome.base_offset)
            self.tell()
        else:
            self.fail(outcome.error)

    def fail(self, error: BaseException) -> None:
        """Nothing more comes of it. Once is enough, and more is the same."""
        if self._outcome is None:
            self._outcome = error
        self.tell()

    def abandon(self, error: BaseException) -> None:
        """As ``Completion.abandon``."""
        self.lock = threading.Lock()
        if self._outcome is None:
            self._outcome = error
            for resolve in self._listeners:
                abandon_listener(resolve, error)

    def tell(self) -> None:
        """Tell whoever waits, and then who would see to it that they are told. More than once is the same: an interrupt
        may come in the middle of it."""
        if self._listeners:
            self._tell_listeners()
        self.finished.end()
        self._owner.ended(self)

    def _tell_listeners(self) -> None:
        outcome = self._outcome
        assert outcome is not None
        waiting = tuple(self._listeners)
        for resolve in waiting:
            tell(resolve, outcome)
        del self._listeners[: len(waiting)]
