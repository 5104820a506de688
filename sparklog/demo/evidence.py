"""The comparison of the rows that were read with the rows that were written, and of the replicas' files.

Rows that a task wrote twice are counted and removed first, by their row id. Every other difference is an error.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparklog.client.admin.admin import Admin
from sparklog.demo.flights import ROW_ID
from sparklog.demo.story import Story
from sparklog.errors import ClusterError
from sparklog.model import TopicPartition

_ARROW_MAGIC = b"ARROW1"
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Duplicates:
    """The rows that are in the log more than once: their number, and the tasks (``slices``) that wrote them."""

    rows: int
    slices: int


def compare_rows(source: pa.Table, found: pa.Table, *, slice_rows: int, story: Story) -> Duplicates:
    """Compare the rows that were read with ``source``.

    The count, the rows by carrier, the sum of each numeric column and all values are compared.
    """
    unique = _first_of_each(found.select(source.schema.names))
    story.check("rows", expected=source.num_rows, found=unique.num_rows)
    missing = len(np.setdiff1d(_ids(source), _ids(unique)))
    story.check("rows lost", expected=0, found=missing)
    per_carrier = [_counts(table.column("carrier")) for table in (source, unique)]
    story.check(
        f"rows of each of {len(per_carrier[0])} carriers",
        expected=_digest(per_carrier[0]),
        found=_digest(per_carrier[1]),
    )
    for field in source.schema:
        if field.name != ROW_ID and (pa.types.is_integer(field.type) or pa.types.is_floating(field.type)):
            sums = [pc.sum(table.column(field.name)).as_py() for table in (source, unique)]
            story.check(f"sum of {field.name}", expected=sums[0], found=sums[1])
    equal = unique.cast(source.schema).equals(source)
    story.check("every value of every row", expected="as written", found="as written" if equal else "other values")
    return _duplicates(_ids(found), slice_rows)


def await_replicas(admin: Admin, topic: str, *, within_s: float) -> float:
    """Wait until every replica is in sync and has its leader's log end offset; return the duration in seconds.

    Raises:
        ClusterError: some replicas were not in sync within ``within_s``; the message names their partitions.
    """
    started = time.monotonic()
    while True:
        behind = _behind(admin, topic)
        waited = time.monotonic() - started
        if not behind:
            return waited
        if waited > within_s:
            raise ClusterError(f"{topic}: not all replicas in sync after {within_s:g} s: {'; '.join(behind)}")
        time.sleep(_POLL_S)


def compare_segments(admin: Admin, topic: str, *, within_s: float, story: Story) -> None:
    """Compare all sealed segments (data and index) between the replicas of each partition, by SHA-256."""
    deadline = time.monotonic() + within_s
    directories = _directories(admin, topic)
    while not all(_all_sealed(path) for paths in directories.values() for path in paths):
        if time.monotonic() > deadline:
            raise ClusterError(f"{topic}: rolled segments are still not sealed after {within_s:g} s")
        time.sleep(_POLL_S)
    files = compared = 0
    for paths in directories.values():
        digests = [_segment_digests(path) for path in paths]
        names = set().union(*digests)
        files += len(names)
        compared += sum(len({digest.get(name) for digest in digests}) == 1 for name in names)
    replicas = max(len(paths) for paths in directories.values())
    story.check(f"sealed files with one SHA-256 on {replicas} replicas", expected=files, found=compared)
    story.check("there are sealed segments to compare", expected=True, found=files > 0)


def _ids(table: pa.Table) -> npt.NDArray[np.int64]:
    ids: npt.NDArray[np.int64] = table.column(ROW_ID).to_numpy()
    return ids


def _first_of_each(found: pa.Table) -> pa.Table:
    """Return one row for each row id, in the order of the ids."""
    _, first = np.unique(_ids(found), return_index=True)
    return found.take(pa.array(first))


def _duplicates(ids: npt.NDArray[np.int64], slice_rows: int) -> Duplicates:
    values, counts = np.unique(ids, return_counts=True)
    twice = values[counts > 1]
    return Duplicates(int((counts - 1).sum()), len(np.unique(twice // slice_rows)))


def _counts(column: pa.ChunkedArray) -> list[tuple[str, int]]:
    pairs = pc.value_counts(column).to_pylist()
    return sorted((pair["values"], pair["counts"]) for pair in pairs)


def _digest(counts: list[tuple[str, int]]) -> str:
    """Return the three largest counts and a checksum of all counts, which together are short to print."""
    largest = sorted(counts, key=lambda pair: -pair[1])[:3]
    shown = ", ".join(f"{name} {count:,}" for name, count in largest)
    return f"{shown}, ... #{hashlib.sha256(repr(counts).encode()).hexdigest()[:8]}"


def _behind(admin: Admin, topic: str) -> list[str]:
    described = admin.describe_topic(topic)
    ends: dict[TopicPartition, list[int]] = defaultdict(list)
    for broker in admin.describe_brokers():
        for replica in broker.replicas:
            if replica.topic == topic:
                ends[TopicPartition(topic, replica.partition)].append(replica.log_end_offset)
    return [
        f"partition {part.partition}: in sync {part.isr} of {part.replicas}, log ends {found}"
        for part in described.partitions
        if len(found := ends[TopicPartition(topic, part.partition)]) < len(part.replicas)
        or len(part.isr) < len(part.replicas)
        or len(set(found)) > 1
    ]


def _directories(admin: Admin, topic: str) -> dict[int, list[Path]]:
    """Return the directories of each partition, one per replica."""
    directories: dict[int, list[Path]] = defaultdict(list)
    for broker in admin.describe_brokers():
        for replica in broker.replicas:
            if replica.topic == topic:
                directories[replica.partition].append(Path(replica.directory))
    return directories


def _all_sealed(directory: Path) -> bool:
    """Return whether every segment except the last ends with the magic of an Arrow file."""
    return all(_is_sealed(path) for path in sorted(directory.glob("*.arrow"))[:-1])


def _is_sealed(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(_ARROW_MAGIC)))
        return file.read() == _ARROW_MAGIC


def _segment_digests(directory: Path) -> dict[str, str]:
    sealed = [path for path in sorted(directory.glob("*.arrow")) if _is_sealed(path)]
    files = [file for path in sealed for file in (path, path.with_suffix(".index"))]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
