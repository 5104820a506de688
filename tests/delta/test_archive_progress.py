"""Tests of the progress in commits, and of the search for it among the commits of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparklog.delta.archive_progress import (
    ArchiveProgress,
    ArchiveProgressAt,
    ArchiveProgressError,
    DeltaLog,
    open_log,
    parse_progress,
    read_progress,
)

PROGRESS = ArchiveProgress(
    topic="flights",
    topic_id="f0",
    batch=7,
    ends={10: 3, 9: 120},
    mode="append",
    begins={9: 12},
    attempt="a",
    process="here",
    every_s=0.5,
    lost={9: (100, 118)},
)


def commit(table: Path, version: int, **info: Any) -> None:
    lines = [{"commitInfo": {"operation": "WRITE", **info}}, {"add": {"path": "x"}}]
    log = table / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020d}.json").write_text("\n".join(map(json.dumps, lines)))


def said(batch: int) -> dict[str, str]:
    return {
        "userMetadata": ArchiveProgress(topic="t", topic_id="i", batch=batch, ends={0: batch}, mode="append").to_json()
    }


def test_a_progress_record_survives_encoding() -> None:
    text = PROGRESS.to_json()
    assert json.loads(text)["sparklog"] == {
        "attempt": "a",
        "batch": 7,
        "begins": {"9": 12},
        "ends": {"10": 3, "9": 120},
        "every_s": 0.5,
        "format": 1,
        "lost": {"9": [100, 118]},
        "mode": "append",
        "process": "here",
        "topic": "flights",
        "topic_id": "f0",
    }
    assert parse_progress(text) == PROGRESS
    assert PROGRESS.app_id == "sparklog-archive/f0"


@pytest.mark.parametrize("text", [None, "", "by hand", "[1]", '{"other": 1}', '{"sparklog": 1}'])
def test_other_commit_texts_are_ignored(text: str | None) -> None:
    assert parse_progress(text) is None


@pytest.mark.parametrize("inner", [{"format": 2}, {}, {"format": 1, "topic": "t"}])
def test_an_unreadable_progress_record_is_an_error(inner: dict[str, Any]) -> None:
    with pytest.raises(ArchiveProgressError):
        parse_progress(json.dumps({"sparklog": inner}))


def test_the_progress_is_found_at_each_version(tmp_path: Path) -> None:
    table = tmp_path / "t"
    assert read_progress(str(table)) is None
    commit(table, 3)  # the earlier ones were deleted
    commit(table, 4, **said(0))
    commit(table, 5, userMetadata="OPTIMIZE by hand")
    commit(table, 6, **said(1))
    commit(table, 7)
    (table / "_delta_log" / "00000000000000000006.checkpoint.parquet").touch()
    log = open_log(table.as_uri())
    assert log.versions() == [3, 4, 5, 6, 7]
    found = [log.progress(version) for version in range(2, 8)]
    assert [(at.version, at.progress.batch) if at else None for at in found] == [
        None,
        None,
        (4, 0),
        (4, 0),
        (6, 1),
        (6, 1),
    ]
    assert log.progress() == log.progress(7)


def test_new_commits_are_searched_in_ascending_order(tmp_path: Path) -> None:
    for version in range(3):
        commit(tmp_path, version, **said(version))
    asked: list[str] = []

    def read(name: str) -> bytes:
        asked.append(name)
        return (tmp_path / "_delta_log" / name).read_bytes()

    log = DeltaLog(list, read)
    version, found = log.newest_since(1)
    assert version == 2 and isinstance(found, ArchiveProgressAt) and found.progress.batch == 2
    assert len(asked) == 2
    assert log.newest_since(2) == (2, None)
    commit(tmp_path, 3)
    assert log.newest_since(2) == (3, None)


def test_commits_removed_after_a_known_version_do_no_harm(tmp_path: Path) -> None:
    """The version that an archive of a quiet topic knows is deleted before the archive reads the log again, and so
    is the next one."""
    commit(tmp_path, 1, **said(0))
    log = open_log(str(tmp_path))
    (tmp_path / "_delta_log" / f"{1:020d}.json").unlink()
    assert log.newest_since(1) == (1, None)  # no newer version can exist
    for version in range(3, 5):
        commit(tmp_path, version)
    assert log.newest_since(1) == (4, None)
    commit(tmp_path, 5, **said(1))
    version, found = log.newest_since(1)
    assert version == 5 and found is not None and (found.version, found.progress.batch) == (5, 1)


def test_commits_removed_during_a_search_do_no_harm(tmp_path: Path) -> None:
    commit(tmp_path, 5)

    def read(name: str) -> bytes:
        return (tmp_path / "_delta_log" / name).read_bytes()

    assert DeltaLog(lambda: [f"{version:020d}.json" for version in (4, 5)], read).progress() is None
