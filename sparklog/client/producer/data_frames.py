"""The conversion of data frames and other tables to Arrow tables for one topic.

Arrow guesses the type of a pandas column of Python objects from its values, and the guess may lose data. For example,
Arrow converts a date and a datetime to two dates. So such a column is converted by the rules for dict rows, to the type
of the topic's column. In such a column, and in a column of floats, NaN means null, as in pandas.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.exact_values import ValueRefusedError
from sparklog.record.layout import is_variable_binary
from sparklog.record.rows import ColumnOfValues

_NOT_CONVERTED = (pa.ArrowException, ValueError, TypeError, OverflowError)


def readable_twice(data: Any) -> Any:
    """Return ``data``. Convert a RecordBatchReader to a table, because its batches can be read only once."""
    return data.read_all() if isinstance(data, pa.RecordBatchReader) else data


def to_table(data: Any, schema: pa.Schema) -> pa.Table:
    """Convert a pyarrow table or batch, a pandas or polars frame, or an object that exports Arrow to a pyarrow table.

    ``schema`` is the topic's schema; the table need not match it. The index of a pandas frame is not converted.

    Raises:
        BrokerError: SCHEMA_MISMATCH if a value does not fit its column in the topic. The message names the column.
        TypeError: ``data`` is not a table; the message names its type.
    """
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if isinstance(data, pa.RecordBatchReader):
        return data.read_all()
    module = type(data).__module__.partition(".")[0]
    if module == "pandas" and hasattr(data, "columns"):
        return _of_pandas(data, schema)
    if hasattr(data, "__arrow_c_stream__"):
        return pa.table(data)
    raise TypeError(f"{type(data).__name__} found; expected a pyarrow, pandas or polars table")


def _of_pandas(frame: Any, schema: pa.Schema) -> pa.Table:
    if not frame.columns.is_unique:
        return pa.Table.from_pandas(frame, preserve_index=False)  # raises an error for the duplicate names
    fields = {name: schema.field(str(name)) for name in frame.columns if schema.get_field_index(str(name)) >= 0}
    objects = [name for name in fields if frame[name].dtype == object]
    # Arrow converts text without a guess, and faster.
    made = [name for name in objects if not is_variable_binary(fields[name].type)]
    columns = {str(name): _column(frame[name], fields[name]) for name in made}
    try:
        rest = pa.Table.from_pandas(frame.drop(columns=made), preserve_index=False)
    except _NOT_CONVERTED:
        columns = {str(name): _column(frame[name], fields[name]) for name in objects}
        try:
            rest = pa.Table.from_pandas(frame.drop(columns=objects), preserve_index=False)
        except _NOT_CONVERTED as error:
            raise BrokerError(ErrorCode.SCHEMA_MISMATCH, str(error).partition("\n")[0][:300]) from error
    return pa.table({**{name: rest.column(name) for name in rest.column_names}, **columns})


def _column(series: Any, field: pa.Field) -> pa.Array:
    values = [None if missing else value for value, missing in zip(series.tolist(), series.isna(), strict=True)]
    try:
        return ColumnOfValues(field.type).array(values)
    except ValueRefusedError as error:
        raise BrokerError(
            ErrorCode.SCHEMA_MISMATCH, f"column {field.name + error.path!r}, row {error.row}: {error}"
        ) from None
