"""What only a client can run into: time that is up, a buffer that stays full, a log that was cut under its reader. All
survive pickling."""

from __future__ import annotations

from sparklog.errors import BrokerError, ErrorCode, SparklogError
from sparklog.model import TopicPartition


class ClientTimeout(SparklogError, TimeoutError):
    """What was asked was not done in the time allowed; the message names the last reason seen.

    The request may still take effect: a write that timed out may or may not be in the log.
    """


class ClientForked(SparklogError):
    """A forked child process uses a client of its parent. Each process makes its own clients."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(
            f"this {kind} belongs to the parent process: a forked process cannot use its connections; "
            f"make a new {kind} after the fork"
        )

    def __reduce__(self) -> tuple[type[ClientForked], tuple[str]]:
        return ClientForked, (self.kind,)


class BufferFull(ClientTimeout):
    """The producer's buffer had no room in the time allowed: brokers take less than is being written."""


class ProducerClosed(SparklogError):
    """The producer takes no more records: it was closed, or its I/O thread met what it did not foresee, which is the
    cause (``__cause__``)."""


def closed_for(reason: BaseException) -> ProducerClosed:
    """A new one for each who asks, with the same cause."""
    error = ProducerClosed(str(reason) if isinstance(reason, ProducerClosed) else f"the producer failed: {reason!r}")
    error.__cause__ = reason.__cause__ if isinstance(reason, ProducerClosed) else reason
    return error


class LogTruncated(BrokerError):
    """Records that this reader has seen are not in the log any more: an unclean election put a replica in charge that
    lacked them, and the offsets may hold other records now. Its code is OFFSET_OUT_OF_RANGE. Source: KIP-320.

    ``offset`` is where the log and what was read parted, at the latest; reading can go on from there.
    """

    def __init__(self, tp: TopicPartition, position: int, diverging: tuple[int, int]) -> None:
        self.tp = tp
        self.position = position
        self.epoch, self.offset = diverging
        super().__init__(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"{tp} was truncated: read up to offset {position}, the log has its records up to {self.offset} only "
            f"(leader epoch {self.epoch})",
        )

    def __reduce__(self) -> tuple[type[LogTruncated], tuple[TopicPartition, int, tuple[int, int]]]:
        return LogTruncated, (self.tp, self.position, (self.epoch, self.offset))


class LocalReadUnavailable(BrokerError):
    """A read that was to use files of this host only cannot. The code is that of what hindered it."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(code, detail)

    def __reduce__(self) -> tuple[type[LocalReadUnavailable], tuple[int, str]]:
        return LocalReadUnavailable, (self.code, self.detail)


class ProducerFenced(BrokerError):
    """The end of a producer that was fenced; its open transaction is aborted. The code is INVALID_PRODUCER_EPOCH.

    Another producer began a transaction under the same id, an operator aborted the transaction, or the coordinator did
    because the producer sent nothing for the transaction's timeout. Create a new producer.
    """

    def __init__(self, detail: str) -> None:
        super().__init__(ErrorCode.INVALID_PRODUCER_EPOCH, detail)

    def __reduce__(self) -> tuple[type[ProducerFenced], tuple[str]]:
        return ProducerFenced, (self.detail,)


class TransactionStateError(BrokerError):
    """The transaction does not allow this now: none is open, or a part of it has failed and it can only be aborted.
    Its code is INVALID_TXN_STATE."""

    def __init__(self, detail: str) -> None:
        super().__init__(ErrorCode.INVALID_TXN_STATE, detail)

    def __reduce__(self) -> tuple[type[TransactionStateError], tuple[str]]:
        return TransactionStateError, (self.detail,)


class CommitOutcomeUnknown(ClientTimeout):
    """Whether the transaction is committed or aborted is not known: the coordinator's answer was lost, and it could not
    be asked again. It is one of the two, as a whole; asking again with the same call may tell which."""


class CommitRefused(BrokerError):
    """These positions of a group are not this consumer's to commit (any more): its partitions were given up, or it was
    removed from the group, and others read them from what was committed before. The code says which of these:
    STALE_MEMBER_EPOCH, UNKNOWN_MEMBER_ID, FENCED_MEMBER_EPOCH, FENCED_INSTANCE_ID. Nothing was committed."""

    def __reduce__(self) -> tuple[type[CommitRefused], tuple[int, str]]:
        return CommitRefused, (self.code, self.detail)


def transaction_error(error: BrokerError, who: str) -> BrokerError:
    """The error as users of transactions know it; ``who`` names the transaction."""
    if error.code in {ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.UNKNOWN_PRODUCER_ID}:
        return ProducerFenced(
            f"{who} is fenced: another run with this id has begun since, somebody aborted it, or it gave no sign of "
            f"life in time ({error.detail})"
        )
    if error.code == ErrorCode.INVALID_TXN_STATE:
        return TransactionStateError(f"{who} can only be aborted: {error.detail}")
    return error
