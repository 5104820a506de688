"""The archives of several topics in one application, each in its own thread.

If one archive fails, the other archives continue. Transient errors (unavailable brokers, a failed write) are retried
with increasing pauses. Permanent errors are reported at once, reported again every few minutes while other topics
continue, and returned as the job's result.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pyspark.sql import SparkSession

from sparklog.delta.archive import TopicArchive
from sparklog.delta.archive_progress import open_log_with_spark
from sparklog.delta.archive_table import SPARK_ERRORS, ArchiveRefused
from sparklog.delta.maintenance import maintenance_of
from sparklog.delta.options import ArchiveOptions
from sparklog.delta.table import table_path
from sparklog.errors import BrokerError, ConfigError, ErrorCode, SparklogError
from sparklog.escaping import escaped

_PAUSES_S = (1.0, 60.0)
#: The maximum number of consecutive failures without a commit, for a run that archives once and ends.
_TRIES = 5
_REMIND_S = 600.0
_POLL_S = 0.2
_SHOWN = 600
#: The broker errors that a retry would get again.
_LASTING = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.INVALID_TOPIC_EXCEPTION,
    ErrorCode.SCHEMA_MISMATCH,
    ErrorCode.INVALID_CONFIG,
}
#: The errors of Spark that a retry would get again. The last one means that the SparkContext is stopped.
_LASTING_WORDS = r"\bConfigError\b|Spark has no type for column|stopped SparkContext"


class _TopicThread(threading.Thread):
    """A thread that runs the archive of one topic.

    ``error`` is the reason why the archive ended, or None if it ended as requested.
    """

    def __init__(self, archive: TopicArchive, topic: str, *, has_end: bool, tell: Callable[[str], None]) -> None:
        super().__init__(name=f"archive-{topic}", daemon=True)
        self.topic = topic
        self.error: Exception | None = None
        self._archive = archive
        self._has_end = has_end
        self._tell = tell
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()
        self._archive.stop()

    def run(self) -> None:
        try:
            self._keep_on()
        finally:
            self._archive.close()

    def _keep_on(self) -> None:
        failures = 0
        while True:
            commits = self._archive.commits
            try:
                self._archive.run()
            except Exception as error:
                failures = 1 if self._archive.commits > commits else failures + 1
                if self._stopping.is_set():
                    return
                if is_lasting(error) or (self._has_end and failures >= _TRIES):
                    self.error = error
                    self._tell(f"archive stopped: {error_line(error)}")
                    return
                pause = min(_PAUSES_S[0] * 2 ** (failures - 1), _PAUSES_S[1])
                self._tell(f"{error_line(error)}; retrying in {pause:g} s")
                if self._stopping.wait(pause):
                    return
            else:
                return


def is_lasting(error: Exception) -> bool:
    """Return whether the error is permanent, so that a retry would fail in the same way."""
    if isinstance(error, BrokerError):
        return error.code in _LASTING
    if isinstance(error, SPARK_ERRORS):  # The text of an error in one of Spark's planning processes.
        return re.search(_LASTING_WORDS, str(error)) is not None
    if isinstance(error, OSError):  # A full disk is transient; the end of the JVM is not.
        return isinstance(error, ConnectionError)
    return isinstance(error, ArchiveRefused | ConfigError) or not isinstance(error, SparklogError)


def error_line(error: Exception) -> str:
    """Return the error's message as one line, shortened if it is long."""
    text = escaped(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


class Stopping(Protocol):
    """The interface by which the job checks whether a stop was requested.

    ``threading.Event`` and the class ``StopRequest`` of ``cluster.stop_request`` implement it.
    """

    def is_set(self) -> bool: ...


def maintain(
    spark: SparkSession, archives: Sequence[ArchiveOptions], *, stopping: Stopping, tell: Callable[[str], None]
) -> dict[str, Exception]:
    """Run OPTIMIZE and VACUUM once on the tables of these topics. Return the error of each topic that failed.

    This needs no brokers. Once ``stopping`` is set, no further table is started.
    """
    errors: dict[str, Exception] = {}
    for options in archives:
        if stopping.is_set():
            tell(f"stopped before {options.topic}")
            break
        path = table_path(options.to, options.topic)
        try:
            is_there = bool(open_log_with_spark(spark, path).versions())
        except SPARK_ERRORS as reason:  # The file system is unknown or denies access.
            errors[options.topic] = reason
            continue
        if not is_there:
            errors[options.topic] = ConfigError(f"there is no Delta table at {path}")
            continue
        said: list[str] = []
        error = maintenance_of(spark, options, tell=said.append).run(until=stopping.is_set)
        if error is not None:
            errors[options.topic] = error
        for text in said or [f"{path}: no maintenance is due"] * (error is None):
            tell(text)
    return errors


def run_archives(
    spark: SparkSession, archives: Sequence[ArchiveOptions], *, stopping: Stopping, tell: Callable[[str], None]
) -> dict[str, Exception]:
    """Archive the topics until ``stopping`` is set or all archives have ended. Return the error of each failed topic.

    Once ``stopping`` is set, this waits for the commits of the current batches, but at most a minute.
    """
    threads = []
    for options in archives:

        def say(text: str, topic: str = options.topic) -> None:
            tell(f"{topic}: {text}")

        archive = TopicArchive(spark, options, say)
        threads.append(_TopicThread(archive, options.topic, has_end=options.interval is None, tell=say))
    for thread in threads:
        thread.start()
    remind_at = time.monotonic() + _REMIND_S
    while not stopping.is_set() and (alive := next((thread for thread in threads if thread.is_alive()), None)):
        alive.join(_POLL_S)
        if time.monotonic() >= remind_at:
            remind_at = time.monotonic() + _REMIND_S
            for thread in threads:
                if thread.error is not None:
                    tell(f"{thread.topic}: archive is still stopped: {error_line(thread.error)}")
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join()
    return {thread.topic: thread.error for thread in threads if thread.error is not None}
