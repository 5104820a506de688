"""Up to where a Delta table holds its topic: said by every commit of the archive, in that commit.

    {"sparklog": {"attempt": "...", "batch": 7, "begins": {"0": 0, "1": 12}, "ends": {"0": 120, "1": 88},
                  "every_s": 30.0, "format": 1, "lost": {}, "mode": "append", "process": "...", "topic": "flights",
                  "topic_id": "..."}}

is the ``userMetadata`` of a commit. ``ends`` are the next offsets to be archived: all committed records below them are
in the table or in its quarantine, none at or above them is in the table. So at any version of a table the seam is
exact: it is the newest such commit at or before that version. Commits of others (OPTIMIZE, VACUUM, a user's) carry
none, and what is older stands. Delta's log is read directly: a commit is one file, and its name is its version.
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
    """What a table says of its progress cannot be read, or is not there."""


class ArchiveProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one table as of one commit of its archive."""

    topic: str
    topic_id: str
    #: Number of the archive's commit in this table, from 0; also the version of Delta's transaction ``app_id``.
    batch: int
    #: By partition, the offset behind the last one that is archived. Of a quarantine: what its rows are below.
    ends: dict[int, int]
    mode: Mode
    #: By partition, where the archive began: all that was in the log below that was gone by then. Rows cannot tell, as
    #: the first offsets may have none. Empty in tables that are older than this.
    begins: dict[int, int] = {}
    #: Whose commit it is: made anew by every start of an archive.
    attempt: str = ""
    #: The process of that run, as ``running`` says it, and how often it looks for records (s; 0: until it is done).
    process: str = ""
    every_s: float = 0.0
    #: Half-open ranges, gone from the log before they were archived, that this commit passed over.
    lost: dict[int, tuple[int, int]] = {}
    format: int = FORMAT

    @property
    def app_id(self) -> str:
        """Name of the table's Delta transactions."""
        return app_id(self.topic_id)

    @property
    def commit(self) -> tuple[int, str]:
        """What tells the commit that says it from others of the table, whatever the topic has become since."""
        return self.batch, self.attempt

    def to_json(self) -> str:
        """The text for ``userMetadata``, with sorted keys."""
        return msgspec.json.encode({_KEY: msgspec.to_builtins(self, str_keys=True)}, order="sorted").decode()


def app_id(topic_id: str) -> str:
    """The application id of Delta's transactions for tables of a topic."""
    return f"sparklog-archive/{topic_id}"


def parse_seam(text: str | None) -> ArchiveProgress | None:
    """The seam that a commit's ``userMetadata`` holds; None when it holds something else.

    Raises:
        SeamError: written by a newer version, or damaged.
    """
    if not text:
        return None
    try:
        outer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None  # some other program's
    if not isinstance(outer, dict) or not isinstance(outer.get(_KEY), dict):
        return None
    found = outer[_KEY].get("format")
    if not isinstance(found, int) or found > FORMAT:
        raise ArchiveProgressError(
            f"the table's progress has format {found}; this version of sparklog reads up to {FORMAT}"
        )
    try:
        return msgspec.convert(outer[_KEY], ArchiveProgress, str_keys=True)
    except msgspec.ValidationError as error:
        raise ArchiveProgressError(f"the table's progress cannot be read: {error}: {text[:500]}") from None


class ArchiveProgressAt(NamedTuple):
    """A seam, and the version of the table whose commit says it."""

    version: int
    seam: ArchiveProgress


class DeltaLog:
    """The commits of a table that are still there, over any file system: names of files in ``_delta_log``, and the text
    of one, FileNotFoundError where it is not there."""

    def __init__(self, names: Callable[[], Iterable[str]], read: Callable[[str], bytes]) -> None:
        self._names = names
        self._read = read

    def versions(self) -> list[int]:
        """Ascending; empty when there is no table. Old commits may be gone, behind a checkpoint."""
        found = (_COMMIT.fullmatch(name) for name in self._names())
        return sorted(int(match[1]) for match in found if match)

    def newest_since(self, version: int) -> tuple[int, ArchiveProgressAt | None]:
        """The newest version, looked for upwards from one that is known to exist (-1: from the beginning), and the
        newest seam of those behind it. Asks for as many files as there are new commits, and for two more.

        Where ``version`` has been cleaned away since, so may have been what came next: then all commits are looked at.
        """
        newest, found = version, None
        while True:
            try:
                seam = parse_seam(self._user_metadata(newest + 1))
            except FileNotFoundError:
                if newest == version and self._is_cleaned_away(version):
                    return self.versions()[-1], self.seam()
                return newest, found
            newest += 1
            if seam is not None:
                found = ArchiveProgressAt(newest, seam)

    def seam(self, version: int | None = None) -> ArchiveProgressAt | None:
        """The seam at a version (None: the newest). None where no commit that is left says one.

        Raises:
            SeamError: as ``parse_seam``.
        """
        for found in reversed(self.versions()):
            if version is not None and found > version:
                continue
            try:
                seam = parse_seam(self._user_metadata(found))
            except FileNotFoundError:
                return None  # cleaned away just now, and all before it
            if seam is not None:
                return ArchiveProgressAt(found, seam)
        return None

    def actions(self, version: int) -> Iterator[dict[str, Any]]:
        """What a commit did, in Delta's words, one object with one key each. Raises FileNotFoundError."""
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
    """The log of the table at a local path or a URI that pyarrow knows (file, s3, gs, hdfs, ...); without a JVM."""
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
    """The same through the session's Hadoop file systems, which know every path that Spark can write to."""
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


def read_seam(table: str, version: int | None = None) -> ArchiveProgressAt | None:
    """The seam of the table at a path or URI, as of ``version`` (None: the newest); without a JVM.

    Raises:
        SeamError: as ``parse_seam``.
    """
    return open_log(table).seam(version)
