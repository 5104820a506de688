"""The progress of an archive, which every commit to the Delta table records.

This is an example of the ``userMetadata`` of a commit::

    {"sparklog": {"attempt": "...", "batch": 7, "begins": {"0": 0, "1": 12}, "ends": {"0": 120, "1": 88},
                  "every_s": 30.0, "format": 1, "lost": {}, "mode": "append", "process": "...", "topic": "flights",
                  "topic_id": "..."}}

``ends`` are the next offsets to archive: all committed records below them are in the table or in its quarantine, and no
record at or above them is in the table. So every version of a table has exact progress: the progress of the newest
archive commit at or before the version. Other commits (OPTIMIZE, VACUUM, commits by users) neither record nor change
it. This module reads Delta's log directly: each commit is a file that is named by its version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import pyarrow.fs as pafs

from sparklog.errors import SparklogError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMAT = 1
_KEY = "sparklog"
_LOG = "_delta_log"
_COMMIT = re.compile(r"(\d{20})\.json")

Mode = Literal["append", "upsert", "quarantine"]


class ArchiveProgressError(SparklogError):
    """The error for a table whose archive progress is missing or cannot be read."""


class ArchiveProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress that one commit of an archive records: above all, the end offset of the archive by partition."""

    topic: str
    topic_id: str
    #: The number of the archive's commit in this table, from 0. It is also the version of Delta's transaction
    #: ``app_id``.
    batch: int
    #: For each partition, the first offset that is not archived. In a quarantine, all rows are below it.
    ends: dict[int, int]
    mode: Mode
    #: For each partition, the offset at which the archive began, because earlier records had been deleted from the log.
    #: Rows do not show this offset, because it may have no record. Empty in tables of earlier releases.
    begins: dict[int, int] = {}
    #: The id of the run that committed. Every start of an archive has a new id.
    attempt: str = ""
    #: The process of the run that committed, from ``process_liveness``, and the run's interval between batches in s (0
    #: if the run archives once and ends).
    process: str = ""
    every_s: float = 0.0
    #: For each partition, the range [first, end) that this commit skipped, because it was deleted from the log before
    #: it was archived.
    lost: dict[int, tuple[int, int]] = {}
    format: int = FORMAT

    @property
    def app_id(self) -> str:
        """Return the application id that Delta transactions of this archive use."""
        return app_id(self.topic_id)

    @property
    def commit(self) -> tuple[int, str]:
        """Return the identity of the commit that records this progress: the batch number, and the id of the run.

        Each start of an archive is a new run.
        """
        return self.batch, self.attempt

    def to_json(self) -> str:
        """Return the progress as JSON with sorted keys, for the ``userMetadata`` of a commit."""
        return msgspec.json.encode({_KEY: msgspec.to_builtins(self, str_keys=True)}, order="sorted").decode()


def app_id(topic_id: str) -> str:
    """Return the application id that Delta transactions use in all tables of a topic."""
    return f"sparklog-archive/{topic_id}"


def parse_progress(text: str | None) -> ArchiveProgress | None:
    """Parse the progress in a commit's ``userMetadata``. Return None if the text contains no progress.

    Raises:
        ArchiveProgressError: a newer release wrote the progress, or it is damaged.
    """
    if not text:
        return None
    try:
        outer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None  # Another program wrote it.
    if not isinstance(outer, dict) or not isinstance(outer.get(_KEY), dict):
        return None
    found = outer[_KEY].get("format")
    if not isinstance(found, int) or found > FORMAT:
        raise ArchiveProgressError(
            f"the table's progress has format {found}; this version of sparklog supports up to {FORMAT}"
        )
    try:
        return msgspec.convert(outer[_KEY], ArchiveProgress, str_keys=True)
    except msgspec.ValidationError as error:
        raise ArchiveProgressError(f"the table's progress cannot be read: {error}: {text[:500]}") from None


class ArchiveProgressAt(NamedTuple):
    """An archive's progress, with the version of the table whose commit records it."""

    version: int
    progress: ArchiveProgress


