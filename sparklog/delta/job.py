"""Several topics' archives in one application, each in a thread of its own: one that fails stops none of the others.

What may pass (brokers that are away, a write that failed) is tried again, later each time. What would not pass is said,
said again every few minutes while other topics go on, and is what the job's result is about.
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
#: A run that has an end gives up after so many failures without a commit in between.
_TRIES = 5
_REMIND_S = 600.0
_POLL_S = 0.2
_SHOWN = 600
#: What a broker says that the next try would hear again.
_LASTING = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.INVALID_TOPIC_EXCEPTION,
    ErrorCode.SCHEMA_MISMATCH,
    ErrorCode.INVALID_CONFIG,
}
#: The same of Spark; last, that its SparkContext is stopped: a job that went on could do nothing but hide that.
_LASTING_WORDS = r"\bConfigError\b|Spark has no type for column|stopped SparkContext"


class _TopicThread(threading.Thread):
    """``error``: why the topic is not archived any more; None: because it was to end."""

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
                    self._tell(f"not archived any more: {told(error)}")
                    return
                pause = min(_PAUSES_S[0] * 2 ** (failures - 1), _PAUSES_S[1])
                self._tell(f"{told(error)}; tried again in {pause:g} s")
                if self._stopping.wait(pause):
                    return
            else:
                return


def is_lasting(error: Exception) -> bool:
    """Whether trying again would come to the same."""
    if isinstance(error, BrokerError):
        return error.code in _LASTING
    if isinstance(error, SPARK_ERRORS):  # from Spark's planning processes, as text
        return re.search(_LASTING_WORDS, str(error)) is not None
    if isinstance(error, OSError):  # a full disk passes; a JVM that is gone does not
        return isinstance(error, ConnectionError)
    return isinstance(error, ArchiveRefused | ConfigError) or not isinstance(error, SparklogError)


def told(error: Exception) -> str:
    """One line."""
    text = escaped(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


class Stopping(Protocol):
    """A ``threading.Event``, or what a handler of signals may set (``cluster.stop_request``)."""

    def is_set(self) -> bool: ...


def maintain(
    spark: SparkSession, archives: Sequence[ArchiveOptions], *, stopping: Stopping, tell: Callable[[str], None]
) -> dict[str, Exception]:
    """Look after the tables of these topics once; no broker is asked. Returns where something was in the way. When
    ``stopping`` is set, no further table is begun."""
    errors: dict[str, Exception] = {}
    for options in archives:
        if stopping.is_set():
            tell(f"stopped before {options.topic}")
            break
        path = table_path(options.to, options.topic)
        try:
            is_there = bool(open_log_with_spark(spark, path).versions())
        except SPARK_ERRORS as reason:  # a file system that is not known, or lets nobody in
            errors[options.topic] = reason
            continue
        if not is_there:
            errors[options.topic] = ConfigError(f"there is no Delta table at {path}")
            continue
        said: list[str] = []
        error = maintenance_of(spark, options, tell=said.append).run(until=stopping.is_set)
        if error is not None:
            errors[options.topic] = error
        for text in said or [f"{path}: nothing was due"] * (error is None):
            tell(text)
    return errors


def run_archives(
    spark: SparkSession, archives: Sequence[ArchiveOptions], *, stopping: Stopping, tell: Callable[[str], None]
) -> dict[str, Exception]:
    """Archive until ``stopping`` is set, or all have come to their end; returns the topics that could not be archived
    any more, and why. Batches under way are committed before it returns."""
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
                    tell(f"{thread.topic}: still not archived: {told(thread.error)}")
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join()
    return {thread.topic: thread.error for thread in threads if thread.error is not None}
