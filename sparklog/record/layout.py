"""The Arrow types that a topic may have, and the layout of a schema's columns in a record batch message.

A type is allowed if all programs that read a segment file should support it, and if each row takes space. With a column
of type ``null`` or of empty structs, a batch of a few bytes could have four billion records. Dictionary types are not
allowed, because an Arrow file has one dictionary for all batches of a column, but the batches of a log are independent.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
from pyarrow import types

#: The maximum number of columns and nested columns of one schema.
MAX_NODES = 10_000
#: The maximum number of nesting levels. Arrow's own readers accept 64.
MAX_DEPTH = 16
#: The maximum length of a fixed-size list, and of a fixed-size binary in bytes.
_MAX_FIXED_SIZE = 1 << 20

_EXTENSION_KEY = b"ARROW:extension:name"


class LayoutNode(NamedTuple):
    """The layout of one column or nested column of a batch message.

    A message has the columns depth first: each column is followed by its nested columns.
    """

    path: str
    nullable: bool
    #: The number of the column's own buffers, without the buffers of nested columns.
    buffers: int
    #: Whether the column is a column of the schema, and not a nested column.
    top: bool


class Layout(NamedTuple):
    """The layout that every batch message of a schema must have: its columns and nested columns, and their buffers."""

    nodes: tuple[LayoutNode, ...]
    #: The number of buffers of all nodes.
    buffers: int
    #: The numbers of the columns that are not nullable, or have a nested column that is not nullable.
    required: tuple[int, ...]


_LAYOUTS: dict[int, tuple[pa.Schema, Layout]] = {}
_MAX_LAYOUTS = 1024


def layout_of(schema: pa.Schema) -> Layout:
    """Return the layout of ``schema``, for which ``refusals`` must be empty.

    The result is cached by the id of the schema object, because hashing a schema takes longer than the comparison of a
    batch with a layout. This works because ``parse_schema`` returns the same object for the same bytes. The cache keeps
    the object alive, so that no other object gets the same id.
    """
    known = _LAYOUTS.get(id(schema))
    if known is not None:
        return known[1]
    nodes: list[LayoutNode] = []
    for field in schema:
        _append_nodes(nodes, field, path=field.name, top=True)
    required = tuple(index for index, field in enumerate(schema) if not field.nullable or has_required(field.type))
    layout = Layout(tuple(nodes), sum(node.buffers for node in nodes), required)
    if len(_LAYOUTS) >= _MAX_LAYOUTS:
        _LAYOUTS.clear()
    _LAYOUTS[id(schema)] = schema, layout
    return layout


def has_required(kind: pa.DataType) -> bool:
    """Return whether ``kind`` has a nested part that is not nullable.

    The keys of maps do not count, because Arrow checks them.
    """
    if types.is_map(kind):
        return not kind.item_field.nullable or has_required(kind.item_type)
    return any(not child.nullable or has_required(child.type) for child in children_of(kind))


def refusals(schema: pa.Schema) -> list[str]:
    """Return the reasons why a topic cannot have this schema, one for each column.

    The list is empty if a topic can have the schema.
    """
    if len(schema) == 0:
        return ["a topic needs at least one column"]
    names = schema.names
    found = [
        f"column {name!r} occurs {names.count(name)} times" for name in sorted(set(names)) if names.count(name) > 1
    ]
    for field in schema:
        reason = _refusal(field, depth=1)
        if not field.name:
            found.append("a column without a name")
        elif reason:
            found.append(f"column {field.name!r} ({field.type}): {reason}")
    if not found and (nodes := len(layout_of(schema).nodes)) > MAX_NODES:
        found.append(f"{nodes} columns and nested columns, at most {MAX_NODES} expected")
    return found


def is_variable_binary(kind: pa.DataType) -> bool:
    """Return whether the type is text or bytes of variable length: its buffers are validity, offsets and bytes."""
    return bool(
        types.is_binary(kind) or types.is_string(kind) or types.is_large_binary(kind) or types.is_large_string(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Return whether the type is a list with an offsets buffer. A map does not count as a list."""
    return bool(types.is_list(kind) or types.is_large_list(kind))


def children_of(kind: pa.DataType) -> list[pa.Field]:
    """Return the nested fields of a type, as a message has them, or an empty list if the type is not nested."""
    if types.is_map(kind):
        return [pa.field("entries", pa.struct([kind.key_field, kind.item_field]), nullable=False)]
    if types.is_struct(kind):
        return [kind.field(index) for index in range(kind.num_fields)]
    if is_list(kind) or types.is_fixed_size_list(kind):
        return [kind.value_field]
    return []


def _append_nodes(nodes: list[LayoutNode], field: pa.Field, *, path: str, top: bool) -> None:
    nodes.append(LayoutNode(path, field.nullable, _own_buffers(field.type), top))
    for child in children_of(field.type):
        _append_nodes(nodes, child, path=f"{path}.{child.name}", top=False)


def _own_buffers(kind: pa.DataType) -> int:
    if is_variable_binary(kind):
        return 3
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1
    return 2


def _refusal(field: pa.Field, depth: int) -> str | None:
    kind = field.type
    if depth > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH} levels"
    if isinstance(kind, pa.BaseExtensionType) or _EXTENSION_KEY in (field.metadata or {}):
        return "extension types are not stored; use the storage type"
    if types.is_dictionary(kind):
        return f"dictionary types are not stored; use {kind.value_type}"
    if types.is_nested(kind):
        return _nested_refusal(kind, depth)
    if types.is_fixed_size_binary(kind):
        return _fixed_size_refusal(kind.byte_width)
    if is_variable_binary(kind) or _is_fixed_width(kind):
        return None
    return "this type is not stored"


def _nested_refusal(kind: pa.DataType, depth: int) -> str | None:
    children = children_of(kind)
    if types.is_struct(kind) and not children:
        return "a struct needs at least one field"
    if not children:
        return "this type is not stored"
    if types.is_fixed_size_list(kind) and (reason := _fixed_size_refusal(kind.list_size)):
        return reason
    reasons = (_refusal(child, depth + 1) for child in children)
    return next((reason for reason in reasons if reason), None)


def _fixed_size_refusal(size: int) -> str | None:
    return None if 1 <= size <= _MAX_FIXED_SIZE else f"fixed size {size}, expected 1 to {_MAX_FIXED_SIZE}"


def _is_fixed_width(kind: pa.DataType) -> bool:
    return bool(
        types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_date(kind)
        or types.is_time(kind)
        or types.is_timestamp(kind)
        or types.is_duration(kind)
    )
