"""Builders for the storage tests: small encoded batches, log directories on either disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from sparklog.config import TopicConfig, broker_config, topic_config
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition, TopicSchema
from sparklog.record.codec import decode_batch, encode_batch
from sparklog.record.header import BatchHeader, unpack_headers
from sparklog.record.marker import Marker, encode_marker
from sparklog.record.schema import schema_message
from sparklog.storage.disk import Disk
from sparklog.storage.log import Log, LogSlice
from sparklog.storage.log_directory import LogDirectory

TP = TopicPartition("flights", 0)
TOPIC_ID = "t-1"
SCHEMA = pa.schema([("number", pa.int64()), ("text", pa.string())])
WIDER = SCHEMA.append(pa.field("more", pa.int64()))
WIDEST = WIDER.append(pa.field("most", pa.int64()))
#: the arguments of ``create_log``
SCHEMAS = (TopicSchema(0, schema_message(SCHEMA)), TopicSchema(1, schema_message(WIDER)))
#: by schema id
_COLUMNS = (SCHEMA, WIDER, WIDEST)
LOG_DIR = Path("/log")

Batch = tuple[BatchHeader, memoryview]
#: the segment.bytes for four batches of ``fill``
SMALL = 1280


def batch(
    count: int = 3,
    *,
    first: int = 0,
    text: str = "x",
    timestamp: int = 1_000,
    producer: int = -1,
    epoch: int = 0,
    sequence: int = -1,
    schema_id: int = 0,
    compression: str | None = None,
    transactional: bool = False,
) -> Batch:
    """Return ``count`` records numbered from ``first`` on. The header has ``timestamp``, regardless of the records."""
    schema = _COLUMNS[schema_id]
    columns = {"number": range(first, first + count), "text": [text] * count, "more": [1] * count, "most": [2] * count}
    record_batch = pa.record_batch([pa.array(columns[name], schema.field(name).type) for name in schema.names], schema)
    header, body = encode_batch(
        record_batch,
        schema_id=schema_id,
        compression=compression,
        event_time=None,
        producer_id=producer,
        producer_epoch=epoch if producer >= 0 else -1,
        first_sequence=sequence,
        transactional=transactional,
    )
    header = header._replace(min_timestamp=timestamp, max_timestamp=timestamp)
    return header, memoryview(body)


def marker(
    *, committed: tuple[int, ...] = (), aborted: tuple[int, ...] = (), schema_id: int = 0, epoch: int = 0
) -> Batch:
    """Return the end of these producers' transactions, each in this producer epoch."""
    said = Marker(tuple((found, epoch) for found in committed), tuple((found, epoch) for found in aborted))
    header, body = encode_marker(said, _COLUMNS[schema_id], schema_id=schema_id)
    return header, memoryview(body)


def config(**overrides: int | str) -> TopicConfig:
    """Return settings by their keys, with ``_`` for the dots."""
    return topic_config({key.replace("_", "."): str(value) for key, value in overrides.items()})


def open_directory(
    path: Path = LOG_DIR,
    *,
    disk: Disk | None = None,
    boot_id: str = "boot-1",
    hot_bytes: int = 1 << 20,
    load: bool = True,
    max_open_segments: int = 100,
    settings: Mapping[str, str] | None = None,
) -> LogDirectory:
    """Open a log directory that removes files immediately."""
    directory = LogDirectory.open(
        path,
        cluster_id="cluster",
        broker_id=1,
        config=broker_config({"hot.batches.bytes": str(hot_bytes), **(settings or {})}),
        disk=disk,
        boot_id=boot_id,
        in_background=lambda work: work(),
        max_open_segments=max_open_segments,
    )
    if load:
        directory.load()
    return directory


def create_log(directory: LogDirectory, **overrides: int | str) -> Log:
    return directory.create(TP, TOPIC_ID, schemas=SCHEMAS, config=config(**overrides))


def append(log: Log, *batches: Batch, leader_epoch: int = 1, now_us: int = 5_000_000) -> OffsetRange:
    return log.append_as_leader(batches, leader_epoch=leader_epoch, now_us=now_us)


def fill(log: Log, batches: int, *, leader_epoch: int = 1, first: int | None = None) -> None:
    """Append ``batches`` of three records each, numbered by their offsets."""
    for _ in range(batches):
        start = log.log_end_offset if first is None else first
        append(log, batch(3, first=start), leader_epoch=leader_epoch)


def read_slices(log: Log, offset: int | None = None, *, max_bytes: int = 1 << 30) -> list[LogSlice]:
    """Read all batches from ``offset`` (by default the log start) to the log end."""
    at = log.log_start_offset if offset is None else offset
    slices = []
    while at < log.log_end_offset:
        found = log.read(at, max_bytes=max_bytes, end_offset=log.log_end_offset)
        assert found.batch_count > 0
        slices.append(found)
        at = found.next_offset
    return slices


def read_numbers(log: Log, offset: int | None = None, *, max_bytes: int = 1 << 30) -> list[int]:
    """Return column ``number`` of all records, decoded with all checks."""
    numbers: list[int] = []
    for found in read_slices(log, offset, max_bytes=max_bytes):
        bodies = memoryview(b"".join(found.bodies))
        assert len(bodies) == found.body_bytes
        at = 0
        for header in unpack_headers(found.headers):
            body = bodies[at : at + header.stored_bytes]
            numbers += decode_batch(header, body, _COLUMNS[header.schema_id]).column("number").to_pylist()
            at += header.stored_bytes
    return numbers


def follow(follower: Log, leader: Log, *, max_bytes: int = 1 << 30) -> None:
    """Copy the batches that the follower does not have."""
    while follower.log_end_offset < leader.log_end_offset:
        found = leader.read(follower.log_end_offset, max_bytes=max_bytes, end_offset=leader.log_end_offset)
        end = follower.append_as_follower(found.headers, memoryview(b"".join(found.bodies)))
        assert end == found.next_offset


def commit_and_seal(log: Log, high_watermark: int | None = None) -> int:
    """Raise the high watermark and seal the due segments. Return the number of sealed segments."""
    log.set_high_watermark(log.log_end_offset if high_watermark is None else high_watermark)
    jobs = log.durability.seals_due()
    for job in jobs:
        job.run()
        log.durability.seal_finished(job)
    return len(jobs)


def store_schemas(log: Log) -> bool:
    """Store new schemas as a thread does, and return whether there were any."""
    job = log.durability.schemas_due()
    if job is None:
        return False
    job.run()
    log.durability.schemas_stored(job)
    return True


def refused(code: ErrorCode):  # type: ignore[no-untyped-def]
    return pytest.raises(BrokerError, match=f"^{code.name}: ")
