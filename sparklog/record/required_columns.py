"""A check for nulls in columns that are not nullable. Arrow's own validation does not check this.

Code that relies on ``not null``, such as Spark's generated code, would read such a null as zero.
"""

from __future__ import annotations

import pyarrow as pa
from pyarrow import types

from sparklog.record.layout import has_required


def misplaced_null(array: pa.Array, field: pa.Field) -> str | None:
    """Return the path of a column or nested column that has nulls although it is not nullable.

    Return None if there is no such column. ``array`` must have exactly the type of ``field``, and must be validated.
    Values inside a null struct or list are not checked.
    """
    return _misplaced(array, field, field.name)


def _misplaced(array: pa.Array, field: pa.Field, path: str) -> str | None:
    if not field.nullable and array.null_count:
        return path
    if not has_required(field.type):
        return None
    if array.null_count:
        array = array.drop_null()
    if types.is_struct(field.type):
        inner = [(array.field(index), field.type.field(index)) for index in range(field.type.num_fields)]
    elif types.is_map(field.type):
        inner = [(_items(array), field.type.item_field)]  # Arrow checks the keys
    else:
        inner = [(array.flatten(), field.type.value_field)]
    found = (_misplaced(child, of, f"{path}.{of.name}") for child, of in inner)
    return next((place for place in found if place), None)


def _items(array: pa.MapArray) -> pa.Array:
    """Return the items of a map column without nulls. ``MapArray.items`` would return too many for a slice."""
    if len(array) == 0:
        return array.items.slice(0, 0)
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return array.items.slice(first, last - first)
