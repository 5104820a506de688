"""Tests of rows from segment files that no broker uses any more: all intact batches, and no damaged one."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from sparklog.cli.main import run
from sparklog.errors import StorageError
from sparklog.record.header import HEADER_BYTES, unpack_headers
from sparklog.storage.partition_file import PARTITION_FILE
from sparklog.storage.salvage import segments_to_salvage
from sparklog.storage.set_aside import SET_ASIDE
from tests.cli.in_process import in_process
from tests.storage.batches import (
    SCHEMA,
    SMALL,
    TP,
    WIDER,
    append,
    batch,
    commit_and_seal,
    create_log,
    fill,
    marker,
    open_directory,
)


def data(base: int) -> str:
    return f"{base:020d}.arrow"


def index(base: int) -> str:
    return f"{base:020d}.index"


@pytest.fixture(params=["none", "lz4", "zstd"])
def log_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Write three segments, the first of which is sealed, with a transaction and its marker in the second."""
    directory = open_directory(tmp_path)
    log = create_log(directory, segment_bytes=SMALL)
    compression = None if request.param == "none" else request.param
    for number in range(4):
        append(log, batch(3, first=3 * number, compression=compression))
    append(log, batch(3, first=12, producer=7, sequence=0, transactional=True, compression=compression))
    append(log, marker(aborted=(7,)))
    while len(log.segments) < 3:
        append(log, batch(3, first=log.log_end_offset, compression=compression))
    commit_and_seal(log, 12)
    directory.close()
    return tmp_path / str(TP)


def rows(directory: Path) -> tuple[list[int], list[int | None]]:
    """Return the salvaged rows: column ``number``, and the offset of each row."""
    numbers: list[int] = []
    offsets: list[int | None] = []
    for segment in segments_to_salvage(directory):
        for found in segment.batches():
            found.records.validate(full=True)
            numbers += found.records.column("number").to_pylist()
            offsets += found.offsets.tolist() if found.offsets is not None else [None] * found.records.num_rows
    return numbers, offsets


