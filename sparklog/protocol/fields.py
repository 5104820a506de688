"""The parts of all wire messages: their base, bounded lists and bounded names.

Every list and every mapping in a message has a bound, declared here and enforced when a message is decoded. A test
checks all message types and fails for one without a bound.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

#: The maximum number of partitions in one request of a client. To decode them, to process each and to encode the
#: results takes about 30 ms of the broker's only thread. Kafka's controllers limit one request, too.
MAX_ENTRIES = 10_000
#: The number of entries that a client puts into one request: they fit into a header with topic names of any length.
IN_ONE_REQUEST = 5_000
_T = TypeVar("_T")
Entries = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
#: The maximum number of names or numbers, which take a few nanoseconds each.
MAX_PLAIN = 100_000
Plain = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_PLAIN)]
#: The maximum number of entries of a request that brokers send as well. If a client sends it, the handler checks
#: ``MAX_ENTRIES``.
MAX_PEER_ENTRIES = 100_000
PeerEntries = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_PEER_ENTRIES)]
#: The maximum number of columns of one topic, and of its schemas so far: more do not fit into the largest schema or the
#: topic's record.
MAX_COLUMNS = 10_000
Columns = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_COLUMNS)]
#: The maximum number of settings of one topic in a message.
MAX_SETTINGS = 1000
#: The maximum number of entries of a list that grows with the cluster and that only a broker or a controller sends. The
#: largest frame also bounds every such list; this bound keeps one list of very small entries from taking gigabytes.
MAX_LISTED = 10_000_000
Listed = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_LISTED)]
Settings = Annotated[dict[str, str], msgspec.Meta(max_length=MAX_SETTINGS)]
#: Names that are kept or compared during the whole life of a connection.
Name = Annotated[str, msgspec.Meta(max_length=255)]
#: A nonce or a proof of the handshake.
Token = Annotated[bytes, msgspec.Meta(max_length=64)]
KeyIds = Annotated[tuple[Name, ...], msgspec.Meta(max_length=4)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages. ``cid`` matches a reply to its request on one connection."""

    cid: int


class PartitionResult(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    code: int
    detail: str = ""
