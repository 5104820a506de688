"""Tests of the inspection of segment files without a broker: reports, damage, and compared replicas, also by the
command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sparklog.cli.main import run
from sparklog.storage.inspect import StoredPartition, differences, partitions_in
from sparklog.storage.log import Log
from tests.storage.batches import SCHEMAS, TP, WIDER, append, batch, config, marker, open_directory
from tests.storage.compacting import clean, commit_and_seal, keyed, keyed_log, seen

NOW_US = 10_000_000


def written(path: Path, *, value: int = 0) -> Log:
    """Write a log of several segments on a real disk, with a transaction, open at its end."""
    directory = open_directory(path)
    log = keyed_log(directory)
    for number in range(120):
        append(log, keyed([(b"key %d" % (number % 7), value + number), (b"only %d" % number, number)]), now_us=NOW_US)
    append(log, keyed([(b"t", 1)], producer=5, sequence=0, transactional=True), marker(aborted=(5,)), now_us=NOW_US)
    commit_and_seal(log)
    log.durability.flush()
    directory.checkpoint()
    return log


def test_a_report_covers_the_whole_log(tmp_path: Path) -> None:
    log = written(tmp_path)
    (partition,) = partitions_in(tmp_path)
    for thorough in (False, True):
        reports = list(partition.reports(thorough=thorough))
        assert [report.problems for report in reports] == [[]] * len(log.segments)
        assert [(report.base_offset, report.end_offset, report.batches, report.sealed) for report in reports] == [
            (segment.base_offset, segment.end_offset, segment.count, segment.sealed) for segment in log.segments
        ]
    clean(log)
    reports = list(partition.reports(thorough=True))
    assert not any(report.problems for report in reports)
    assert [report.cleaned for report in reports] == [True] * (len(reports) - 1) + [False]
    offsets = [offset for batch in partition.batches() for offset in batch.offsets.tolist()]
    assert offsets == [one.offset for one in seen(log, committed=False)]


def test_a_schema_that_only_a_segment_contains_is_known(tmp_path: Path) -> None:
    """A broker that was killed at that moment has not stored it."""
    log = open_directory(tmp_path).create(TP, "t-1", schemas=SCHEMAS[:1], config=config())
    append(log, batch(3))
    log.add_schema(SCHEMAS[1])
    append(log, batch(3, first=3, schema_id=1))
    (partition,) = partitions_in(tmp_path)
    assert [(report.batches, report.problems) for report in partition.reports(thorough=True)] == [(1, []), (1, [])]
    found = [one.records for one in partition.batches(3)]
    assert [records.schema for records in found if records is not None] == [WIDER]


def flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data, index: flipped(data, 3000), "CRC32C"),
        (lambda data, index: flipped(index, 100), "CRC32C"),
        (lambda data, index: flipped(data, data.stat().st_size - 30), "not its footer"),
        (lambda data, index: data.write_bytes(data.read_bytes()[:2000]), "data end at 2000"),
        (lambda data, index: index.write_bytes(index.read_bytes()[:-5]), "multiple of 96"),
        (lambda data, index: index.unlink(), "no index"),
        (lambda data, index: (data.unlink(), index.unlink()), "the segment before ends at"),
    ],
)
def test_damage_is_reported_by_name(tmp_path: Path, damage: Callable[[Path, Path], object], said: str) -> None:
    log = written(tmp_path)
    segment = log.segments[1]
    damage(segment.data_path, segment.index_path)
    problems = [text for report in StoredPartition(log.directory).reports(thorough=True) for text in report.problems]
    assert problems and said in " ".join(problems)
    assert run(["segments", "verify", str(tmp_path)]) == 1


def test_cleaned_and_uncleaned_replicas_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    logs = [written(path, value=1000 * (path.name == "c")) for path in paths]
    one, other, third = (partitions_in(path)[0] for path in paths)
    assert list(differences(one, other)) == []
    assert list(differences(one, third))
    assert clean(logs[0]) is not None
    assert list(differences(one, other)) == [] == list(differences(other, one))
    assert list(differences(one, third)) and list(differences(third, one))
    assert run(["segments", "compare", str(paths[0]), str(paths[1])]) == 0
    assert "1 partitions compared, 0 differences" in capsys.readouterr().out
    assert run(["segments", "compare", *map(str, paths), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differences"][0]["partition"] == "table-0"
    assert run(["segments", "compare", str(paths[0])]) == 2


def test_the_commands_list_and_dump_segments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path)
    assert run(["segments", "list", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["base_offset"] for one in found] == [segment.base_offset for segment in log.segments]
    assert run(["segments", "list", str(tmp_path)]) == 0
    assert "sealed" in capsys.readouterr().out
    assert run(["segments", "verify", str(tmp_path)]) == 0
    capsys.readouterr()
    assert run(["segments", "dump", str(log.directory), "--from", "10", "--to", "13", "--records"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["offset"], row["key"]) for row in rows] == [(10, "key 5"), (11, "only 5"), (12, "key 6")]
    assert run(["segments", "dump", str(log.directory), "--from", "240", "--json"]) == 0
    batches = json.loads(capsys.readouterr().out)
    assert [batch["flags"] for batch in batches] == [["transactional"], ["marker"]]
    assert batches[1]["aborted"] == [5]
    assert run(["segments", "dump", str(log.directory)]) == 0
    assert "aborted 5" in capsys.readouterr().out
    assert run(["segments", "list", str(tmp_path / "nowhere")]) == 1
