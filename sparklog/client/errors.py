"""Errors of clients only, such as timeouts, a full buffer and a truncated log. All of them survive pickling."""

from __future__ import annotations

from sparklog.errors import BrokerError, ErrorCode, SparklogError
from sparklog.model import TopicPartition


class ClientTimeout(SparklogError, TimeoutError):
    """The error that is raised when a call does not succeed within its timeout. The message has the last error.

    The request may still take effect. For example, a write that timed out may be in the log.
    """


class ClientForked(SparklogError):
    """The error that is raised when a forked child uses a client of its parent process.

    Each process must create its own clients.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(
            f"this {kind} belongs to the parent process: a forked process cannot use its connections; "
            f"create a new {kind} after the fork"
        )

    def __reduce__(self) -> tuple[type[ClientForked], tuple[str]]:
        return ClientForked, (self.kind,)


class BufferFull(ClientTimeout):
    """The error that is raised when a producer's buffer stays full too long.

    The error means that the brokers accept less data than the program writes.
    """


class ProducerClosed(SparklogError):
    """The error of a write to a producer that was closed, or that an unexpected error ended.

    The cause (``__cause__``) is the unexpected error of its I/O thread, if there was one.
    """


def closed_for(reason: BaseException) -> ProducerClosed:
    """Return a new ProducerClosed error. Each caller of the producer gets its own error object.

    If ``reason`` is a ProducerClosed, the new error has its text and its cause. Otherwise ``reason`` is the cause.
    """
    error = ProducerClosed(str(reason) if isinstance(reason, ProducerClosed) else f"the producer failed: {reason!r}")
    error.__cause__ = reason.__cause__ if isinstance(reason, ProducerClosed) else reason
    return error


class LogTruncated(BrokerError):
    """The error that is raised when an unclean election has lost records that this reader has read.

    The code is OFFSET_OUT_OF_RANGE. Source: KIP-320.

    The elected replica did not have these records, and their offsets may have other records now. From ``offset`` on,
    the log differs from the records that were read. The log may already differ at earlier offsets. The reader can
    continue at ``offset``.
    """

    def __init__(self, tp: TopicPartition, position: int, diverging: tuple[int, int]) -> None:
        self.tp = tp
        self.position = position
        self.epoch, self.offset = diverging
        super().__init__(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"{tp} was truncated: read up to offset {position}, the log diverges at offset {self.offset} "
            f"(leader epoch {self.epoch})",
        )

    def __reduce__(self) -> tuple[type[LogTruncated], tuple[TopicPartition, int, tuple[int, int]]]:
        return LogTruncated, (self.tp, self.position, (self.epoch, self.offset))


class LocalReadUnavailable(BrokerError):
    """The error of a read with ``local="require"`` that could not use files of this host. The code gives the reason."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(code, detail)

    def __reduce__(self) -> tuple[type[LocalReadUnavailable], tuple[int, str]]:
        return LocalReadUnavailable, (self.code, self.detail)


class ProducerFenced(BrokerError):
    """The error of a producer that was fenced; its open transaction is aborted. The code is INVALID_PRODUCER_EPOCH.

    Another producer began a transaction under the same id, an operator aborted the transaction, or the coordinator
    aborted it because the producer sent nothing for the transaction's timeout. Create a new producer.
    """

    def __init__(self, detail: str) -> None:
        super().__init__(ErrorCode.INVALID_PRODUCER_EPOCH, detail)

    def __reduce__(self) -> tuple[type[ProducerFenced], tuple[str]]:
        return ProducerFenced, (self.detail,)


class TransactionStateError(BrokerError):
    """The error of a call that the state of the transaction does not allow.

    No transaction is open, or the open transaction can only be aborted because a part of it has failed. The code is
    INVALID_TXN_STATE.
    """

    def __init__(self, detail: str) -> None:
        super().__init__(ErrorCode.INVALID_TXN_STATE, detail)

    def __reduce__(self) -> tuple[type[TransactionStateError], tuple[str]]:
        return TransactionStateError, (self.detail,)


class CommitOutcomeUnknown(ClientTimeout):
    """The error of a commit with an unknown outcome: the response was lost, and the coordinator stayed unreachable.

    The transaction is committed or aborted as a whole. Repeat the call to learn the outcome.
    """


class CommitRefused(BrokerError):
    """The error of a refused offset commit: the partitions were revoked, or the consumer was removed from the group.

    Nothing was committed. The new owner of the partitions continues from the earlier commit.

    The code is STALE_MEMBER_EPOCH, UNKNOWN_MEMBER_ID, FENCED_MEMBER_EPOCH or FENCED_INSTANCE_ID.
    """

    def __reduce__(self) -> tuple[type[CommitRefused], tuple[int, str]]:
        return CommitRefused, (self.code, self.detail)


def transaction_error(error: BrokerError, who: str) -> BrokerError:
    """Convert a broker's error to ProducerFenced or TransactionStateError, if its code means one of these errors.

    Return any other error unchanged. ``who`` names the transaction in the message.
    """
    if error.code in {ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.UNKNOWN_PRODUCER_ID}:
        return ProducerFenced(
            f"{who} is fenced: a later run with this id has begun, an administrator aborted it, or its timeout "
            f"expired ({error.detail})"
        )
    if error.code == ErrorCode.INVALID_TXN_STATE:
        return TransactionStateError(f"{who} can only be aborted: {error.detail}")
    return error
