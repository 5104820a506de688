"""Tests of the survey of a log directory without a broker, including one that release 0.1.0 has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparklog.controller.rebuild import rebuild_cluster
from sparklog.errors import StorageError
from sparklog.model import SeenNumbers
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.survey import survey
from tests.golden.test_release_0_1_0 import expected, unpack
from tests.storage.batches import create_log, fill


def test_a_0_1_0_directory_suffices_for_a_rebuild_without_settings(tmp_path: Path) -> None:
    (log_dir,) = unpack("cluster.tar.xz", tmp_path).glob("data/broker-*/")
    found = survey(log_dir)
    assert (found.broker_id, found.problems, found.topics) == (0, (), ())
    assert found.seen == SeenNumbers(leader_epoch=max(log.last_epoch for log in found.logs))
    assert found.incarnation > 0
    cluster = rebuild_cluster([found])
    assert cluster.cluster_id == found.cluster_id
    topics = {topic.record.name: topic for topic in cluster.topics}
    assert {"default", "typed", "compacted", "transactional"} <= topics.keys()
    for name in ("default", "typed"):
        ends = {log.partition: log.log_end_offset for log in found.logs if log.topic == name}
        table = expected(name)
        for number, end in ends.items():
            offsets = table.filter(table["_partition"].to_numpy() == number)["_offset"].to_pylist()
            assert end > max(offsets)
        assert topics[name].states.keys() == ends.keys()
    assert topics["typed"].record.key_columns == (), "a release that stored no number"
    assert any(finding.startswith("typed: its settings are not known") for finding in cluster.findings)


def test_a_survey_lists_stored_notes_and_damaged_logs(tmp_path: Path) -> None:
    directory = LogDirectory.open(tmp_path, cluster_id="cluster", broker_id=4)
    fill(create_log(directory), 3)
    directory.seen_file.note_controller(9, "controller")
    directory.note_counted(5)
    with pytest.raises(StorageError, match="broker 4 is running: stop it first"):
        survey(tmp_path)
    directory.close()
    (tmp_path / "broken-0").mkdir()
    found = survey(tmp_path)
    assert (found.cluster_id, found.broker_id, found.incarnation) == ("cluster", 4, 5)
    assert (found.seen.controller_epoch, found.seen.controller_id) == (9, "controller")
    [log] = found.logs
    assert (log.broker_id, log.log_end_offset) == (4, 9)
    [problem] = found.problems
    assert "broken-0" in problem


def test_a_path_that_is_not_a_log_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not a broker's log directory"):
        survey(tmp_path)
