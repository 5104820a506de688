"""The history of a test on a cluster: requests and responses of clients, injected faults, and the final logs.

A history is a file of JSON lines, which are written as the events happen. The first line has the format version. Each
record contains its name ``<producer>:<number>``; each producer counts its records. Records of batches, polls and logs
are written as ranges of consecutive records (``Run``), so that a history of millions of records stays readable.
``checker`` checks a history.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

import msgspec

from sparklog.errors import ConfigError

#: Version 2 has transactions and groups.
FORMAT_VERSION = 2
#: What the checker expects of a topic. strict: producers are idempotent with acks=all, so no record is lost or
#: repeated. loose: acks is 1 or 0, so that faults may lose and repeat records. remade: the topic is deleted and
#: recreated under load, so that only reads are checked.
Rules = Literal["strict", "loose", "remade"]


class Run(msgspec.Struct, frozen=True, array_like=True):
    """A run of records: records of one producer with consecutive numbers and consecutive offsets.

    ``first`` and ``offset`` are the number and the offset of the first record.
    """

    offset: int
    producer: str
    first: int
    count: int


class ObservedBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch as one replica stores it. ``digest`` is the SHA-256 of header and body, shortened to 16 digits."""

    base_offset: int
    count: int
    leader_epoch: int
    digest: str


class _Entry(msgspec.Struct, frozen=True, kw_only=True, tag_field="what"):
    #: The time of the entry, in seconds since the history began.
    at: float = 0.0


class Began(_Entry, frozen=True, tag="began"):
    version: int
    seed: int
    brokers: int
    #: The broker settings, and the arguments of the run.
    settings: dict[str, str] = {}


class TopicUsed(_Entry, frozen=True, tag="topic"):
    topic: str
    rules: Rules
    acks: int


class Sent(_Entry, frozen=True, tag="sent"):
    """The event that a client has passed a batch to a producer.

    ``transaction`` is the name of the batch's transaction, or empty.
    """

    producer: str
    topic: str
    partition: int
    first: int
    count: int
    transaction: str = ""


class OperationEnded(_Entry, frozen=True, tag="ended"):
    """The event that the outcome of a batch is known.

    ``refused``: the batch was not sent. ``unknown``: the batch may be in the log. ``aborted``: its transaction was
    aborted. ``base_offset`` is -1 if the client does not know it.
    """

    producer: str
    first: int
    outcome: Literal["acknowledged", "refused", "unknown", "aborted"]
    base_offset: int = -1
    error: str = ""


class Positioned(_Entry, frozen=True, tag="positioned"):
    """The event that a consumer was started or has called ``seek``. Its next poll begins at ``offset``."""

    consumer: str
    topic: str
    partition: int
    offset: int


class Polled(_Entry, frozen=True, tag="polled"):
    """The event that a poll has returned records of one partition, with the offsets ``[start, end)``.

    ``group`` is the group of which the consumer is a member, or empty.
    """

    consumer: str
    topic: str
    partition: int
    start: int
    end: int
    runs: tuple[Run, ...]
    group: str = ""


class Assigned(_Entry, frozen=True, tag="assigned"):
    """The event that a member of a group was assigned a partition, which it reads from the group's committed offset."""

    consumer: str
    group: str
    topic: str
    partition: int


class Committed(_Entry, frozen=True, tag="committed"):
    """The event that the coordinator has acknowledged a group's offset of a partition."""

    consumer: str
    group: str
    topic: str
    partition: int
    offset: int


class ConsumerFailed(_Entry, frozen=True, tag="consumer_failed"):
    consumer: str
    error: str
    #: True for an error that no fault may cause: an offset that a poll has returned is out of range, or a batch is
    #: corrupt.
    forbidden: bool = False


class RecordedFault(_Entry, frozen=True, tag="fault"):
    """The event that the test injected a fault, or changed the cluster in another way. ``text`` describes it."""

    text: str
    error: str = ""


class FinalLog(_Entry, frozen=True, tag="final_log"):
    """The log of one replica up to its high watermark, after all faults have ended.

    ``hidden`` are the ranges of offsets that a reader of committed records must skip: markers, and records of
    transactions that the log does not commit.
    """

    broker: int
    topic: str
    partition: int
    log_start: int
    high_watermark: int
    log_end: int
    batches: tuple[ObservedBatch, ...]
    runs: tuple[Run, ...]
    hidden: tuple[tuple[int, int], ...] = ()


class NotHealed(_Entry, frozen=True, tag="not_healed"):
    """The event that not all replicas were in sync in time after the faults had ended."""

    text: str


class Finished(_Entry, frozen=True, tag="finished"):
    """The event that a test has ended normally. It is the last entry of a history.

    A history without it comes from an interrupted run, and does not prove that no record was lost.
    """


Entry: TypeAlias = (
    Began
    | TopicUsed
    | Sent
    | OperationEnded
    | Positioned
    | Polled
    | Assigned
    | Committed
    | ConsumerFailed
    | RecordedFault
    | FinalLog
    | NotHealed
    | Finished
)
_DECODER = msgspec.json.Decoder(Entry)


class HistoryWriter:
    """A writer that appends entries to a file at once, so that the history is readable after a crash.

    Any thread may use it.
    """

    def __init__(self, path: Path, *, seed: int, brokers: int, settings: dict[str, str] | None = None) -> None:
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self._began = time.monotonic()
        self.write(Began(version=FORMAT_VERSION, seed=seed, brokers=brokers, settings=settings or {}))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def write(self, entry: Entry) -> None:
        """Append one entry. Its ``at`` is set under the lock, so that the lines are in the order of their times."""
        with self._lock:
            stamped = msgspec.structs.replace(entry, at=round(self.elapsed_s, 4))
            self._file.write(self._encoder.encode(stamped) + b"\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_history(path: Path) -> Iterator[Entry]:
    """Yield the entries of a history in order. Skip an incomplete last line, which a crash may leave.

    Raises:
        ConfigError: the file is not a history, has a newer format, or has an invalid line. The message names the file
            and the line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = _DECODER.decode(line)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
            if number == 1 and not isinstance(entry, Began):
                raise ConfigError(f"{path}, line 1: expected the beginning of a history")
            if isinstance(entry, Began) and entry.version > FORMAT_VERSION:
                raise ConfigError(
                    f"{path} has format version {entry.version}; this version of sparklog supports up to"
                    f" {FORMAT_VERSION}"
                )
            yield entry


def runs_of(records: Iterable[tuple[int, str, int]]) -> tuple[Run, ...]:
    """Group consecutive records into runs (see ``Run``).

    Each record is given as (offset, producer, number). The records are in the order of their offsets.
    """
    runs: list[Run] = []
    offset, producer, first, count = -1, "", -1, 0
    for at, who, number in records:
        if count and (at, who, number) == (offset + count, producer, first + count):
            count += 1
            continue
        if count:
            runs.append(Run(offset, producer, first, count))
        offset, producer, first, count = at, who, number, 1
    if count:
        runs.append(Run(offset, producer, first, count))
    return tuple(runs)


def record_value(producer: str, number: int, padding: int = 0) -> bytes:
    """Return the content of a record: its name, which has its producer and number, and then padding."""
    return f"{producer}:{number}:".encode() + b"." * padding


def record_name(value: bytes | None) -> tuple[str, int]:
    """Return the producer and the number in the content of a record.

    For other content, return its first bytes as the producer, and the number -1.
    """
    producer, _, rest = (value or b"").partition(b":")
    number, _, _ = rest.partition(b":")
    if number.isdigit():
        return producer.decode(errors="replace"), int(number)
    return f"?{bytes((value or b'')[:40])!r}", -1
