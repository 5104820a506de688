"""Tests of projected reads with cached CRCs of batches, for any change of the log and of the disk."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from sparklog.broker.replication.crc_cache import BatchKey, CrcCache
from sparklog.broker.replication.partition import AppendRules
from sparklog.broker.requests import projected_read
from sparklog.broker.requests.projected_read import COLUMN_COST_BYTES, KEPT_COST_BYTES, ProjectedRead, read_projected
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition, TopicSchema
from sparklog.record.codec import decode_batch, encode_batch
from sparklog.record.header import unpack_headers
from sparklog.record.projection import RUN_BYTES, projected_schema
from sparklog.record.schema import schema_message
from sparklog.storage.disk import read_ahead
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.segment import DATA_SUFFIX
from tests.storage.batches import SCHEMA, SCHEMAS, TOPIC_ID, TP, append, batch, config, create_log, open_directory

#: The size of a text: two of them make a batch whose CRCs are cached.
TEXT_BYTES = 400_000
MIB = 1 << 20


@dataclass
class Hosted:
    """The parts of a partition that a read needs."""

    log: Log
    tp: TopicPartition = TP
    topic_id: str = TOPIC_ID
    rules: AppendRules = field(default_factory=lambda: AppendRules(SCHEMA, 0, 8 * MIB, None))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LogDirectory]:
    """Create a log that keeps none of its batches in memory."""
    found = open_directory(tmp_path, hot_bytes=0)
    yield found
    found.close()


@pytest.fixture
def log(directory: LogDirectory) -> Log:
    return create_log(directory)


def write(log: Log, letter: str, *, leader_epoch: int = 1) -> None:
    """Append two records, numbered by their offsets."""
    append(log, batch(2, first=log.log_end_offset, text=letter * TEXT_BYTES), leader_epoch=leader_epoch)


def ask(log: Log, offset: int, *columns: str, kept: CrcCache, max_bytes: int = 10 * MIB, **more: Any) -> ProjectedRead:
    hosted = {name: more.pop(name) for name in ("tp", "topic_id", "rules") if name in more}
    partition = cast(Any, Hosted(log, **hosted))
    return read_projected(
        partition, offset, columns, kept=kept, max_bytes=max_bytes, end_offset=log.log_end_offset, **more
    )


def values(found: ProjectedRead, *columns: str) -> list[Any]:
    """Decode batches as readers do, with checksums. Return for each record its number, the first letter of its text,
    or both."""
    bodies = memoryview(b"".join(found.records.bodies))
    schema = projected_schema(SCHEMA, columns)
    rows: list[Any] = []
    at = 0
    for header in unpack_headers(found.records.headers):
        batch = decode_batch(header, bodies[at : at + header.stored_bytes], schema)
        rows += ["".join(str(value)[:1] for value in row.values()) for row in batch.to_pylist()]
        at += header.stored_bytes
    assert at == found.records.body_bytes == len(bodies)
    return rows


def flip(path: Path, at: int) -> None:
    """Flip one bit in place, in the mapped file of any reader."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def data_file(directory: LogDirectory) -> Path:
    (found,) = (path for path in directory.path.rglob(f"*{DATA_SUFFIX}") if TP.topic in path.parent.name)
    return found


def refused() -> Any:
    return pytest.raises(BrokerError, match=r"^CORRUPT_MESSAGE: .*CRC32C")


def test_later_damage_is_found_by_the_reader_and_by_the_broker(directory: LogDirectory, log: Log) -> None:
    write(log, "a")
    write(log, "b")
    kept = CrcCache()
    assert values(ask(log, 0, "number", kept=kept), "number") == ["0", "1", "2", "3"]
    assert len(kept) == 2
    path = data_file(directory)
    flip(path, path.read_bytes().index(b"b" * 1000) + 500)  # in the second batch's text
    found = ask(log, 0, "number", "text", kept=kept)
    assert found.records.batch_count == 2
    with refused():
        values(found, "number", "text")
    assert values(ask(log, 0, "number", kept=kept), "number") == ["0", "1", "2", "3"], "these batches are not damaged"
    assert len(kept) == 2
    # The reader that found the damage asks for a verification: it gets the intact batches before it, and then the
    # error.
    assert values(ask(log, 0, "text", kept=kept, verify=True), "text") == ["a", "a"]
    assert len(kept) == 1
    with refused() as caught:
        ask(log, 2, "text", kept=kept, verify=True)
    assert "flights-0 at offset 2" in caught.value.detail
    # From now on every reader gets the error, for any columns.
    with refused():
        ask(log, 2, "number", kept=kept)


def test_metadata_damaged_later_are_found_by_the_broker(directory: LogDirectory, log: Log) -> None:
    write(log, "a")
    kept = CrcCache()
    ask(log, 0, "text", kept=kept)
    (header,) = unpack_headers(log.read(0, max_bytes=1, end_offset=2).headers)
    flip(data_file(directory), header.position + 40)
    with refused():
        ask(log, 0, "text", kept=kept)
    assert len(kept) == 0


