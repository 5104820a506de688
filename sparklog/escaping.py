r"""The escaping of text from other users and processes, so that it is safe on a terminal and in logs.

Names of groups, members, clients and hosts, error messages of peers and values of records can contain any characters.
Control codes can move a terminal's cursor or set its title. Line ends can forge a row of a table or a line of a log.
Other characters can reverse the direction of the text after them. Every unprintable character becomes its Python escape
(``\x1b``, ``\n``, ``\u202e``). A backslash stays unchanged, because the text is for people. Programs read JSON output
instead.
"""

from __future__ import annotations


def escaped(text: str) -> str:
    """Return ``text`` as one line of printable characters. Each other character is replaced by its Python escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def escaped_lines(text: str) -> str:
    """Return ``text`` with its line ends, and with the text between them escaped by ``escaped``."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_json(text: str) -> str:
    """Return an equivalent JSON document in which all characters except line ends are printable."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char == "\n" or char.isprintable() else _json_escape(char) for char in text)


def _json_escape(char: str) -> str:
    r"""Return the JSON escape of a character: ``\uXXXX`` for each UTF-16 code unit.

    Outside strings, JSON can have unprintable characters only as line ends and tabs between values. ``escaped_json``
    does not pass these.
    """
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def shown_bytes(value: bytes) -> bytes:
    """Return UTF-8 text with all unprintable characters escaped except tabs. Escape bytes that are not UTF-8, too."""
    text = value.decode(errors="backslashreplace")
    return "\t".join(map(escaped, text.split("\t"))).encode()
