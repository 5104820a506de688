"""The history of a cluster under faults: requests and responses of clients, actions on the cluster, and final logs.

A history is a file of JSON lines, one entry a line, written as events happen; the first line has the format version.
The content ``<producer>:<number>`` names a record, and each producer counts up its numbers. Batches, polls and logs
are written as runs, so that a history of millions of records stays readable. ``checker`` judges a history.
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

FORMAT_VERSION = 1
#: strict: idempotent producers, acks=all. loose: acks 1 or 0, where faults lose and repeat records. remade: deleted
#: and recreated under load, so that only reads are judged.
Rules = Literal["strict", "loose", "remade"]


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Records ``first`` to ``first + count - 1`` of one producer at consecutive offsets from ``offset`` on."""

    offset: int
    producer: str
    first: int
    count: int


class ObservedBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch as one replica stores it: SHA-256 over header and body, shortened to 16 digits."""

    base_offset: int
    count: int
    leader_epoch: int
    digest: str


class _Entry(msgspec.Struct, frozen=True, kw_only=True, tag_field="what"):
    #: Seconds since the history began.
    at: float = 0.0


class Began(_Entry, frozen=True, tag="began"):
    version: int
    seed: int
    brokers: int
    #: Broker settings, and how the run was asked for.
    settings: dict[str, str] = {}


class TopicUsed(_Entry, frozen=True, tag="topic"):
    topic: str
    rules: Rules
    acks: int


class Sent(_Entry, frozen=True, tag="sent"):
    """A produce of one batch was handed to a client."""

    producer: str
    topic: str
    partition: int
    first: int
    count: int


class OperationEnded(_Entry, frozen=True, tag="ended"):
    """The outcome of a produce.

    ``refused``: nothing was sent. ``unknown``: the batch may be in the log. ``aborted``: with its transaction.
    ``base_offset`` -1: the client did not learn it.
    """

    producer: str
    first: int
    outcome: Literal["acknowledged", "refused", "unknown", "aborted"]
    base_offset: int = -1
    error: str = ""


class Positioned(_Entry, frozen=True, tag="positioned"):
    """A consumer was started, or moved on purpose: its next poll begins at ``offset``."""

    consumer: str
    topic: str
    partition: int
    offset: int


class Polled(_Entry, frozen=True, tag="polled"):
    """The records that one poll of one partition returned: offsets ``[start, end)``."""

    consumer: str
    topic: str
    partition: int
    start: int
    end: int
    runs: tuple[Run, ...]


class ConsumerFailed(_Entry, frozen=True, tag="consumer_failed"):
    consumer: str
    error: str
    #: An error that no fault allows: an offset that a poll returned before is out of range, or a batch is corrupt.
    forbidden: bool = False


class RecordedFault(_Entry, frozen=True, tag="fault"):
    """An action on the cluster, in words."""

    text: str
    error: str = ""


class FinalLog(_Entry, frozen=True, tag="final_log"):
    """One replica's log after all faults have ended, up to its high watermark."""

    broker: int
    topic: str
    partition: int
    log_start: int
    high_watermark: int
    log_end: int
    batches: tuple[ObservedBatch, ...]
    runs: tuple[Run, ...]


class NotHealed(_Entry, frozen=True, tag="not_healed"):
    """The report that the cluster did not become whole in time after the faults had ended."""

    text: str


class Finished(_Entry, frozen=True, tag="finished"):
    """The last line. A history without it comes from an interrupted run, and does not prove that no record was lost."""


Entry: TypeAlias = (
    Began
    | TopicUsed
    | Sent
    | OperationEnded
    | Positioned
    | Polled
    | ConsumerFailed
    | RecordedFault
    | FinalLog
    | NotHealed
    | Finished
)
_DECODER = msgspec.json.Decoder(Entry)


class HistoryWriter:
    """A writer that appends entries to a file from any thread, each at once: a history is readable after a crash."""

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
        """Append one entry, and set its ``at`` under the lock, so that lines are in the order of their times."""
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
    """Yield the entries in order; skip an incomplete last line, which a crash leaves.

    Raises:
        ConfigError: not a history, a newer format, or a line that cannot be understood; names file and line.
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
    """Return the runs of records (offset, producer, number), which are in the order of offsets."""
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
    """Return the content that names a record."""
    return f"{producer}:{number}:".encode() + b"." * padding


def record_name(value: bytes | None) -> tuple[str, int]:
    """Return producer and number of a record; other content gets number -1, and its first bytes as the producer."""
    producer, _, rest = (value or b"").partition(b":")
    number, _, _ = rest.partition(b":")
    if number.isdigit():
        return producer.decode(errors="replace"), int(number)
    return f"?{bytes((value or b'')[:40])!r}", -1
