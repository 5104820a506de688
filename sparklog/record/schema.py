"""Schemas of topics: the allowed Arrow schemas, their bytes, and how they may be extended.

A topic's schema is sent and stored as the bytes of one Arrow IPC Schema message. The client that creates or extends the
topic encodes the schema once. From then on its bytes are copied unchanged, so bytes of different pyarrow versions are
never compared. Metadata of schemas and fields (pandas' index, Spark's comments) is removed, because it is not part of a
topic's schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pyarrow as pa
from pyarrow import types

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.flatbuffer import malformed
from sparklog.record.layout import children_of, is_list, refusals
from sparklog.record.message import read_metadata_length, schema_table_position
from sparklog.record.schema_cast import fit_table as fit_table

#: The columns of Kafka's records, for topics created without a schema.
DEFAULT_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
    ]
)
#: The event-time column of topics created without a schema.
DEFAULT_EVENT_TIME = "timestamp"
#: The key column of topics created without a schema.
DEFAULT_KEY_COLUMNS = ("key",)

#: A schema must fit into one ZooKeeper node (1 MB, in base64) together with the topic's assignment.
MAX_SCHEMA_BYTES = 256 * 1024


def schema_message(schema: pa.Schema) -> bytes:
    """Return the encapsulated IPC Schema message of ``schema``, without metadata.

    Raises:
        BrokerError: SCHEMA_MISMATCH with each column whose type cannot be stored.
    """
    check_schema(schema)
    message: bytes = _without_metadata(schema).serialize().to_pybytes()
    if len(message) > MAX_SCHEMA_BYTES:
        raise BrokerError(
            ErrorCode.SCHEMA_MISMATCH, f"the schema takes {len(message)} bytes, at most {MAX_SCHEMA_BYTES} expected"
        )
    return message


@lru_cache(maxsize=1024)
def parse_schema(message: bytes) -> pa.Schema:
    """Return the schema of an IPC Schema message.

    The result is cached: the same bytes give the same object. For the default schema the result is the object
    ``DEFAULT_SCHEMA`` itself, so callers can recognize this schema by ``is`` and need not compare columns.

    Raises:
        BrokerError: CORRUPT_MESSAGE if the bytes are not exactly one Schema message, SCHEMA_MISMATCH if it has types
            that cannot be stored.
    """
    if len(message) > MAX_SCHEMA_BYTES:
        raise malformed(f"a Schema message of {len(message)} bytes, at most {MAX_SCHEMA_BYTES} expected")
    metadata_length = read_metadata_length(message)
    if metadata_length != len(message):
        raise malformed(f"a Schema message of {metadata_length} bytes in {len(message)} bytes")
    schema_table_position(message[8:])
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(message))
        check_schema(schema)
        bare = _without_metadata(schema)
        return DEFAULT_SCHEMA if bare.equals(DEFAULT_SCHEMA, check_metadata=True) else bare
    except (pa.ArrowException, OSError, EOFError, ValueError, TypeError) as error:
        # ValueError may be raised after ``read_schema``, because pyarrow decodes names when they are first used.
        raise malformed(f"not a schema: {_first_line(error)}") from None


def check_schema(schema: pa.Schema) -> None:
    """Raise BrokerError SCHEMA_MISMATCH, with the reasons, if a topic cannot have this schema."""
    if found := refusals(schema):
        raise BrokerError(ErrorCode.SCHEMA_MISMATCH, "; ".join(found[:20]))


def check_extension(old: pa.Schema, new: pa.Schema) -> None:
    """Check that ``new`` has the columns of ``old`` unchanged, and after them only nullable columns.

    Raises:
        BrokerError: SCHEMA_MISMATCH with each difference that is not allowed.
    """
    check_schema(new)
    found = []
    for index, before in enumerate(old):
        if index >= len(new):
            found.append(f"column {before.name!r} is missing")
            continue
        after = new.field(index)
        if before.name != after.name:
            found.append(f"column {index} is {after.name!r}, expected {before.name!r}")
        elif not before.equals(after):
            found.append(f"column {before.name!r} is {_describe(after)}, expected {_describe(before)}")
    found += [
        f"added column {new.field(index).name!r} is {_describe(new.field(index))}, expected it to be nullable"
        for index in range(len(old), len(new))
        if not new.field(index).nullable
    ]
    if found:
        raise BrokerError(ErrorCode.SCHEMA_MISMATCH, "; ".join(found[:20]))


def check_case(existing: Sequence[str], added: Sequence[str]) -> None:
    """Check that no added column differs from another column only in case.

    By default Spark cannot distinguish such columns, and a topic's columns can never be removed.

    Raises:
        BrokerError: SCHEMA_MISMATCH with the names of both columns.
    """
    by_lower = {name.lower(): name for name in reversed(existing)}
    for name in added:
        other = by_lower.setdefault(name.lower(), name)
        if other != name:
            raise BrokerError(
                ErrorCode.SCHEMA_MISMATCH,
                f"columns {other!r} and {name!r} differ in case only, and Spark cannot tell them apart: rename one",
            )


def check_event_time(schema: pa.Schema, event_time: str | None) -> None:
    """Raise BrokerError SCHEMA_MISMATCH unless ``event_time`` is None or a column of timestamps or dates."""
    if event_time is None:
        return
    kind = _column_type(schema, event_time, "event-time column")
    if not (types.is_timestamp(kind) or types.is_date(kind)):
        raise BrokerError(
            ErrorCode.SCHEMA_MISMATCH, f"event-time column {event_time!r}: expected a timestamp or a date, found {kind}"
        )


def check_key_columns(schema: pa.Schema, key_columns: Sequence[str]) -> None:
    """Raise BrokerError SCHEMA_MISMATCH unless all ``key_columns`` exist, are different, and are not nested."""
    for name in key_columns:
        kind = _column_type(schema, name, "key column")
        if types.is_nested(kind):
            raise BrokerError(
                ErrorCode.SCHEMA_MISMATCH, f"key column {name!r} is {kind}, expected a type that is not nested"
            )
    if len(set(key_columns)) != len(key_columns):
        raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"key columns {list(key_columns)} name a column twice")


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` with each type that cannot be stored replaced by a similar type.

    Use the result for topics that are created from data. A dictionary type becomes the type of its values, an extension
    type its storage type, and a view type the type with offsets. Metadata is removed. ``check_schema`` refuses types
    that have no such replacement.
    """
    return pa.schema([field.remove_metadata().with_type(_plain_type(field.type)) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return pa.list_(_plain_field(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field), kind.keys_sorted)
    if types.is_struct(kind):
        return pa.struct([_plain_field(child) for child in children_of(kind)])
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.remove_metadata().with_type(_plain_type(field.type))


def _without_metadata(schema: pa.Schema) -> pa.Schema:
    return plain_schema(schema)


def _column_type(schema: pa.Schema, name: str, role: str) -> pa.DataType:
    index = schema.get_field_index(name)
    if index < 0:
        raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"{role} {name!r} is not among the columns {schema.names}")
    return schema.field(index).type


def _describe(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
