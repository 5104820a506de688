"""The compiler of readers: it turns a declared message and a version into a function that decodes that version.

A reader is straight Python code for one version. The code of nested structs is inline, so the reader tests neither
versions nor types at run time. It raises many kinds of exceptions for malformed bytes, which
:mod:`sparklog.kafka.wire.codec` converts into one.

A reader bounds its memory and time:

- It compares a length with the number of remaining bytes before it allocates anything. For an array it uses the least
  size of the elements.
- All arrays of a request together have a maximum number of elements, because an element of two bytes takes a hundred
  bytes of memory. A tagged field takes longer to read than an element, so it counts as ``_ELEMENTS_OF_TAG`` elements.
- Readers are not recursive.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from sparklog.kafka.wire.code import Code
from sparklog.kafka.wire.fields import Array, Field, Primitive, fields_of
from sparklog.kafka.wire.primitives import malformed, skip_tagged_fields, uvarint

#: The number of elements whose reading takes about as long as that of a tagged field.
_ELEMENTS_OF_TAG = 4

#: A function that decodes a message. The arguments are a frame, the message's position in the frame and the frame's
#: length. The results are the message and the position after it.
Reader = Callable[[memoryview, int, int], tuple[Any, int]]


def compile_reader(declared: type, version: int, *, flexible: bool, max_elements: int | None = None) -> Reader:
    """Return the function that decodes ``version`` of a declared message.

    ``max_elements`` is the maximum number of elements of all its arrays together.
    """
    return _ReadCompiler(declared.__name__, version, flexible, max_elements).compile(declared)


class _ReadCompiler:
    def __init__(self, name: str, version: int, flexible: bool, max_elements: int | None) -> None:
        names = {
            "uvarint": uvarint,
            "skip_tagged_fields": skip_tagged_fields,
            "malformed": malformed,
            "unpack_array": struct.unpack_from,
        }
        self._code = Code(f"read_{name}_{version}(frame, p, end)", names)
        self._version = version
        self._flexible = flexible
        self._max_elements = max_elements
        #: Codes and variables of the fields of fixed size that no emitted line has read yet.
        self._codes = ""
        self._targets: list[str] = []

    def compile(self, declared: type) -> Reader:
        if self._max_elements is not None:
            self._code.line(f"elements = {self._max_elements}")
        made = self._struct(declared, "end")
        self._flush()
        self._code.line(f"return {made}, p")
        reader: Reader = self._code.function()
        return reader

    def _fixed(self, code: str, target: str) -> None:
        self._codes += code
        self._targets.append(target)

    def _flush(self) -> None:
        if self._codes:
            unpack = self._code.struct_method("unpack_from", self._codes)
            size = struct.calcsize(f">{self._codes}")
            self._code.line(f"{', '.join(self._targets)}, = {unpack}(frame, p); p += {size}")
            self._codes, self._targets = "", []

    def _struct(self, declared: type, end: str) -> str:
        """Emit the code that reads a struct's fields; return the expression that makes the struct."""
        values = {}
        fields = fields_of(declared)
        for field in fields:
            if self._version in field.versions and self._version not in field.tagged:
                values[field.name] = self._field(field, end)
        if self._flexible:
            values |= self._tagged_fields([field for field in fields if self._version in field.tagged], end)
        arguments = [values.get(field.name) or self._code.constant(field.default) for field in fields]
        while arguments and fields[len(arguments) - 1].name not in values:
            arguments.pop()
        self._code.names[declared.__name__] = declared
        return f"{declared.__name__}({', '.join(arguments)})"

    def _field(self, field: Field, end: str) -> str:
        """Emit the code that reads one field; return the variable that has its value."""
        return self._value(field.type, field.name, end, nullable=self._version in field.nullable)

    def _value(self, kind: Primitive | Array | type, name: str, end: str, *, nullable: bool) -> str:
        """Emit the code that reads a value of any type; return its variable. ``name`` is the field's name."""
        target = self._code.variable(name)
        match kind:
            case Primitive() if kind.code:
                self._fixed(kind.code, target)
            case Primitive():
                self._sized(kind, name, target, nullable, end)
            case Array():
                self._array(kind, name, target, nullable, end)
            case declared if nullable:
                present = self._code.variable("present")
                self._fixed("b", present)
                self._flush()
                self._code.line(f"{target} = None")
                self._code.block(f"if {present} >= 0:")
                self._finish(target, self._struct(declared, end))
                self._code.end()
            case declared:
                self._finish(target, self._struct(declared, end))
        return target

    def _finish(self, target: str, expression: str) -> None:
        self._flush()
        self._code.line(f"{target} = {expression}")

    def _length(self, short: bool) -> str:
        """Emit the code that reads a length; return its variable. A negative length means null."""
        length = self._code.variable("length")
        if not self._flexible:
            self._fixed("h" if short else "i", length)
            self._flush()
            return length
        # A null value has length 0, and most lengths take one byte.
        self._fixed("B", length)
        self._flush()
        self._code.line(f"if {length} > 127: {length}, p = uvarint(frame, p - 1)")
        self._code.line(f"{length} -= 1")
        return length

    def _null(self, name: str, target: str, length: str, nullable: bool) -> None:
        """Emit the test for null. If the field is nullable, open the block for values that are not null."""
        self._code.block(f"if {length} < 0:")
        if nullable:
            self._code.line(f"{target} = None")
        else:
            self._code.line(f"malformed({f'{name} is null'!r})")
        self._code.end()
        if nullable:
            self._code.block("else:")

    def _sized(self, primitive: Primitive, name: str, target: str, nullable: bool, end: str) -> None:
        """Emit the code that reads a string, bytes or records."""
        length = self._length(short=primitive.name == "string")
        self._null(name, target, length, nullable)
        after = self._code.variable("after")
        self._code.line(f"{after} = p + {length}")
        self._code.line(f"if {after} > {end}: malformed({f'{name} is longer than its message'!r})")
        view = f"frame[p:{after}]"
        made = {"string": f"str({view}, 'utf-8')", "bytes": f"bytes({view})", "records": view}[primitive.name]
        self._code.line(f"{target} = {made}; p = {after}")
        if nullable:
            self._code.end()

    def _array(self, of: Array, name: str, target: str, nullable: bool, end: str) -> None:
        length = self._length(short=False)
        self._null(name, target, length, nullable)
        least = self._least_size(of.element)
        too_long = f"malformed({f'{name} has more elements than its message has room for'!r})"
        self._code.line(f"if {length} * {least} > {end} - p: {too_long}")
        if self._max_elements is not None:
            self._charge(length)
        element = of.element
        if isinstance(element, Primitive) and element.code:
            values = f"unpack_array(f'>{{{length}}}{element.code}', frame, p)"
            if element.name == "uuid":
                values = f"(bytes(frame[at:at + 16]) for at in range(p, p + 16 * {length}, 16))"
            self._code.line(f"{target} = list({values}); p += {length} * {element.size}")
        else:
            self._code.line(f"{target} = []")
            self._code.block(f"for _ in range({length}):")
            if isinstance(element, Primitive):
                value = self._value(element, name, end, nullable=False)
            else:
                value = self._struct(element, end)
                self._flush()
            self._code.line(f"{target}.append({value})")
            self._code.end()
        if nullable:
            self._code.end()

    def _charge(self, elements: str) -> None:
        """Emit the code that checks the maximum number of elements. ``elements`` is the expression of a number."""
        self._code.line(f"elements -= {elements}")
        self._code.line(f"if elements < 0: malformed('more than {self._max_elements} elements in one request')")

    def _tagged_fields(self, fields: list[Field], end: str) -> dict[str, str]:
        """Emit the code that reads a struct's tagged fields; return the variables of the known fields by name."""
        count = self._code.variable("tags")
        self._fixed("B", count)
        self._flush()
        values = {field.name: self._code.variable(field.name) for field in fields}
        for field in fields:
            self._code.line(f"{values[field.name]} = {self._code.constant(field.default)}")
        self._code.block(f"if {count}:")
        self._code.line(f"if {count} > 127: {count}, p = uvarint(frame, p - 1)")
        if self._max_elements is not None:
            self._charge(f"{_ELEMENTS_OF_TAG} * {count}")
        if not fields:
            self._code.line(f"p = skip_tagged_fields(frame, p, {count}, {end})")
        else:
            self._known_tags(fields, values, count, end)
        self._code.end()
        return values

    def _known_tags(self, fields: list[Field], values: dict[str, str], count: str, end: str) -> None:
        tag, after = self._code.variable("tag"), self._code.variable("after")
        self._code.block(f"for _ in range({count}):")
        self._code.line(f"{tag}, p = uvarint(frame, p)")
        self._code.line(f"{after}, p = uvarint(frame, p)")
        self._code.line(f"{after} += p")
        self._code.line(f"if {after} > {end}: malformed('a tagged field is longer than its struct')")
        word = "if"
        for field in fields:
            self._code.block(f"{word} {tag} == {field.tag}:")
            value = self._field(field, after)
            self._flush()
            self._code.line(f"{values[field.name]} = {value}")
            self._code.line(f"if p != {after}: malformed({f'the tagged field {field.name} has another length'!r})")
            self._code.end()
            word = "elif"
        self._code.block("else:")
        self._code.line(f"p = {after}")
        self._code.end()
        self._code.end()

    def _least_size(self, element: Primitive | type) -> int:
        """Return the least number of bytes of an array's element."""
        if isinstance(element, Primitive):
            return element.size or (1 if self._flexible else 2 if element.name == "string" else 4)
        least = 1 if self._flexible else 0
        for field in fields_of(element):
            if self._version not in field.versions or self._version in field.tagged:
                continue
            if isinstance(field.type, Array):
                least += 1 if self._flexible else 4
            elif isinstance(field.type, Primitive):
                least += self._least_size(field.type)
            else:
                least += 1 if self._version in field.nullable else self._least_size(field.type)
        assert least, f"an array of empty {element.__name__}s has no bound"
        return least
