"""The parts of all wire messages: their base class, bounded lists and bounded names.

Every list and every mapping in a message has a maximum length. It is declared here and enforced when a message is
decoded. A test fails if a field of a message has no maximum length.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

#: The maximum number of partitions in one request of a client. Decoding and processing them, and encoding the results,
#: takes about 30 ms of the broker's only thread. Kafka's controllers limit requests too.
MAX_ENTRIES = 10_000
#: The number of entries that a client puts into one request. They fit into a header even with the longest topic names.
IN_ONE_REQUEST = 5_000
_T = TypeVar("_T")
Entries = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_ENTRIES)]
#: The maximum length of a list of names or numbers, whose decoding takes a few nanoseconds each.
MAX_PLAIN = 100_000
Plain = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_PLAIN)]
#: The maximum number of entries of a request that both brokers and clients send. If a client sends it, the request's
#: handler checks ``MAX_ENTRIES``.
MAX_PEER_ENTRIES = 100_000
PeerEntries = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_PEER_ENTRIES)]
#: The maximum number of columns of one topic, and of its schemas. More would not fit into the largest schema or into
#: the topic's ZooKeeper node.
MAX_COLUMNS = 10_000
Columns = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_COLUMNS)]
#: The maximum number of settings of one topic in a message.
MAX_SETTINGS = 1000
#: The maximum number of entries of a list that grows with the cluster and that only a broker or a controller sends. The
#: maximum frame size also limits such a list. This limit is for very small entries, which would take gigabytes after
#: decoding.
MAX_LISTED = 10_000_000
Listed = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_LISTED)]
Settings = Annotated[dict[str, str], msgspec.Meta(max_length=MAX_SETTINGS)]
#: A short name, for example of a client or a group.
Name = Annotated[str, msgspec.Meta(max_length=255)]
#: A nonce or a proof in Hello, HelloReply or Prove.
Token = Annotated[bytes, msgspec.Meta(max_length=64)]
#: The maximum size of a signed ticket for local reads, in bytes, and the type of such a ticket.
MAX_TICKET_BYTES = 16 * 1024
SignedTicket = Annotated[bytes, msgspec.Meta(max_length=MAX_TICKET_BYTES)]
KeyIds = Annotated[tuple[Name, ...], msgspec.Meta(max_length=4)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base class of all messages. ``cid`` is the correlation id, which a reply copies from its request.

    The replies to clients have a field ``throttle_time_ms``. If the client has exceeded a quota, the broker handles the
    connection's next request only after this time.
    """

    cid: int


class PartitionResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a request for one of its partitions: an error code (0 for success) and a text."""

    topic: str
    partition: int
    code: int
    detail: str = ""
