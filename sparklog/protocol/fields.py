"""What all messages of the wire are made of: their base, bounded lists, bounded names."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

#: Topics or partitions one request may name. Each costs the broker some microseconds of its only thread, and a request
#: is dealt with in one go: a million of them would look like a broker that hangs. Refused before they are decoded.
MAX_ENTRIES = 100_000
_T = TypeVar("_T")
Entries = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
#: Names that are kept or compared as long as a connection lives.
Name = Annotated[str, msgspec.Meta(max_length=255)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base: ``cid`` correlates a reply with its request on one connection."""

    cid: int


class PartitionResult(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    code: int
    detail: str = ""