def test_a_truncated_and_rewritten_log_is_verified_again(log: Log) -> None:
    kept = CrcCache()
    write(log, "a")
    write(log, "b")
    assert values(ask(log, 0, "text", kept=kept), "text") == ["a", "a", "b", "b"]
    log.truncate(2)
    write(log, "c")  # with the same leader epoch, time and length
    write(log, "d")
    assert values(ask(log, 0, "text", kept=kept), "text") == ["a", "a", "c", "c", "d", "d"]
    assert values(ask(log, 0, "text", "number", kept=kept), "text", "number") == [
        *("0a", "1a", "2c", "3c", "4d", "5d"),
    ]
    log.restart_at(0)
    write(log, "e", leader_epoch=2)
    assert values(ask(log, 0, "text", kept=kept), "text") == ["e", "e"]


def test_a_recreated_topic_and_another_partition_share_no_crcs(directory: LogDirectory, log: Log) -> None:
    kept = CrcCache()
    write(log, "a")
    assert values(ask(log, 0, "text", kept=kept), "text") == ["a", "a"]
    directory.delete(TP)
    recreated = directory.create(TP, "t-2", schemas=SCHEMAS, config=config())
    write(recreated, "b")
    assert values(ask(recreated, 0, "text", kept=kept, topic_id="t-2"), "text") == ["b", "b"]
    # the same bytes with the same header, elsewhere
    other = directory.create(TopicPartition("flights", 1), TOPIC_ID, schemas=SCHEMAS, config=config())
    write(other, "a")
    assert len(kept) == 2
    found = ask(other, 0, "text", kept=kept, tp=TopicPartition("flights", 1))
    assert values(found, "text") == ["a", "a"] and len(kept) == 3


def test_wrong_cached_crcs_are_corrected_by_verification(log: Log) -> None:
    write(log, "a")
    kept = CrcCache()
    ask(log, 0, "text", kept=kept)
    header = log.read(0, max_bytes=1, end_offset=2).headers
    key = BatchKey(TOPIC_ID, 0, header)
    sound = kept.get(key)
    assert sound is not None
    wrong = array("I", sound)
    wrong[3] ^= 1
    kept.put(key, wrong)
    with refused():
        values(ask(log, 0, "text", kept=kept), "text")
    assert values(ask(log, 0, "text", kept=kept, verify=True), "text") == ["a", "a"]
    assert kept.get(key) == sound
    assert values(ask(log, 0, "text", kept=kept), "text") == ["a", "a"]


