"""The compiler of writers: it turns a declared message and a version into a function that encodes that version.

A writer is straight Python code for one version, with the code of nested structs inline. It appends to a list of
buffers, whose last element is a ``bytearray``. Only records become separate buffers. The writer omits a field that the
version does not have, even if the field has a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparklog.kafka.wire.code import Code
from sparklog.kafka.wire.fields import Array, Field, Primitive, fields_of
from sparklog.kafka.wire.primitives import Buffer, array_packer, uvarint_bytes, write_records, write_tags

#: A function that appends a message to buffers, of which the last is a ``bytearray``.
Writer = Callable[[Any, list[Buffer]], None]


def compile_writer(declared: type, version: int, *, flexible: bool) -> Writer:
    """Return the function that encodes ``version`` of a declared message."""
    return _WriteCompiler(declared.__name__, version, flexible).compile(declared)


class _WriteCompiler:
    def __init__(self, name: str, version: int, flexible: bool) -> None:
        names = {"uvarint_bytes": uvarint_bytes, "write_records": write_records, "write_tags": write_tags}
        self._code = Code(f"write_{name}_{version}(message, parts)", names)
        self._version = version
        self._flexible = flexible
        #: Codes and expressions of the fields of fixed size that no emitted line has written yet.
        self._codes = ""
        self._values: list[str] = []

    def compile(self, declared: type) -> Writer:
        self._code.line("out = parts[-1]")
        self._struct(declared, "message")
        self._flush()
        writer: Writer = self._code.function()
        return writer

    def _fixed(self, code: str, value: str) -> None:
        self._codes += code
        self._values.append(value)

    def _flush(self) -> None:
        if self._codes:
            if self._codes.strip("x"):
                pack = self._code.struct_method("pack", self._codes)
                self._code.line(f"out += {pack}({', '.join(self._values)})")
            else:
                self._code.line(f"out += {bytes(len(self._codes))!r}")
            self._codes, self._values = "", []

    def _struct(self, declared: type, value: str) -> None:
        """Emit the code that writes a struct. ``value`` is the variable that has the struct."""
        fields = fields_of(declared)
        for field in fields:
            if self._version in field.versions and self._version not in field.tagged:
                self._value(field.type, f"{value}.{field.name}", nullable=self._version in field.nullable)
        if self._flexible:
            self._tagged_fields([field for field in fields if self._version in field.tagged], value)

    def _value(self, kind: Primitive | Array | type, value: str, *, nullable: bool) -> None:
        """Emit the code that writes a value of any type. ``value`` is the expression for it."""
        match kind:
            case Primitive() if kind.code:
                self._fixed(kind.code, value)
            case Primitive(name="records"):
                self._flush()
                self._code.line(f"out = write_records(parts, {value}, compact={self._flexible})")
            case Primitive():
                self._sized(kind, value, nullable)
            case Array():
                self._array(kind, value, nullable)
            case declared if nullable:
                struct = self._null(value, nullable, b"\xff")
                self._fixed("b", "1")
                self._struct(declared, struct)
                self._end_null(nullable)
            case declared:
                struct = self._code.variable("struct")
                self._code.line(f"{struct} = {value}")
                self._struct(declared, struct)

    def _null(self, value: str, nullable: bool, null: bytes) -> str:
        """Emit the code that writes None if the field is nullable, and open the block for other values.

        Return the variable that has the value.
        """
        variable = self._code.variable("value")
        if nullable:
            self._flush()
        self._code.line(f"{variable} = {value}")
        if nullable:
            self._code.block(f"if {variable} is None:")
            self._code.line(f"out += {null!r}")
            self._code.end()
            self._code.block("else:")
        return variable

    def _end_null(self, nullable: bool) -> None:
        if nullable:
            self._flush()
            self._code.end()

    def _length(self, variable: str, code: str) -> None:
        """Emit the code that writes the length of a variable's value."""
        if not self._flexible:
            self._fixed(code, f"len({variable})")
            return
        self._flush()
        length = self._code.variable("length")
        self._code.line(f"{length} = len({variable}) + 1")
        self._code.line(f"if {length} < 128: out.append({length})")
        self._code.line(f"else: out += uvarint_bytes({length})")

    def _null_length(self, code: str) -> bytes:
        return b"\0" if self._flexible else b"\xff" * (2 if code == "h" else 4)

    def _sized(self, primitive: Primitive, value: str, nullable: bool) -> None:
        """Emit the code that writes a string or bytes."""
        code = "h" if primitive.name == "string" else "i"
        variable = self._null(value, nullable, self._null_length(code))
        if primitive.name == "string":
            self._code.line(f"{variable} = {variable}.encode()")
        self._length(variable, code)
        self._flush()
        self._code.line(f"out += {variable}")
        self._end_null(nullable)

    def _array(self, of: Array, value: str, nullable: bool) -> None:
        variable = self._null(value, nullable, self._null_length("i"))
        element = of.element
        if isinstance(element, Primitive) and element.code and element.name != "uuid":
            self._flush()
            pack = f"pack_{element.name}s"
            if pack not in self._code.names:
                self._code.names[pack] = array_packer(element.code, "B" if self._flexible else "i")
            self._code.line(f"out += {pack}({variable})")
        else:
            self._length(variable, "i")
            self._flush()
            each = self._code.variable("each")
            self._code.block(f"for {each} in {variable}:")
            self._value(element, each, nullable=False)
            self._flush()
            self._code.end()
        self._end_null(nullable)

    def _tagged_fields(self, fields: list[Field], value: str) -> None:
        """Emit the code that writes a struct's tagged fields whose values are not the default."""
        if not fields:
            self._codes += "x"
            return
        self._flush()
        tags = self._code.variable("tags")
        self._code.line(f"{tags} = []")
        for field in sorted(fields, key=lambda field: field.tag or 0):
            variable = self._code.variable(field.name)
            self._code.line(f"{variable} = {value}.{field.name}")
            default = self._code.constant(field.default)
            test = f"{variable} is not {default} and " if default.startswith("constant") or default == "None" else ""
            self._code.block(f"if {test}{variable} != {default}:")
            outer = self._code.variable("outer")
            self._code.line(f"{outer} = out; out = bytearray()")
            self._value(field.type, variable, nullable=self._version in field.nullable)
            self._flush()
            self._code.line(f"{tags}.append(({field.tag}, out)); out = {outer}")
            self._code.end()
        self._code.line(f"if {tags}: write_tags(out, {tags})")
        self._code.line("else: out.append(0)")
