"""``sparklog segments``: inspect the segment files of a log directory. Needs no running broker and changes nothing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from sparklog.cli.output import human_bytes, print_json, print_json_line, print_line, print_table
from sparklog.errors import ConfigError, StorageError
from sparklog.model import TopicPartition
from sparklog.record.format_values import as_json, json_values, text_values
from sparklog.record.header import Flag
from sparklog.storage.checkpoints import read_checkpoint
from sparklog.storage.disk import RealDisk
from sparklog.storage.inspect import SegmentReport, StoredBatch, StoredPartition, differences, partitions_in

segments = typer.Typer(help="List, dump, verify and compare segment files offline.", no_args_is_help=True)

Paths = Annotated[list[Path], typer.Argument(metavar="DIRECTORY...", help="Log or partition directories.")]
JsonForTable = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_FLAGS = ((Flag.LZ4, "lz4"), (Flag.ZSTD, "zstd"), (Flag.CONTROL, "marker"), (Flag.TRANSACTIONAL, "transactional"),
          (Flag.OFFSET_ARRAY, "offsets"), (Flag.CLEANED, "cleaned"))  # fmt: skip


@segments.command("list")
def list_segments(paths: Paths, as_json: JsonForTable = False) -> None:
    """List segments with offsets, batches, records, leader epochs, size and state. Reads only batch headers.

    Example: sparklog segments list /var/lib/sparklog/logs
    """
    _print_reports(paths, thorough=False, as_json=as_json)


@segments.command("verify")
def verify(paths: Paths, as_json: JsonForTable = False) -> None:
    """Check every header, checksum, record and footer. The exit code is 1 if a problem is found.

    Example: sparklog segments verify /var/lib/sparklog/logs/flights-0
    """
    problems = _print_reports(paths, thorough=True, as_json=as_json)
    if problems:
        raise StorageError(f"{problems} problems found")


@segments.command("dump")
def dump(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="A partition directory.")],
    start: Annotated[
        int, typer.Option("--from", metavar="OFFSET", help="Start at the batch that contains this offset.")
    ] = 0,
    end: Annotated[int | None, typer.Option("--to", metavar="OFFSET", help="Stop before this offset.")] = None,
    records: Annotated[bool, typer.Option("--records", help="Print records, one JSON document per line.")] = False,
    as_json: JsonForTable = False,
) -> None:
    """Print the batch headers of one partition, or all records with their offsets, including aborted ones.

    Example: sparklog segments dump /var/lib/sparklog/logs/flights-0 --from 1000 --to 1100 --records
    """
    (partition,) = _one(directory)
    batches = partition.batches(start, end)
    if records:
        for batch in batches:
            _print_records(batch, start, end)
        return
    found = [_plain(batch) for batch in batches]
    if as_json:
        print_json(found)
        return
    columns = ("offset", "next", "records", "bytes", "epoch", "max time", "producer", "sequence", "flags")
    rows = [
        (one["base_offset"], one["next_offset"], one["records"], one["bytes"], one["leader_epoch"],
         _time(one["max_timestamp_us"]), one["producer_id"], one["first_sequence"], _said(one))
        for one in found
    ]  # fmt: skip
    print_table(columns, rows, title=str(directory), numeric=columns[:5])


@segments.command("compare")
def compare(paths: Paths, as_json: JsonForTable = False) -> None:
    """Compare the first replica of each partition with the others, up to the lower of the two high watermarks. The exit
    code is 1 if replicas differ.

    Example: sparklog segments compare broker-0/logs broker-1/logs broker-2/logs
    """
    replicas: dict[tuple[str, str], list[StoredPartition]] = defaultdict(list)
    for path in paths:
        for partition in partitions_in(path):
            replicas[partition.name, partition.content.topic_id].append(partition)
    found: list[dict[str, Any]] = []
    for (name, _), group in sorted(replicas.items()):
        for other in group[1:]:
            below = min(_high_watermark(group[0]), _high_watermark(other))
            found += [
                {"partition": name, "replicas": [str(group[0].directory), str(other.directory)], "difference": text}
                for text in differences(group[0], other, below=below)
            ]
    compared = sum(len(group) > 1 for group in replicas.values())
    if not compared:
        raise ConfigError("no partition occurs in two of these directories")
    if as_json:
        print_json({"partitions": compared, "differences": found})
    else:
        for one in found:
            print_line(f"{one['partition']}: {one['replicas'][0]} and {one['replicas'][1]}: {one['difference']}")
        print_line(f"{compared} partitions compared, {len(found)} differences")
    if found:
        raise StorageError(f"{len(found)} differences found")


def _print_reports(paths: list[Path], *, thorough: bool, as_json: bool) -> int:
    """Print the reports and return the number of problems."""
    found = [
        (partition.name, report)
        for path in paths
        for partition in partitions_in(path)
        for report in partition.reports(thorough=thorough)
    ]
    if as_json:
        print_json([{"partition": name, **asdict(report)} for name, report in found])
    else:
        columns = ("partition", "offset", "next", "batches", "records", "epochs", "newest", "size", "state", "problems")
        rows = [(name, *_row(report)) for name, report in found]
        print_table(columns, rows, numeric=("offset", "next", "batches", "records"))
    return sum(len(report.problems) for _, report in found)


def _row(report: SegmentReport) -> tuple[Any, ...]:
    first, last = report.leader_epochs
    state = "sealed" if report.sealed else "open"
    return (
        report.base_offset,
        report.end_offset,
        report.batches,
        report.records,
        first if first == last else f"{first}-{last}",
        _time(report.timestamps_us[1]),
        human_bytes(report.data_bytes),
        f"{state}, cleaned" if report.cleaned else state,
        "; ".join(report.problems) or None,
    )


def _one(directory: Path) -> list[StoredPartition]:
    found = partitions_in(directory)
    if len(found) != 1:
        raise ConfigError(f"{directory}: expected the directory of one partition, found {len(found)} partitions")
    return found


def _plain(batch: StoredBatch) -> dict[str, Any]:
    header = batch.header
    return {
        "base_offset": header.base_offset,
        "next_offset": header.next_offset,
        "records": header.record_count,
        "bytes": header.stored_bytes,
        "leader_epoch": header.leader_epoch,
        "schema_id": header.schema_id,
        "max_timestamp_us": header.max_timestamp,
        "append_time_us": header.append_time,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "first_sequence": header.first_sequence,
        "flags": [name for flag, name in _FLAGS if header.flags & flag],
        "committed": [one[0] for one in batch.marker.committed] if batch.marker else [],
        "aborted": [one[0] for one in batch.marker.aborted] if batch.marker else [],
    }


def _said(batch: dict[str, Any]) -> str:
    ended = [f"{what} {', '.join(map(str, batch[what]))}" for what in ("committed", "aborted") if batch[what]]
    return " ".join([*batch["flags"], *ended])


def _print_records(batch: StoredBatch, start: int, end: int | None) -> None:
    if batch.records is None:
        return
    names = batch.records.schema.names
    columns = [json_values(column) for column in batch.records.columns]
    for offset, row in zip(batch.offsets.tolist(), zip(*columns, strict=True), strict=True):
        if offset >= start and (end is None or offset < end):
            print_json_line(as_json({"offset": offset, **dict(zip(names, row, strict=True))}).decode())


def _time(us: int) -> str | None:
    """Return a time with a precision of seconds.

    If Python's ``datetime`` cannot represent the time, return a number with its unit.
    """
    if us < 0:
        return None
    (text,) = text_values(pa.array([us // 1_000_000], pa.timestamp("s", "UTC")))
    return None if text is None else text.decode()


def _high_watermark(partition: StoredPartition) -> int:
    """Return the partition's high watermark from the checkpoint in the log directory; 0 if there is none."""
    tp = TopicPartition(partition.content.topic, partition.content.partition)
    entry = read_checkpoint(RealDisk(), partition.directory.parent).get(tp)
    return entry.high_watermark if entry is not None and entry.topic_id == partition.content.topic_id else 0