def test_a_response_without_verification_covers_more_of_the_log(directory: LogDirectory) -> None:
    log = create_log(directory, segment_bytes=4 * MIB)
    for number in range(24):
        write(log, "abcdefgh"[number % 8])
    assert len(log.segments) > 2
    kept = CrcCache()
    stored = log.read(0, max_bytes=1, end_offset=2).body_bytes
    most = 3 * stored

    def batches(*columns: str, max_bytes: int = most) -> list[int]:
        """Return the number of records in each response, through the whole log."""
        counts = []
        at = 0
        while at < log.log_end_offset:
            found = ask(log, at, *columns, kept=kept, max_bytes=max_bytes)
            assert found.records.body_bytes <= found.cost <= max(max_bytes, stored)
            assert found.stored_bytes == stored * found.records.batch_count
            first = unpack_headers(found.records.headers)[0]
            assert first.base_offset == at
            counts.append(found.records.batch_count)
            at = found.records.next_offset
        return counts

    assert max(batches("number")) == 3  # verified bytes count with their own size
    kept_ones = most // KEPT_COST_BYTES
    assert kept_ones > 3 and 24 % kept_ones == 0
    assert batches("number") == [kept_ones] * (24 // kept_ones), "a response must cross segments"
    assert max(batches("number", max_bytes=1)) == 1
    assert max(batches("text")) == 3  # sent bytes count as well
    # A batch without cached CRCs is verified while the whole batch fits.
    key = BatchKey(TOPIC_ID, 0, log.read(2, max_bytes=1, end_offset=4).headers)
    kept.drop(key)
    assert ask(log, 0, "number", kept=kept, max_bytes=KEPT_COST_BYTES + stored - 1).records.batch_count == 1
    assert kept.get(key) is None
    assert ask(log, 0, "number", kept=kept, max_bytes=KEPT_COST_BYTES + stored).records.batch_count == 2
    assert kept.get(key) is not None


def test_a_response_is_bounded_by_its_runs_and_columns(directory: LogDirectory) -> None:
    texts, numbers = [f"t{i}" for i in range(11)], [f"n{i}" for i in range(10)]
    schema = pa.schema(
        [pa.field(texts[0], pa.string())]
        + [field for n, t in zip(numbers, texts[1:], strict=True) for field in ((n, pa.int64()), (t, pa.string()))]
    )
    rows = pa.RecordBatch.from_pylist(
        [{name: 1 if name in numbers else "x" * 150_000 for name in schema.names}], schema
    )
    log = directory.create(TP, TOPIC_ID, schemas=(TopicSchema(0, schema_message(schema)),), config=config())
    for _ in range(4):
        append(log, encode_batch(rows, schema_id=0, compression=None, event_time=None))
    kept = CrcCache()
    rules = AppendRules(schema, 0, 8 * MIB, None)
    stored = ask(log, 0, "n0", kept=kept, rules=rules).stored_bytes // 4
    assert len(kept) == 4
    one_run = ask(log, 0, "n0", kept=kept, rules=rules)
    assert (one_run.records.batch_count, one_run.cost) == (4, 4 * KEPT_COST_BYTES)
    scattered = ask(log, 0, *numbers, kept=kept, rules=rules)
    cost = 10 * RUN_BYTES + 21 * COLUMN_COST_BYTES
    assert KEPT_COST_BYTES < cost < stored and scattered.records.body_bytes < 4 * KEPT_COST_BYTES
    assert (scattered.records.batch_count, scattered.cost) == (4, 4 * cost)
    assert ask(log, 0, *numbers, kept=kept, rules=rules, max_bytes=3 * cost - 1).records.batch_count == 2
    # It counts no more than if it were verified.
    assert ask(log, 0, *numbers, "t0", "t5", kept=kept, rules=rules).cost <= 4 * stored


def test_the_most_recently_used_crcs_are_kept(log: Log) -> None:
    for letter in "abc":
        write(log, letter)
    headers = log.read(0, max_bytes=10 * MIB, end_offset=6).headers
    keys = [BatchKey(TOPIC_ID, 0, headers[at : at + 96]) for at in range(0, len(headers), 96)]
    kept = CrcCache()
    ask(log, 0, "number", kept=kept)
    one = kept.size_bytes // 3
    assert one * 3 == kept.size_bytes
    kept = CrcCache(limit_bytes=2 * one)
    ask(log, 0, "number", kept=kept, max_bytes=1)
    ask(log, 2, "number", kept=kept, max_bytes=1)
    ask(log, 0, "number", kept=kept, max_bytes=1)
    ask(log, 4, "number", kept=kept, max_bytes=1)
    assert [kept.get(key) is not None for key in keys] == [True, False, True]
    assert (len(kept), kept.size_bytes) == (2, 2 * one)
    kept.put(keys[0], array("I", bytes(4 * 2 * one)))  # more than the cache holds
    assert (len(kept), kept.size_bytes) == (0, 0)
    assert values(ask(log, 0, "text", kept=kept), "text") == ["a", "a", "b", "b", "c", "c"]
    kept.drop(keys[0])
    kept.drop(keys[0])
    assert kept.size_bytes == len(kept) * one


def test_a_response_does_not_read_all_headers_of_tiny_batches(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(100):
        append(log, batch(1))
    unpacked: list[int] = []

    def noted(source: bytes) -> Any:
        unpacked.append(len(source) // 96)
        return unpack_headers(source)

    monkeypatch.setattr(projected_read, "unpack_headers", noted)
    found = ask(log, 0, "number", kept=CrcCache(), max_bytes=4 * projected_read.BATCH_COST_BYTES)
    assert found.records.batch_count == 4 and unpacked == [4]


def test_only_needed_data_is_read_ahead(log: Log, directory: LogDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for letter in "abc":
        write(log, letter)
    kept = CrcCache()
    ahead: list[tuple[int, int]] = []

    def noted(view: Any, position: int, length: int) -> None:
        assert isinstance(view.obj, mmap.mmap)
        read_ahead(view, position, length)
        ahead.append((position, length))

    monkeypatch.setattr(projected_read, "read_ahead", noted)
    ask(log, 0, "text", kept=kept)
    assert not ahead, "all bytes were read"
    found = ask(log, 0, "text", kept=kept)
    headers = unpack_headers(log.read(0, max_bytes=10 * MIB, end_offset=6).headers)
    content = data_file(directory).read_bytes()
    assert ahead[:3] == [(header.position, 4096) for header in headers]
    views = [bytes(piece) for piece in found.records.bodies if isinstance(piece, memoryview)]
    assert views == [content[at : at + length] for at, length in ahead[3:]] and len(views) == 3
    ahead.clear()
    ask(log, 2, "number", kept=kept, max_bytes=1)
    assert len(ahead) == 1 and ahead[0][1] == 16, "for one batch a read ahead of the metadata is useless"
    read_ahead(memoryview(b"in memory"), 0, 9)
    read_ahead(b"", 0, 0)


def test_no_batch_is_verified_beyond_the_response_limit(log: Log) -> None:
    write(log, "a")
    write(log, "b")
    kept = CrcCache()
    assert ask(log, 0, "number", kept=kept, max_bytes=1).records.batch_count == 1
    assert len(kept) == 1
    # The read examines the second batch because the first one needs no verification. Verified, the second would be too
    # long.
    found = ask(log, 0, "number", kept=kept, max_bytes=KEPT_COST_BYTES + 1000)
    assert found.records.batch_count == 1 and len(kept) == 1
    with pytest.raises(BrokerError) as caught:
        ask(log, 0, "nonsense", kept=kept)
    assert caught.value.code is ErrorCode.SCHEMA_OUTDATED
