"""The history of a cluster under faults: what clients asked and were told, what was done to the cluster, what was left.

A file of JSON lines, written as it happens, one entry a line; the first says which format version it is. Records are
known by content: ``<producer>:<number>``, numbers counting up per producer. Batches, polls and logs are written as
runs, so a history of millions of records stays readable by eye. ``checker`` judges what is in it.
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
#: strict: idempotent producers, acks=all. loose: acks 1 or 0, where faults lose and repeat. remade: deleted and made
#: again under load, so only what is read is judged.
Rules = Literal["strict", "loose", "remade"]


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Records ``first`` to ``first + count - 1`` of one producer at consecutive offsets from ``offset`` on."""

    offset: int
    producer: str
    first: int
    count: int


class StoredBatch(msgspec.Struct, frozen=True, array_like=True):
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


class Ended(_Entry, frozen=True, tag="ended"):
    """What became of it. ``refused``: nothing was sent. ``unknown``: it may be in the log. ``aborted``: with its
    transaction. ``base_offset`` -1: not told."""

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
    """What one poll of one partition handed out: offsets ``[start, end)``."""

    consumer: str
    topic: str
    partition: int
    start: int
    end: int
    runs: tuple[Run, ...]


class ConsumerFailed(_Entry, frozen=True, tag="consumer_failed"):
    consumer: str
    error: str
    #: What no fault allows: an offset that was handed out before is out of range, or a batch is corrupt.
    forbidden: bool = False


class Fault(_Entry, frozen=True, tag="fault"):
    """Something was done to the cluster, in words."""

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
    batches: tuple[StoredBatch, ...]
    runs: tuple[Run, ...]


class NotHealed(_Entry, frozen=True, tag="not_healed"):
    """After the faults had ended, the cluster did not become whole in time."""

    text: str


class Finished(_Entry, frozen=True, tag="finished"):
    """The last line: without it the run was cut short and its history proves nothing lost."""


Entry: TypeAlias = (
    Began | TopicUsed | Sent | Ended | Positioned | Polled | ConsumerFailed | Fault | FinalLog | NotHealed | Finished
)
_DECODER = msgspec.json.Decoder(Entry)


class HistoryWriter:
    """Appends entries to a file from any thread, each at once: what a crash leaves behind can be read."""

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
        """``at`` is set here, under the lock: lines are in the order of their times."""
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
    """Entries in order. A last line that was cut short by a crash is passed over.

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
    """Runs out of (offset, producer, number) in the order of offsets."""
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
    """The content that names a record."""
    return f"{producer}:{number}:".encode() + b"." * padding


def record_name(value: bytes | None) -> tuple[str, int]:
    """Producer and number; what was never written by ``record_value`` gets number -1 and its beginning as producer."""
    producer, _, rest = (value or b"").partition(b":")
    number, _, _ = rest.partition(b":")
    if number.isdigit():
        return producer.decode(errors="replace"), int(number)
    return f"?{bytes((value or b'')[:40])!r}", -1
