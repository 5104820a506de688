"""Builders for tests of compaction: keyed batches, one complete cleaning, and the view of a reader."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
from msgspec.structs import replace

from sparklog.client.consumer.fetched_batches import PartitionBytes, decode_partition
from sparklog.model import TopicPartition, TopicSchema
from sparklog.protocol.messages import AbortedRange, FetchedPartition
from sparklog.record.codec import encode_batch
from sparklog.record.header import unpack_headers
from sparklog.record.schema import schema_message
from sparklog.storage.cleaning import CleaningRules, CleanJob
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from tests.storage.batches import TOPIC_ID, Batch, append, config

TP = TopicPartition("table", 0)
KEYED = pa.schema([("key", pa.binary()), ("value", pa.int64()), ("more", pa.string())])
SCHEMAS = (TopicSchema(0, schema_message(KEYED)),)
DAY_US = 86_400_000_000
NOW_US = 10_000_000
#: the time of appends, before all cleanings
WRITTEN_US = 1_000


class Seen(NamedTuple):
    """One record as a reader sees it. A tombstone has no value."""

    offset: int
    key: bytes | None
    value: int | None


def keyed_log(directory: LogDirectory, **overrides: int | str | float) -> Log:
    settings = {"cleanup_policy": "compact", "segment_bytes": 4096, "min_cleanable_dirty_ratio": 0, **overrides}
    return directory.create(TP, TOPIC_ID, schemas=SCHEMAS, config=config(**settings))  # type: ignore[arg-type]


def keyed(
    records: list[tuple[bytes | None, int | None]],
    *,
    producer: int = -1,
    epoch: int = 0,
    sequence: int = -1,
    transactional: bool = False,
    compression: str | None = None,
    timestamp: int = 1_000,
) -> Batch:
    keys, values = zip(*records, strict=True)
    more = [None if value is None else "some text" for value in values]
    rows = pa.record_batch([pa.array(keys, pa.binary()), pa.array(values, pa.int64()), pa.array(more)], KEYED)
    header, body = encode_batch(
        rows,
        schema_id=0,
        compression=compression,
        event_time=None,
        producer_id=producer,
        producer_epoch=epoch if producer >= 0 else -1,
        first_sequence=sequence,
        transactional=transactional,
    )
    return header._replace(min_timestamp=timestamp, max_timestamp=timestamp), memoryview(body)


def keyed_rules(log: Log, *, buffer_bytes: int = 1 << 20, seed: int = 7) -> CleaningRules:
    return CleaningRules(("key",), None, log.config, buffer_bytes, 2**40, seed)


def commit_and_seal(log: Log) -> None:
    log.set_high_watermark(log.log_end_offset)
    for job in log.durability.seals_due():
        job.run()
        log.durability.seal_finished(job)


def clean(
    log: Log, now_us: int = 10_000_000, *, buffer_bytes: int = 1 << 20, rules: CleaningRules | None = None
) -> CleanJob | None:
    """Run one cleaning as the broker's cleaner does. Return None if none is due."""
    job = log.cleaning.begin(rules or keyed_rules(log, buffer_bytes=buffer_bytes), now_us, at_once=True)
    if job is None:
        return None
    state = None
    try:
        job.read_keys()
        for group in job.groups():
            found = job.rewrite(group)
            if found is not None and log.cleaning.replace_segments(job, found):
                job.settle()
        state = job.finish(now_us // 1000)
    finally:
        log.cleaning.finished(job, state)
    return job


def seen(log: Log, start: int | None = None, *, committed: bool = True, max_bytes: int = 1 << 30) -> list[Seen]:
    """Return the records that a reader sees, with the code by which clients decode fetches."""
    found: list[Seen] = []
    at = log.log_start_offset if start is None else start
    end = log.last_stable_offset(log.high_watermark) if committed else log.high_watermark
    while at < end:
        piece = log.read(at, max_bytes=max_bytes, end_offset=end)
        if not piece.batch_count:
            break
        aborted = log.transactions.aborted_between(at, piece.next_offset) if committed else []
        answer = FetchedPartition(
            TP.topic, TP.partition, 0, end, end, 0, 0, piece.batch_count, piece.body_bytes,
            aborted=tuple(AbortedRange(*one) for one in aborted),
        )  # fmt: skip
        body = memoryview(b"".join(bytes(one) for one in piece.bodies))
        fetched = PartitionBytes(answer, unpack_headers(piece.headers), body)
        for batch in decode_partition(fetched, lambda _: KEYED, start=at):
            offsets = batch.offsets
            places = range(batch.first_offset, batch.first_offset + batch.batch.num_rows)
            rows = zip(
                places if offsets is None else offsets.tolist(),
                batch.batch["key"].to_pylist(),
                batch.batch["value"].to_pylist(),
                strict=True,
            )
            found += [Seen(*row) for row in rows]
        at = piece.next_offset
    return found


def expected(records: list[Seen], cleaned_to: int, *, horizon: int = 0) -> list[Seen]:
    """Compute what may remain of ``records``: below the cleaned offset the newest record of each key, without old
    tombstones."""
    newest = {record.key: record.offset for record in records if record.offset < cleaned_to}
    return [
        record
        for record in records
        if record.offset >= cleaned_to
        or record.key is None
        or (newest[record.key] == record.offset and (record.value is not None or record.offset >= horizon))
    ]


def write(log: Log, *records: tuple[bytes | None, int | None], **how: object) -> None:
    append(log, keyed(list(records), **how), now_us=WRITTEN_US)  # type: ignore[arg-type]


def rolled(log: Log) -> None:
    """Seal all segments with records."""
    log.config = replace(log.config, segment_ms=1)
    append(log, keyed([(b"last", 0)]), now_us=WRITTEN_US + 2_000 * (1 + log.log_end_offset))
    log.config = replace(log.config, segment_ms=1 << 40)
    commit_and_seal(log)


def copy(leader: Log, follower: Log, *, max_bytes: int = 1 << 30, until: int | None = None) -> None:
    """Copy the leader's log to the follower, as a fetcher does."""
    end = leader.log_end_offset if until is None else until
    if follower.log_end_offset < leader.first_segment_offset:
        follower.restart_at(leader.first_segment_offset)
    while follower.log_end_offset < end:
        found = leader.read(follower.log_end_offset, max_bytes=max_bytes, end_offset=end, for_follower=True)
        if not found.batch_count:
            break
        follower.append_as_follower(found.headers, memoryview(b"".join(bytes(one) for one in found.bodies)))
    follower.set_high_watermark(min(leader.high_watermark, follower.log_end_offset))
