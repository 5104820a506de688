"""The declaration of Kafka's messages: classes whose fields state their type, versions, tag and default.

A declaration reads like Kafka's own tables::

    @struct
    class MetadataResponsePartition:
        error_code: int = int16("0+")
        leader_epoch: int = int32("7+", default=-1)
        offline_replicas: list[int] = array(int32, "5+")

Such a class becomes a frozen ``msgspec.Struct`` whose fields all have defaults. A writer of a version ignores fields
that the version does not have, and a reader gives them their defaults. Kafka's names are in snake case. Booleans are
``bool``, ids of topics are 16 bytes, times are ``int`` in milliseconds, and records are buffers.

A nested class is declared before the class that uses it, so messages cannot contain themselves. This bounds the depth
of every message.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    from sparklog.kafka.wire.api_keys import ApiKey
else:

    def dataclass_transform(**_options: Any) -> Any:
        """Return a decorator without effect: only type checkers use it."""
        return lambda function: function


_Class = TypeVar("_Class")
#: The topic id in a message that does not give the topic's id.
ZERO_UUID = bytes(16)


class Versions(NamedTuple):
    """A range of a message's versions, from ``first`` to ``last`` inclusive. In an empty range ``last`` is lower."""

    first: int
    last: int

    def __contains__(self, version: object) -> bool:
        """Return whether the range includes ``version``."""
        return isinstance(version, int) and self.first <= version <= self.last


#: The end of a range such as "3+".
_NEWEST = 32767
NO_VERSIONS = Versions(0, -1)


@functools.cache
def versions(text: str) -> Versions:
    """Return the range that ``text`` names in Kafka's notation: "3+", "0-12", "5", or "" for no version."""
    if not text:
        return NO_VERSIONS
    if text.endswith("+"):
        return Versions(int(text[:-1]), _NEWEST)
    first, _, last = text.partition("-")
    return Versions(int(first), int(last or first))


class Primitive(NamedTuple):
    """A type of Kafka's protocol that has no fields. ``code`` is its code in ``struct`` if it has a fixed size."""

    name: str
    default: object
    code: str = ""
    size: int = 0


