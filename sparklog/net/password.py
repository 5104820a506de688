"""Secrets in the settings of clients, and references to secrets in other places.

A value may contain references:

- ``${env:NAME}`` is the value of an environment variable.
- ``${file:/path}`` is the text of a file without its last line break.
- ``${file:/path:key}`` is the value of ``key`` in a file with ``key = value`` lines.

Source: Kafka's configuration providers (KIP-297, KIP-421).
"""

from __future__ import annotations

import hmac
import os
import re
from pathlib import Path
from typing import Any

from sparklog.errors import ConfigError

_REFERENCE = re.compile(r"\$\{(?P<provider>env|file):(?P<name>[^}]*)\}")
_UNKNOWN_REFERENCE = re.compile(r"\$\{[a-z]+:")
_MAX_FILE_BYTES = 64 * 1024
_MASK = "***"


class Password:
    """A secret that output never shows: ``repr``, ``str`` and ``format`` return a mask.

    The text of the secret may contain references such as ``${env:NAME}``. ``reveal`` resolves them at each call, so a
    changed file takes effect. If the whole text is one reference, ``repr`` shows the reference. A secret without
    references can be pickled only if it is ``transferable``, as the secret of a delegation token is.
    """

    __slots__ = ("_text", "_transferable")

    def __init__(self, text: str = "", *, transferable: bool = False) -> None:
        self._text = text
        self._transferable = transferable

    @property
    def is_reference(self) -> bool:
        """Return whether the text consists of exactly one reference and nothing else."""
        return _REFERENCE.fullmatch(self._text) is not None

    def reveal(self) -> str:
        """Return the secret, with its references resolved.

        Raises ConfigError, which does not quote the secret, if a reference cannot be resolved.
        """
        return resolve(self._text)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return f"Password({self._text if self.is_reference else _MASK})"

    def __str__(self) -> str:
        return _MASK

    def __format__(self, spec: str) -> str:
        return _MASK

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Password) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((Password, self._text))

    def __copy__(self) -> Password:
        return self

    def __deepcopy__(self, memo: Any) -> Password:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._transferable or self.is_reference or not self._text:
            return _password, (self._text, self._transferable)
        raise TypeError("a password is not pickled: use a reference such as ${file:/path}")


def _password(text: str, transferable: bool) -> Password:
    return Password(text, transferable=transferable)


NO_PASSWORD = Password()


def resolve(text: str) -> str:
    """Replace each reference in ``text``, such as ``${env:NAME}``, with its value. Return the result.

    Raises:
        ConfigError: the variable, file or key of a reference does not exist, or its kind is unknown.
    """
    if "${" not in text:
        return text
    rest = _REFERENCE.sub("", text)
    if _UNKNOWN_REFERENCE.search(rest):
        raise ConfigError("a reference of an unknown kind: expected ${env:NAME} or ${file:/path}")
    return _REFERENCE.sub(lambda found: _value(found["provider"], found["name"]), text)


def _value(provider: str, name: str) -> str:
    if provider == "env":
        value = os.environ.get(name)
        if value is None:
            raise ConfigError(f"${{env:{name}}}: this environment variable is not set")
        return value
    if ":" not in name or Path(name).exists():
        return read_text(name).rstrip("\r\n")
    path, _, key = name.rpartition(":")
    settings = parse_properties(read_text(path), path)
    if key not in settings:
        raise ConfigError(f"${{file:{name}}}: the file has no setting of this name")
    return settings[key]


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a small file in UTF-8. Raises ConfigError if the file cannot be read or is too large."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: {error.strerror or error}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{os.fspath(path)}: a file of at most {_MAX_FILE_BYTES} bytes expected")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{os.fspath(path)}: text in UTF-8 expected") from None


def parse_properties(text: str, source: str) -> dict[str, str]:
    """Parse the settings in a text with ``key = value`` lines.

    A line that begins with ``#`` or ``!`` is a comment. A backslash at the end continues a line.

    Raises:
        ConfigError: a line has no ``=``. The error has only the line's number, because the line may contain a secret.
    """
    settings: dict[str, str] = {}
    pending = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not pending and (not stripped or stripped[0] in "#!"):
            continue
        if stripped.endswith("\\"):
            pending += stripped[:-1]
            continue
        entry, pending = pending + stripped, ""
        key, separator, value = entry.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"{source}: line {number}: expected key = value")
        settings[key.strip()] = value.strip()
    if pending:
        raise ConfigError(f"{source}: the last line ends with a backslash")
    return settings
