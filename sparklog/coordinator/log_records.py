"""The encoding of a coordinator's records: keys and values are MessagePack arrays that start with a format version.

The last record of a key counts, and a null value deletes the key. The error for a record of a newer format names its
version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar, Union

import msgspec

from sparklog.errors import ClusterError

#: The key and value of a record in the internal topic. The value None deletes the key.
Record = tuple[bytes, bytes | None]


class Versioned(Protocol):
    @property
    def version(self) -> int: ...


_Key = TypeVar("_Key", bound=Versioned)
_Value = TypeVar("_Value", bound=Versioned)

_encode = msgspec.msgpack.Encoder().encode


class RecordCodec(Generic[_Key, _Value]):
    """The encoder and decoder of the records of one internal topic.

    ``kinds`` maps each key type, a tagged struct, to the struct type of its values. ``topic`` is the topic's name in
    errors. ``newest`` is the format version that the codec writes.
    """

    def __init__(self, topic: str, kinds: Mapping[type[Any], type[Any]], *, newest: int) -> None:
        self._topic = topic
        self._newest = newest
        self._key: Callable[[bytes], _Key] = msgspec.msgpack.Decoder(Union[tuple(kinds)]).decode  # noqa: UP007
        self._values: dict[type[Any], Callable[[bytes], _Value]] = {
            kind: msgspec.msgpack.Decoder(value).decode for kind, value in kinds.items()
        }

    def encode(self, key: _Key, value: _Value | None) -> Record:
        return _encode(key), None if value is None else _encode(value)

    def decode(self, record: Record) -> tuple[_Key, _Value | None]:
        """Return the key and the value of a record.

        Raises:
            ClusterError: the record has a newer format or an unknown kind.
        """
        key_bytes, value_bytes = record
        try:
            key = self._key(key_bytes)
            self._check_version(key)
            if value_bytes is None:
                return key, None
            value = self._values[type(key)](value_bytes)
            self._check_version(value)
            return key, value
        except msgspec.MsgspecError as error:
            detail = f"a record of the {self._topic}' topic cannot be read: {error}: {key_bytes[:80]!r}"
            raise ClusterError(detail) from None

    def _check_version(self, found: Versioned) -> None:
        if found.version > self._newest:
            raise ClusterError(
                f"a record of the {self._topic}' topic has format version {found.version}; this sparklog reads up to "
                f"{self._newest}: upgrade it"
            )
