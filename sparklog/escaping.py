r"""Text that others chose, made safe to show on a terminal and in logs.

Names of groups, members, clients and hosts, error texts of peers and values of records can hold anything: codes that
move a terminal's cursor or set its title, line ends that forge a row of a table or a line of a log, marks that reverse
the direction of what follows. Every character that does not print, a space excepted, becomes its Python escape
(``\x1b``, ``\n``, ``\u202e``). A backslash stays as it is: what is shown is for people, and JSON output for programs.
"""

from __future__ import annotations


def escaped(text: str) -> str:
    """Return ``text`` as one line of printable characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def escaped_lines(text: str) -> str:
    """Return ``text`` with its line ends kept and everything else as ``escaped`` has it."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_json(text: str) -> str:
    """Return a JSON document that means the same as ``text``, of printable characters and line ends."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char == "\n" or char.isprintable() else _json_escape(char) for char in text)


def _json_escape(char: str) -> str:
    r"""Return ``\uXXXX`` for each UTF-16 code unit.

    In JSON, unprintable characters occur only in strings, except line ends and tabs between values, which
    ``escaped_json`` does not receive.
    """
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def shown_bytes(value: bytes) -> bytes:
    """Return ``value`` as ``escaped`` has it, with tabs kept. Bytes that are no UTF-8 become escapes as well."""
    text = value.decode(errors="backslashreplace")
    return "\t".join(map(escaped, text.split("\t"))).encode()
