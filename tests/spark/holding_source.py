"""A source whose writers stop at chosen points until a test resumes them, or kill their own process."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from sparklog.spark.source import SparklogSource
from sparklog.spark.writer import BatchWriter, StreamWriter

#: Longer than any test and shorter than the life of a machine: an abandoned writer exits after this time.
_MOST_S = 900


def register_holding_source(spark: SparkSession, bootstrap: str, points: Path) -> None:
    """Register the source under the name ``sparklog``, with writers that act at points.

    A file ``<name>.<point>`` in the directory ``points`` makes the writers of that name act at that point.
    ``<name>.messages`` receives the pickled messages of the tasks to the driver. The name of a streaming write is its
    topic, and the name of a batch write is its ``txnAppId``. Batch writes without a name do not stop.

    ``hold-commit``, ``hold-after`` and ``hold-write`` act before the decision, after the decision, and after a task has
    written: the writer creates ``<name>.reached`` and waits until ``<name>.go`` exists. ``kill-task``: a task kills
    itself after it has written. ``kill-between``: a task of a batch write kills itself after it has written the rows of
    its first topic.
    """

    def hold(name: str, what: str) -> None:
        point = points / f"{name}.{what}"
        if not _taken(point, Path(f"{point}.reached")):
            return
        deadline = time.monotonic() + _MOST_S
        while not Path(f"{point}.go").exists():
            if time.monotonic() > deadline:
                os._exit(1)
            time.sleep(0.05)

    def is_killed(name: str, what: str) -> bool:
        point = points / f"{name}.{what}"
        return _taken(point, point.with_suffix(".done"))

    class HoldingWriter(StreamWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            message = super().write(iterator)
            if is_killed(self._name, "kill-task"):
                os.kill(os.getpid(), signal.SIGKILL)
            hold(self._name, "hold-write")
            return message

        def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
            (points / f"{self._name}.messages").write_bytes(pickle.dumps(messages))
            hold(self._name, "hold-commit")
            super().commit(messages, batchId)
            (points / f"{self._name}.committed").touch()
            hold(self._name, "hold-after")

        @property
        def _name(self) -> str:
            return str(self._plan.options.topic)

    class HoldingBatchWriter(BatchWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            if not is_killed(self._name, "kill-between"):
                return super().write(iterator)
            rows = pa.Table.from_batches(iterator)
            super().write(iter(rows.filter(pc.equal(rows["topic"], rows["topic"][0])).to_batches()))
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("killed")

        def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
            (points / f"{self._name}.messages").write_bytes(pickle.dumps(messages))
            hold(self._name, "hold-commit")
            super().commit(messages)

        @property
        def _name(self) -> str:
            named = self._plan.options.named
            assert named is not None
            return named.app_id

    class HoldingSource(SparklogSource):
        defaults: ClassVar[Mapping[str, str]] = {"bootstrap.servers": bootstrap}

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            writer = super().writer(schema, overwrite)
            assert isinstance(writer, BatchWriter)
            return writer if writer._plan.options.named is None else HoldingBatchWriter(writer._plan)

        def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
            writer = super().streamWriter(schema, overwrite)
            assert isinstance(writer, StreamWriter)
            return HoldingWriter(writer._plan)

    spark.dataSource.register(HoldingSource)


def _taken(point: Path, taken: Path) -> bool:
    """Return whether the point exists and this attempt is the first to reach it."""
    try:
        point.rename(taken)
    except FileNotFoundError:
        return False
    return True
