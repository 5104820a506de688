"""A source whose streaming writers stop at chosen points until a test lets them go on, or kill their own process."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from sparklog.spark.source import SparklogSource
from sparklog.spark.writer import StreamWriter

#: Longer than a test takes, shorter than a machine lives.
_MOST_S = 900


def register_holding_source(spark: SparkSession, bootstrap: str, points: Path) -> None:
    """Register it in place of ``sparklog``. What is named ``<topic>.<point>`` in the directory ``points`` makes writers
    of that topic do something at that point; ``<topic>.messages`` gets what the tasks have told the driver, pickled.

    ``hold-commit``, ``hold-after``, ``hold-write``: before the decision, after it, after a task has written: make
    ``<name>.reached`` and wait until ``<name>.go`` is there. ``kill-task``: once a task has written, it kills itself.
    """

    class HoldingWriter(StreamWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            message = super().write(iterator)
            killing = self._point("kill-task")
            if _taken(killing, killing.with_suffix(".done")):
                os.kill(os.getpid(), signal.SIGKILL)
            self._hold("hold-write")
            return message

        def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
            self._point("messages").write_bytes(pickle.dumps(messages))
            self._hold("hold-commit")
            super().commit(messages, batchId)
            self._point("committed").touch()
            self._hold("hold-after")

        def _point(self, name: str) -> Path:
            return points / f"{self._plan.options.topic}.{name}"

        def _hold(self, name: str) -> None:
            point = self._point(name)
            if not _taken(point, Path(f"{point}.reached")):
                return
            deadline = time.monotonic() + _MOST_S
            while not Path(f"{point}.go").exists():
                if time.monotonic() > deadline:
                    os._exit(1)
                time.sleep(0.05)

    class HoldingSource(SparklogSource):
        defaults: ClassVar[Mapping[str, str]] = {"bootstrap.servers": bootstrap}

        def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
            writer = super().streamWriter(schema, overwrite)
            assert isinstance(writer, StreamWriter)
            return HoldingWriter(writer._plan)

    spark.dataSource.register(HoldingSource)


def _taken(point: Path, taken: Path) -> bool:
    """Whether the point is there, and this attempt is the one that it holds."""
    try:
        point.rename(taken)
    except FileNotFoundError:
        return False
    return True
