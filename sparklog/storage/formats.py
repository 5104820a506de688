"""The encoding of small state files: JSON with a field ``version``.

Every struct that is stored in such a file has this field. Its default is the version that this release writes.
``decode_state`` raises ``NewerFormatError`` for a file with a newer version.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from sparklog.errors import StorageError

T = TypeVar("T", bound=msgspec.Struct)


class NewerFormatError(StorageError):
    """The error for a file that a newer release wrote.

    The file must not be changed, and must not be treated as damaged.
    """


class _Versioned(msgspec.Struct, frozen=True):
    version: int


@cache
def _newest(kind: type[msgspec.Struct]) -> int:
    """Return the version that this release writes.

    The result is cached, because a starting broker reads thousands of files of one kind.
    """
    return int(next(field.default for field in msgspec.structs.fields(kind) if field.name == "version"))


def encode_state(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value)


def decode_state(content: bytes, kind: type[T], *, path: Path) -> T:
    """Decode the content of the file ``path``.

    Raises:
        NewerFormatError: the file's version is newer than this release's.
        StorageError: the file is damaged. The error message has the path.
    """
    newest = _newest(kind)
    try:
        found = msgspec.json.decode(content, type=_Versioned).version
        if found > newest:
            raise NewerFormatError(
                f"{path}: format version {found} found, at most {newest} expected: written by a newer release"
            )
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as failure:
        raise StorageError(f"{path}: damaged: {failure}") from failure