class Array(NamedTuple):
    """A type of Kafka's protocol: a sequence of primitives or structs."""

    element: Primitive | type


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a message or a nested struct."""

    name: str
    type: Primitive | Array | type
    versions: Versions
    #: The versions in which the value may be None.
    nullable: Versions
    #: The number of the field among the tagged fields, or None.
    tag: int | None
    #: The versions in which the field is tagged. In all other versions it is among the struct's own bytes.
    tagged: Versions
    default: object


class _FieldSpec:
    """A field as its declaration states it, before it has a name."""

    def __init__(self, field_type: Primitive | Array | type, has: str, options: dict[str, Any]) -> None:
        self.type, self.versions, self.options = field_type, versions(has), options

    def named(self, name: str) -> Field:
        nullable = versions(self.options.get("nullable", ""))
        tag = self.options.get("tag")
        return Field(
            name=name,
            type=self.type,
            versions=self.versions,
            nullable=nullable,
            tag=tag,
            tagged=NO_VERSIONS if tag is None else versions(self.options.get("tagged", f"{self.versions.first}+")),
            default=self._default(),
        )

    def _default(self) -> object:
        if "default" in self.options:
            return self.options["default"]
        match self.type:
            case Primitive():
                return self.type.default
            case Array():
                return []
            case _:
                return self.type()


class FieldType:
    """A primitive type, for the declarations of messages.

    ``int32("7+", default=-1)`` declares a field, and ``array(int32, "5+")`` declares a list.

    ``nullable`` names the versions in which the field may be None. ``tag`` is the number of a tagged field. ``tagged``
    names the versions in which it is tagged; by default these are all versions that have the field.
    """

    def __init__(self, primitive: Primitive) -> None:
        self.primitive = primitive

    def __call__(
        self,
        has: str,
        *,
        default: object = ...,
        nullable: str = "",
        tag: int | None = None,
        tagged: str | None = None,
    ) -> Any:
        """Declare a field that the versions ``has`` contain."""
        return _FieldSpec(self.primitive, has, _given(default=default, nullable=nullable, tag=tag, tagged=tagged))


def _given(**options: Any) -> dict[str, Any]:
    return {
        name: value for name, value in options.items() if value is not ... and (value is not None or name == "default")
    }


int8 = FieldType(Primitive("int8", 0, "b", 1))
int16 = FieldType(Primitive("int16", 0, "h", 2))
uint16 = FieldType(Primitive("uint16", 0, "H", 2))
int32 = FieldType(Primitive("int32", 0, "i", 4))
uint32 = FieldType(Primitive("uint32", 0, "I", 4))
int64 = FieldType(Primitive("int64", 0, "q", 8))
float64 = FieldType(Primitive("float64", 0.0, "d", 8))
boolean = FieldType(Primitive("bool", False, "?", 1))
uuid = FieldType(Primitive("uuid", ZERO_UUID, "16s", 16))
string = FieldType(Primitive("string", ""))
#: Bytes are copied out of the frame.
binary = FieldType(Primitive("bytes", b""))
#: Record batches that were read are a view of the frame, and keep the frame in memory. Record batches to be written are
#: one buffer or a sequence of buffers, which are not copied.
records = FieldType(Primitive("records", None))


def array(
    element: FieldType | type,
    has: str,
    *,
    default: object = ...,
    nullable: str = "",
    tag: int | None = None,
    tagged: str | None = None,
) -> Any:
    """Declare a field that is a list of primitives or of structs. The options are those of :class:`FieldType`."""
    kind = element.primitive if isinstance(element, FieldType) else element
    return _FieldSpec(Array(kind), has, _given(default=default, nullable=nullable, tag=tag, tagged=tagged))


def nested(
    kind: type,
    has: str,
    *,
    default: object = ...,
    nullable: str = "",
    tag: int | None = None,
    tagged: str | None = None,
) -> Any:
    """Declare a field that is a struct. The options are those of :class:`FieldType`."""
    return _FieldSpec(kind, has, _given(default=default, nullable=nullable, tag=tag, tagged=tagged))


#: The fields of each declared class, in the order of their bytes.
_FIELDS: dict[type, tuple[Field, ...]] = {}


def fields_of(declared: type) -> tuple[Field, ...]:
    """Return the fields of a declared class, in the order of the protocol."""
    return _FIELDS[declared]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def struct(declared: type[_Class]) -> type[_Class]:
    """Turn a declaration into the class of a nested struct."""
    annotations = inspect.get_annotations(declared)
    fields = tuple(
        spec.named(name) for name in annotations if isinstance(spec := declared.__dict__.get(name), _FieldSpec)
    )
    assert len(fields) == len(annotations), f"{declared.__name__} has a field without a type of Kafka's protocol"
    # No value contains itself, so the garbage collector needs no knowledge of these classes.
    made = msgspec.defstruct(
        declared.__name__,
        [(field.name, annotations[field.name], field.default) for field in fields],
        module=declared.__module__,
        namespace={"__doc__": declared.__doc__, "__qualname__": declared.__qualname__},
        frozen=True,
        gc=False,
    )
    _FIELDS[made] = fields
    return made  # type: ignore[return-value]


class Message(NamedTuple):
    """A request or a response: its class, its versions, and the versions with compact types and tagged fields."""

    declared: type
    versions: Versions
    flexible: Versions


#: All declared requests (``REQUESTS``) and responses (``RESPONSES``), by API key.
REQUESTS: dict[ApiKey, Message] = {}
RESPONSES: dict[ApiKey, Message] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(api_key: ApiKey, has: str, *, flexible: str = "") -> Callable[[type[_Class]], type[_Class]]:
    """Return a decorator that turns a declaration into the class of a request or a response.

    The declaration's name ends with Request or Response. ``has`` are the versions of the message. ``flexible`` are its
    versions with compact types and tagged fields.
    """

    def declare(declared: type[_Class]) -> type[_Class]:
        made = struct(declared)
        table = REQUESTS if declared.__name__.endswith("Request") else RESPONSES
        assert api_key not in table, f"{declared.__name__} is declared twice"
        table[api_key] = Message(made, versions(has), versions(flexible))
        return made

    return declare
