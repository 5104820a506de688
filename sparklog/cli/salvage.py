"""``sparklog segments salvage``: copy the rows of segment files that no broker uses any more to an Arrow file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from sparklog.cli.output import print_json, print_line, print_table
from sparklog.cli.segments import JsonForTable
from sparklog.errors import StorageError
from sparklog.storage.salvage import SalvagedBatch, SalvagedSegment, segments_to_salvage

#: The columns that ``--offsets`` adds.
_ADDED = (pa.field("_offset", pa.int64()), pa.field("_transactional", pa.bool_()))
_UNKNOWN = (
    "Transactions and duplicates are unknown: the rows may include rows of aborted transactions, rows that a retry"
    " wrote twice, and rows that the log still has."
)


def salvage(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Entry of set-aside/.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Arrow file to write.")],
    offsets: Annotated[
        bool, typer.Option("--offsets", help="Add columns _offset and _transactional, null where unknown.")
    ] = False,
    as_json: JsonForTable = False,
) -> None:
    """Write the rows of set-aside segments to an Arrow file. Damaged batches are skipped, and the exit code is then 1.

    It is unknown whether the rows' transactions were committed, and which rows are duplicates.

    Example: sparklog segments salvage logs/set-aside/1795795257-flights-0 -o flights.arrow
    """
    found = segments_to_salvage(directory)
    schema = _widest(found, directory)
    whole = pa.schema([*schema, *_ADDED]) if offsets else schema
    with pa.OSFile(str(output), "wb") as file, pa.ipc.new_file(file, whole) as writer:
        for segment in found:
            for batch in segment.batches():
                writer.write_batch(_row_batch(batch, schema, whole))
    _report(found, as_json=as_json)
    damaged = [problem for segment in found for problem in segment.problems if problem != "has no index"]
    if damaged:
        raise StorageError(f"{len(damaged)} batches or headers are damaged; all other rows are in {output}")


def _widest(found: list[SalvagedSegment], directory: Path) -> pa.Schema:
    """Return the schema with the most columns.

    It is the newest one, because the schemas of a topic only get new columns at the end.
    """
    schemas = [schema for segment in found if (schema := segment.schema()) is not None]
    if not schemas:
        raise StorageError(f"{directory}: no schema found in partition.json or at the start of a segment")
    return max(schemas, key=len)


def _row_batch(batch: SalvagedBatch, schema: pa.Schema, whole: pa.Schema) -> pa.RecordBatch:
    records = batch.records
    rows, columns = records.num_rows, list(records.columns)
    columns += [pa.nulls(rows, field.type) for field in list(schema)[len(columns) :]]
    if len(whole) > len(schema):
        columns.append(pa.nulls(rows, pa.int64()) if batch.offsets is None else pa.array(batch.offsets))
        columns.append(pa.array([batch.transactional] * rows, pa.bool_()))
    return pa.RecordBatch.from_arrays(columns, schema=whole)


def _report(found: list[SalvagedSegment], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "segment": str(segment.data_path),
                    "base_offset": segment.base_offset,
                    "batches": segment.batch_count,
                    "rows": segment.row_count,
                    "rows_without_header": segment.rows_without_header,
                    "problems": segment.problems,
                }
                for segment in found
            ]
        )
        return
    columns = ("segment", "batches", "rows", "without offset", "problems")
    rows = [
        (
            segment.base_offset,
            segment.batch_count,
            segment.row_count,
            segment.rows_without_header,
            "; ".join(segment.problems) or None,
        )
        for segment in found
    ]
    print_table(columns, rows, numeric=columns[:4])
    print_line(_UNKNOWN)
