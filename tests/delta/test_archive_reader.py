"""Tests of reads of a table by partition and offset, in windows, for files of any shape. No Spark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable

from sparklog.delta import archive_reader
from sparklog.delta.archive_reader import ArchiveDamagedError, open_archive
from sparklog.delta.restore_batches import RestoredRows
from sparklog.errors import ConfigError
from sparklog.record.schema import DEFAULT_SCHEMA
from tests.delta.tables import Archived, described, placed

OWN = DEFAULT_SCHEMA.remove(3)


def own(offsets: list[int], text: str = "") -> pa.Table:
    rows = [{"key": None, "value": f"{text}{offset}".encode(), "headers": None} for offset in offsets]
    return pa.Table.from_pylist(rows, schema=OWN)


def rows(partition: int, offsets: list[int], text: str = "") -> pa.Table:
    return placed(
        own(offsets, text), [partition] * len(offsets), offsets, [1_700_000_000_000_000 + at for at in offsets]
    )


@pytest.fixture
def archived(tmp_path: Path) -> Archived:
    topic = described("plain", DEFAULT_SCHEMA, partitions=3, key=("key",), event_time="timestamp")
    return Archived(tmp_path / "lake", topic)


def read(archived: Archived, partition: int, start: int = 0) -> tuple[list[RestoredRows], list[tuple[int, bytes, int]]]:
    """Return the windows, and the offset, value and time of their rows."""
    windows = list(open_archive(archived.table).rows(partition, start))
    found = []
    for window in windows:
        assert window.records.schema == DEFAULT_SCHEMA
        assert window.records.column("timestamp").cast(pa.int64()).to_pylist() == window.times.tolist()
        values = window.records.column("value").to_pylist()
        found += list(zip(window.offsets.tolist(), values, window.times.tolist(), strict=True))
    return windows, found


def expected(offsets: list[int]) -> list[tuple[int, bytes, int]]:
    return [(offset, str(offset).encode(), 1_700_000_000_000_000 + offset) for offset in offsets]


def test_rows_come_by_offset_in_small_windows(archived: Archived, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_reader, "_FIRST_WINDOW", 10)
    monkeypatch.setattr(archive_reader, "_LARGEST_WINDOW", 40)
    random = np.random.default_rng(4)
    have = {partition: sorted(random.choice(900, 500, replace=False).tolist()) for partition in (0, 2)}
    mixed = [(partition, offset) for partition, offsets in have.items() for offset in offsets]
    random.shuffle(mixed)
    for at in range(0, 1000, 250):  # files of both partitions, in no order
        part = mixed[at : at + 250]
        partitions, offsets = [one[0] for one in part], [one[1] for one in part]
        times = [1_700_000_000_000_000 + offset for offset in offsets]
        archived.append(placed(own(offsets), partitions, offsets, times), {0: 900, 1: 5, 2: 880})
    windows, found = read(archived, 0)
    assert found == expected(have[0])
    assert len(windows) > 20 and max(len(window.offsets) for window in windows) <= 40
    assert read(archived, 2)[1] == expected([offset for offset in have[2] if offset < 880])
    assert read(archived, 2, 440)[1] == expected([offset for offset in have[2] if 440 <= offset < 880])
    archive = open_archive(archived.table)
    assert [archive.first_offset(partition) for partition in range(3)] == [have[0][0], 5, have[2][0]]
    assert (read(archived, 1)[1], archive.end(1), archive.partitions) == ([], 5, 3)


def test_rows_survive_optimize_and_delete(archived: Archived) -> None:
    for at in range(0, 60, 10):
        archived.append(rows(0, list(range(at, at + 10))), {0: at + 10})
    table = DeltaTable(archived.table)
    table.optimize.compact(commit_properties=CommitProperties(custom_metadata={"by": "somebody"}))
    table.delete("_offset >= 10 and _offset < 13")
    archive = open_archive(archived.table)
    assert archive.progress.ends == {0: 60}, "commits of others must not change the progress"
    assert read(archived, 0)[1] == expected([*range(10), *range(13, 60)])


def test_bad_rows_appear_once_among_the_others(archived: Archived) -> None:
    archived.append(rows(0, [1, 2, 5, 9]), {0: 12})
    archived.set_aside(rows(0, [0, 3, 7, 11, 15]), "reason")
    archived.set_aside(rows(0, [3, 5, 7]), "said again by a commit that was tried twice")
    archived.set_aside(rows(2, [4]), "of a batch whose other rows were not committed, as 15")
    assert read(archived, 0)[1] == expected([0, 1, 2, 3, 5, 7, 9, 11, 15])
    assert read(archived, 2)[1] == expected([4])
    archive = open_archive(archived.table)
    assert [archive.first_offset(partition) for partition in range(3)] == [0, 0, 4]
    assert [archive.end(partition) for partition in range(3)] == [16, 0, 5]


def test_an_older_version_excludes_bad_rows_of_later_batches(archived: Archived) -> None:
    archived.append(rows(0, [1, 2]), {0: 3})
    archived.set_aside(rows(0, [5]), "its batch is not committed")
    before = open_archive(archived.table)
    assert (before.end(0), open_archive(archived.table, before.version).end(0)) == (6, 6)
    archived.append(rows(0, [3, 4]), {0: 6})
    archived.set_aside(rows(0, [9]), "of the next one")
    assert open_archive(archived.table, before.version).end(0) == 3
    assert open_archive(archived.table).end(0) == 10


def test_a_duplicate_offset_is_reported(archived: Archived) -> None:
    archived.append(rows(0, [1, 2]), {0: 3})
    archived.append(rows(0, [2, 3]), {0: 4})
    with pytest.raises(ArchiveDamagedError, match="partition 0: offset 2 occurs twice"):
        read(archived, 0)


def test_the_end_of_a_log_without_commits_is_estimated(archived: Archived) -> None:
    archived.append(rows(0, [1, 2]), {0: 40})
    archived.append(rows(2, [7]), {0: 40, 2: 9})
    for commit in Path(archived.table, "_delta_log").glob("*.json"):
        commit.write_text(commit.read_text().replace("userMetadata", "someMetadata"))
    archive = open_archive(archived.table)
    assert archive.progress.ends == {0: 3, 1: 0, 2: 8}
    assert read(archived, 0)[1] == expected([1, 2])
    archived.set_aside(rows(0, [2, 5]), "bad rows were the last ones")
    assert read(archived, 0)[1] == expected([1, 2, 5])
    assert open_archive(archived.table).end(0) == 6


def test_a_table_with_decomposed_records_is_no_source(tmp_path: Path) -> None:
    topic = described("json", DEFAULT_SCHEMA, partitions=1, key=("key",), event_time="timestamp")
    archived = Archived(tmp_path, topic)
    parsed = pa.table({"price": [1.5]})
    archived.append(placed(parsed, [0], [0], [5]), {0: 1})
    with pytest.raises(ConfigError, match="column key is missing"):
        open_archive(archived.table)
    with pytest.raises(ConfigError, match="no Delta table"):
        open_archive(str(tmp_path / "nothing"))