class DeltaLog:
    """A reader of the Delta log of a table, on any file system.

    ``names`` is a function that returns the names of the files in ``_delta_log``. ``read`` is a function that returns
    the content of a file, or raises FileNotFoundError.
    """

    def __init__(self, names: Callable[[], Iterable[str]], read: Callable[[str], bytes]) -> None:
        self._names = names
        self._read = read

    def versions(self) -> list[int]:
        """Return the versions that have a commit file, in ascending order.

        The list is empty if the table does not exist. Old versions may be missing, because Delta deletes the files of
        old commits after a checkpoint.
        """
        found = (_COMMIT.fullmatch(name) for name in self._names())
        return sorted(int(match[1]) for match in found if match)

    def newest_since(self, version: int) -> tuple[int, ArchiveProgressAt | None]:
        """Return the newest version of the table, and the newest progress that a commit after ``version`` records.

        ``version`` is a version that the caller has already read, or -1. The progress is None if no later commit
        records one. This reads the commits after ``version`` in ascending order, and at most two more files.

        If Delta has deleted the file of ``version``, it may also have deleted later files. Then this searches all
        commit files that still exist, from the newest one down.
        """
        newest, found = version, None
        while True:
            try:
                progress = parse_progress(self._user_metadata(newest + 1))
            except FileNotFoundError:
                if newest == version and self._is_cleaned_away(version):
                    return self.versions()[-1], self.progress()
                return newest, found
            newest += 1
            if progress is not None:
                found = ArchiveProgressAt(newest, progress)

    def progress(self, version: int | None = None) -> ArchiveProgressAt | None:
        """Return the newest progress that a commit at or before ``version`` records (None: the newest version).

        Return None if no commit file that still exists records a progress.

        Raises:
            ArchiveProgressError: a newer release wrote the progress, or it is damaged.
        """
        for found in reversed(self.versions()):
            if version is not None and found > version:
                continue
            try:
                progress = parse_progress(self._user_metadata(found))
            except FileNotFoundError:
                return None  # Delta has just deleted this file and all earlier ones.
            if progress is not None:
                return ArchiveProgressAt(found, progress)
        return None

    def actions(self, version: int) -> Iterator[dict[str, Any]]:
        """Yield the actions of a commit, as Delta's JSON objects with one key each.

        Raises FileNotFoundError if the commit has no file.
        """
        for line in self._read(f"{version:020d}.json").splitlines():
            if line:
                yield msgspec.json.decode(line)

    def _is_cleaned_away(self, version: int) -> bool:
        try:
            self._read(f"{version:020d}.json")
        except FileNotFoundError:
            return any(found > version for found in self.versions())
        return False

    def _user_metadata(self, version: int) -> str | None:
        for action in self.actions(version):
            if "commitInfo" in action:
                found: str | None = action["commitInfo"].get("userMetadata")
                return found
        return None


def open_log(table: str) -> DeltaLog:
    """Open the Delta log of a table without a JVM.

    ``table`` is a local path, or a URI that pyarrow supports (file, s3, gs, hdfs, ...).
    """
    if "://" in table or table.startswith("file:"):
        system, root = pafs.FileSystem.from_uri(table)
    else:
        system, root = pafs.LocalFileSystem(), table
    directory = f"{root.rstrip('/')}/{_LOG}"

    def names() -> list[str]:
        chosen = pafs.FileSelector(directory, allow_not_found=True)
        return [found.base_name for found in system.get_file_info(chosen)]

    def read(name: str) -> bytes:
        with system.open_input_file(f"{directory}/{name}") as file:
            return bytes(file.read())

    return DeltaLog(names, read)


def open_log_with_spark(spark: SparkSession, table: str) -> DeltaLog:
    """Open the Delta log of a table through the Hadoop file systems of ``spark``.

    They support every path to which Spark can write.
    """
    jvm: Any = spark._jvm
    directory = jvm.org.apache.hadoop.fs.Path(f"{table.rstrip('/')}/{_LOG}")
    system = directory.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

    def names() -> list[str]:
        if not system.exists(directory):
            return []
        return [str(found.getPath().getName()) for found in system.listStatus(directory)]

    def read(name: str) -> bytes:
        path = jvm.org.apache.hadoop.fs.Path(directory, name)
        if not system.exists(path):
            raise FileNotFoundError(str(path))
        stream = system.open(path)
        try:
            return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    return DeltaLog(names, read)


def read_progress(table: str, version: int | None = None) -> ArchiveProgressAt | None:
    """Return the newest progress that a commit at or before ``version`` records (None: the newest version).

    ``table`` is a local path, or a URI that pyarrow supports. This needs no JVM. The result is None if no commit file
    that still exists records a progress.

    Raises:
        ArchiveProgressError: a newer release wrote the progress, or it is damaged.
    """
    return open_log(table).progress(version)
