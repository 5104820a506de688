r"""Escapes that make text from other users and processes safe to show on a terminal and in logs.

Names of groups, members, clients and hosts, error texts of peers and values of records can have any characters. Control
codes can move a terminal's cursor or set its title. Line ends can forge a row of a table or a line of a log. Other
marks can reverse the direction of the text after them. Every character that does not print, a space excepted, becomes
its Python escape (``\x1b``, ``\n``, ``\u202e``). A backslash stays unchanged, because this text is for people; programs
read JSON output.
"""

from __future__ import annotations


def escaped(text: str) -> str:
    """Return ``text`` as one line of printable characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def escaped_lines(text: str) -> str:
    """Return ``text`` with its line ends kept and each line escaped as by ``escaped``."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_json(text: str) -> str:
    """Return an equivalent JSON document of printable characters and line ends."""
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
    """Return ``value`` escaped as by ``escaped``, with tabs kept. Bytes that are not UTF-8 become escapes too."""
    text = value.decode(errors="backslashreplace")
    return "\t".join(map(escaped, text.split("\t"))).encode()
