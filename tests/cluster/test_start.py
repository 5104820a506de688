"""The cluster job's start where one of its halves fails: nothing of the other is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext

from sparklog.cluster import embedded_zookeeper, start
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.options import ClusterOptions
from sparklog.errors import ClusterError

pytestmark = pytest.mark.integration


class NoSignals:
    """Nobody asks for a stop."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def install(self) -> None: ...


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("PYSPARK_SUBMIT_ARGS", "SPARK_HOME"):  # a start sets them for good
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield tmp_path
    EmbeddedZookeeper.start(tmp_path / "zookeeper").stop()


def test_a_spark_that_does_not_start_leaves_no_zookeeper(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However soon it fails: ZooKeeper has only begun to start by then."""

    def fail() -> SparkContext:
        raise ClusterError("Spark did not start")

    monkeypatch.setattr(start, "_start_spark", fail)
    monkeypatch.setattr(start, "_REFUSAL_S", 0.0)
    with pytest.raises(ClusterError, match="Spark did not start"):
        start._run(ClusterOptions(data_dir=data_dir), NoSignals(), lambda _: None)  # type: ignore[arg-type]
    seating = [thread for thread in threading.enumerate() if thread.name == "sparklog-seating"]
    for thread in seating:
        thread.join()
    note = embedded_zookeeper._read_note(data_dir / "zookeeper")
    assert note is not None and note.process is None
    assert not seating
