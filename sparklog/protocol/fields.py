"""What all messages of the wire are made of: their base, bounded lists, bounded names.

Every list and every mapping in a message has a bound, declared here and enforced when a message is decoded. A test goes
through all message types and fails for one without a bound.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

#: Partitions that one request of a client may name. To decode them, to deal with each and to encode the results takes
#: the broker's only thread some 30 ms. Kafka's controllers refuse more in one request, too.
MAX_ENTRIES = 10_000
#: Entries that a client puts into one request: as many fit into a header however long the topics' names are.
IN_ONE_REQUEST = 5_000
_T = TypeVar("_T")
Entries = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
#: Names or numbers, which take some nanoseconds each.
MAX_PLAIN = 100_000
Plain = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_PLAIN)]
#: Entries of a request that brokers send as well. Where a client sends it, its handler checks ``MAX_ENTRIES``.
MAX_PEER_ENTRIES = 100_000
PeerEntries = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_PEER_ENTRIES)]
#: Columns of one topic, and schemas that it has had: more do not fit into the largest schema or the topic's record.
MAX_COLUMNS = 10_000
Columns = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_COLUMNS)]
#: Settings of one topic that one message names.
MAX_SETTINGS = 1000
#: Entries of a list that grows with the cluster and that only a broker or a controller sends. Every such list is also
#: bounded by the largest frame; this bound keeps one list of very small entries from taking gigabytes.
MAX_LISTED = 10_000_000
Listed = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_LISTED)]
Settings = Annotated[dict[str, str], msgspec.Meta(max_length=MAX_SETTINGS)]
#: Names that are kept or compared as long as a connection lives.
Name = Annotated[str, msgspec.Meta(max_length=255)]
#: A nonce or a proof of the handshake.
Token = Annotated[bytes, msgspec.Meta(max_length=64)]
KeyIds = Annotated[tuple[Name, ...], msgspec.Meta(max_length=4)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base: ``cid`` correlates a reply with its request on one connection."""

    cid: int


class PartitionResult(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    code: int
    detail: str = ""