def bases(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.arrow"))


def test_all_rows_of_intact_segments_are_salvaged_with_their_offsets(log_dir: Path) -> None:
    numbers, offsets = rows(log_dir)
    assert numbers == offsets
    assert numbers[:15] == list(range(15)) and 15 not in numbers, "15 is a marker"
    assert not any(segment.problems for segment in segments_to_salvage(log_dir))


@pytest.mark.parametrize("schemas", ["in partition.json", "in front of the data"])
def test_all_rows_are_salvaged_without_any_index(log_dir: Path, schemas: str) -> None:
    expected, _ = rows(log_dir)
    for base in bases(log_dir):
        (log_dir / index(base)).unlink()
    if schemas != "in partition.json":
        (log_dir / PARTITION_FILE).unlink()
    numbers, offsets = rows(log_dir)
    assert numbers == expected
    assert set(offsets) == {None}


def test_rows_without_headers_are_salvaged_without_offsets(log_dir: Path) -> None:
    expected, _ = rows(log_dir)
    path = log_dir / index(0)
    path.write_bytes(path.read_bytes()[:HEADER_BYTES])
    numbers, offsets = rows(log_dir)
    assert numbers == expected
    end = bases(log_dir)[1]
    assert offsets == [0, 1, 2] + [None] * (end - 3) + expected[end:]


def test_a_damaged_batch_is_omitted_and_named(log_dir: Path) -> None:
    expected, _ = rows(log_dir)
    position = unpack_headers((log_dir / index(0)).read_bytes())[1].position
    content = bytearray((log_dir / data(0)).read_bytes())
    content[position + 200] ^= 1
    (log_dir / data(0)).write_bytes(content)
    assert rows(log_dir)[0] == [number for number in expected if number not in (3, 4, 5)]
    (first, *_) = segments_to_salvage(log_dir)
    assert 3 * sum(1 for _ in first.batches()) == bases(log_dir)[1] - 3
    (problem,) = first.problems
    assert "the batch at offset 3 is skipped" in problem and "CRC32C" in problem


def test_rows_with_a_damaged_header_are_salvaged_without_offsets(log_dir: Path) -> None:
    expected, _ = rows(log_dir)
    content = bytearray((log_dir / index(0)).read_bytes())
    content[HEADER_BYTES + 30] ^= 1
    (log_dir / index(0)).write_bytes(content)
    numbers, offsets = rows(log_dir)
    assert numbers == expected
    assert offsets == [*range(3), None, None, None, *expected[6:]]


@pytest.mark.parametrize("at", range(0, 1400, 131))
def test_no_damage_produces_rows_that_were_never_written(log_dir: Path, at: int) -> None:
    """With checksums no such row exists. Without them, only whole messages that Arrow accepts are rows."""
    expected, _ = rows(log_dir)
    content = bytearray((log_dir / data(0)).read_bytes())
    content[at % len(content)] ^= 0x5A
    (log_dir / data(0)).write_bytes(content)
    found, offsets = rows(log_dir)
    assert [n for n, offset in zip(found, offsets, strict=True) if offset is not None and n != offset] == []
    assert {number for number in expected if number >= bases(log_dir)[1]} <= set(found)
    (log_dir / index(0)).unlink()
    rows(log_dir)  # no error is raised


def test_records_set_aside_by_recovery_are_salvaged(log_dir: Path) -> None:
    """The remaining log and the data set aside together have all rows except those of the damaged batch."""
    expected, _ = rows(log_dir)
    base = bases(log_dir)[1]
    position = unpack_headers((log_dir / index(base)).read_bytes())[0].position
    content = bytearray((log_dir / data(base)).read_bytes())
    content[position + 200] ^= 1
    (log_dir / data(base)).write_bytes(content)
    directory = open_directory(log_dir.parent)
    log = directory.get(TP)
    assert log is not None
    end = log.log_end_offset
    (entry,) = directory.kept_aside.entries()
    directory.close()
    numbers, offsets = rows(log_dir.parent / SET_ASIDE / entry.name)
    assert numbers == offsets == [number for number in expected if number >= end + 3]


def test_a_directory_without_segments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no segment files found"):
        segments_to_salvage(tmp_path)


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_that_can_be_produced_again(log_dir: Path) -> None:
    expected, _ = rows(log_dir)
    output = log_dir.parent / "rows.arrow"
    (log_dir / index(0)).unlink()
    result = in_process("segments", "salvage", log_dir, "-o", output)
    assert result.code == 0, result
    assert "Transactions and duplicates are unknown" in result.text
    table = pa.ipc.open_file(output).read_all()
    assert table.schema == SCHEMA and table.column("number").to_pylist() == expected
    assert run(["segments", "salvage", str(log_dir), "-o", str(output), "--offsets"]) == 0
    table = pa.ipc.open_file(output).read_all()
    end = bases(log_dir)[1]
    assert table.column("_offset").to_pylist() == [None] * end + expected[end:]
    assert table.column("_transactional").to_pylist() == [
        None if number < end else 12 <= number < 15 for number in expected
    ]


def test_the_salvage_command_reports_omissions_and_exits_with_1(log_dir: Path) -> None:
    content = bytearray((log_dir / data(0)).read_bytes())
    content[unpack_headers((log_dir / index(0)).read_bytes())[2].position + 200] ^= 1
    (log_dir / data(0)).write_bytes(content)
    output = log_dir.parent / "rows.arrow"
    result = in_process("segments", "salvage", log_dir, "-o", output)
    assert result.code == 1 and "1 batches or headers are damaged" in result.err
    assert "the batch at offset 6 is skipped" in result.text
    assert 6 not in pa.ipc.open_file(output).read_all().column("number").to_pylist()


def test_rows_of_an_older_schema_get_nulls(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    log = create_log(directory)
    fill(log, 1)
    append(log, batch(2, first=3, schema_id=1))
    directory.close()
    output = tmp_path / "rows.arrow"
    assert in_process("segments", "salvage", tmp_path / str(TP), "-o", output).code == 0
    table = pa.ipc.open_file(output).read_all()
    assert table.schema == WIDER
    assert table.column("number").to_pylist() == [0, 1, 2, 3, 4]
    assert table.column("more").to_pylist() == [None, None, None, 1, 1]
