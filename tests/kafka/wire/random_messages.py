"""Random messages of Kafka's protocol, made from the declarations of their fields."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from sparklog.kafka.wire.codec import PARSED_VERSIONS
from sparklog.kafka.wire.fields import REQUESTS, RESPONSES, Array, Field, Message, Primitive, fields_of

#: Every message in every version.
VERSIONS: list[tuple[str, int, int]] = [
    (kind, int(key), version)
    for kind in ("request", "response")
    for key, (first, last) in PARSED_VERSIONS.items()
    for version in range(first, last + 1)
]
_INTEGERS = {
    name: st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    for name, bits in (("int8", 8), ("int16", 16), ("int32", 32), ("int64", 64))
}
_TEXT = st.text(max_size=3) | st.sampled_from(["é" * 63, "a" * 126, "a" * 127, "z" * 300])
_BYTES = st.binary(max_size=5) | st.sampled_from([bytes(126), bytes(127), bytes(2000)])
_PRIMITIVES: dict[str, st.SearchStrategy[Any]] = {
    **_INTEGERS,
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "uuid": st.binary(min_size=16, max_size=16),
    "string": _TEXT,
    "bytes": _BYTES,
    "records": _BYTES | st.lists(_BYTES, max_size=3),
}


def declaration(kind: str, api_key: int) -> Message:
    """Return the declaration of a request or a response."""
    return (REQUESTS if kind == "request" else RESPONSES)[api_key]  # type: ignore[index]


def messages(kind: str, api_key: int, version: int) -> st.SearchStrategy[Any]:
    """Return a strategy for messages with random values in all fields that the version has."""
    return _structs(declaration(kind, api_key).declared, version)


def _structs(declared: type, version: int) -> st.SearchStrategy[Any]:
    fields = {field.name: _values(field, version) for field in fields_of(declared) if version in field.versions}
    return st.builds(declared, **fields)


def _values(field: Field, version: int) -> st.SearchStrategy[Any]:
    values = _of_type(field.type, version)
    if version in field.nullable:
        values = st.none() | values
    if version in field.tagged:
        values = st.just(field.default) | values
    return values


def _of_type(kind: Primitive | Array | type, version: int) -> st.SearchStrategy[Any]:
    match kind:
        case Primitive():
            return _PRIMITIVES[kind.name]
        case Array() as array:
            return st.lists(_of_type(array.element, version), max_size=3)
        case declared:
            return _structs(declared, version)


def comparable(value: Any) -> Any:
    """Return a message in a form in which records are equal if their bytes are."""
    match value:
        case memoryview():
            return bytes(value)
        case list() if value and all(isinstance(part, bytes) for part in value):
            return b"".join(value)
        case list():
            return [comparable(each) for each in value]
        case _ if hasattr(value, "__struct_fields__"):
            return {
                field.name: _records(getattr(value, field.name))
                if isinstance(field.type, Primitive) and field.type.name == "records"
                else comparable(getattr(value, field.name))
                for field in fields_of(type(value))
            }
        case _:
            return value


def _records(value: Any) -> bytes | None:
    return None if value is None else b"".join(value) if isinstance(value, list) else bytes(value)
