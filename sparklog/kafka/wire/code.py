"""A builder of Python source code for the compilers of message readers and writers."""

from __future__ import annotations

import struct
from typing import Any


class Code:
    """The source of one function, built line by line, and the objects that the function refers to.

    The compilers first collect consecutive fields of fixed size. One call of ``struct`` then handles all of them.
    """

    def __init__(self, signature: str, names: dict[str, Any]) -> None:
        self.names = names
        self._lines = [f"def {signature}:"]
        self._depth = 1
        self._last = 0

    def line(self, text: str) -> None:
        """Append a line at the current depth."""
        self._lines.append("    " * self._depth + text)

    def block(self, text: str) -> None:
        """Append a line that opens a block. Later lines belong to the block, until ``end``."""
        self.line(text)
        self._depth += 1

    def end(self) -> None:
        """End the current block, so that later lines belong to the enclosing block."""
        self._depth -= 1

    def variable(self, stem: str) -> str:
        """Return a new name that starts with ``stem``."""
        self._last += 1
        return f"{stem}_{self._last}"

    def constant(self, value: Any, stem: str = "constant") -> str:
        """Return an expression for ``value`` in the generated source.

        The expression is a literal or a new name. A new name refers to ``value`` in the compiled function.
        """
        if value is None or type(value) in {bool, int, str, bytes}:
            return repr(value)
        if isinstance(value, list) and not value:
            return "[]"
        name = self.variable(stem)
        self.names[name] = value
        return name

    def struct_method(self, method: str, codes: str) -> str:
        """Return the name of a bound method of the ``struct.Struct`` for big-endian ``codes``."""
        name = f"{method}_{codes.replace('?', 'z')}"
        self.names.setdefault(name, getattr(struct.Struct(f">{codes}"), method))
        return name

    def function(self) -> Any:
        """Compile the source and return the function."""
        source = "\n".join(self._lines)
        name = self._lines[0][len("def ") :].partition("(")[0]
        exec(compile(source, f"<{name}>", "exec"), self.names)
        made = self.names[name]
        made.source = source
        return made
