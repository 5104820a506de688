"""The maximum size of a request's header.

Decoding a header blocks the broker's only thread: 2 MB of the smallest possible entries take about 0.05 s. So the size
is limited. The requests of brokers and controllers grow with the cluster. They have higher limits if the sender has
proved its identity on this connection. The limit is checked before the header is decoded. So this module itself reads
the tag, the correlation id and the next field from the first bytes of the header.
"""

from __future__ import annotations

from typing import NamedTuple

from sparklog.protocol.messages import CONSUMER

MIB = 1024 * 1024
#: The limit for requests of clients: 5,000 partitions with the longest topic names.
MAX_HEADER_BYTES = 2 * MIB
#: The limit for a broker that has proved its identity: a fetch of 100,000 partitions with the longest topic names, the
#: markers of a transaction of thousands of producers, or the offsets of a committed transaction.
MAX_PEER_HEADER_BYTES = 32 * MIB
#: The limit for a follower's fetch without a proof, as in release 0.1.0. It is low, because any client can send one.
MAX_UNPROVEN_FETCH_BYTES = 4 * MIB
_OF_BROKERS = frozenset({"write_markers", "commit_offsets", "list_participants"})

#: The number of bytes before an array's elements, by the first byte. For a short array it is 1.
_ARRAY_BYTES = {0xDC: 3, 0xDD: 5}
#: The size and signedness of a MessagePack integer, by its first byte.
_INTEGERS = {
    0xCC: (1, False),
    0xCD: (2, False),
    0xCE: (4, False),
    0xCF: (8, False),
    0xD0: (1, True),
    0xD1: (2, True),
    0xD2: (4, True),
    0xD3: (8, True),
}


class Beginning(NamedTuple):
    """The first three elements of an encoded message: the tag, the correlation id and the next field.

    ``third`` is the field after the correlation id, or None if it is not an integer.
    """

    tag: str
    cid: int
    third: int | None


UNKNOWN = Beginning("", -1, None)


def header_limit(beginning: Beginning, max_frame_bytes: int, *, proved: bool) -> int:
    """Return the maximum header size, in bytes, of a request whose first elements are ``beginning``.

    ``proved`` means that the peer has proved that it is a broker or controller, or that the broker asks for no proof.
    """
    limit = MAX_HEADER_BYTES
    if beginning.tag == "fetch":
        if beginning.third not in {None, CONSUMER}:
            limit = MAX_PEER_HEADER_BYTES if proved else MAX_UNPROVEN_FETCH_BYTES
    elif proved and beginning.tag == "control_update":
        limit = max_frame_bytes
    elif proved and beginning.tag in _OF_BROKERS:
        limit = MAX_PEER_HEADER_BYTES
    return min(limit, max_frame_bytes)


def beginning_of(header: bytes | memoryview) -> Beginning:
    """Return the first elements of the message, or ``UNKNOWN`` if the bytes are not the beginning of a message."""
    first = bytes(header[:320])
    try:
        at = _ARRAY_BYTES.get(first[0], 1)
        length, at = (first[at] & 0x1F, at + 1) if first[at] != 0xD9 else (first[at + 1], at + 2)
        tag, at = first[at : at + length].decode(), at + length
        cid, at = _integer(first, at)
    except (IndexError, UnicodeDecodeError):
        return UNKNOWN
    if cid is None:
        return UNKNOWN
    try:
        third, _ = _integer(first, at)
    except IndexError:
        third = None
    return Beginning(tag, cid, third)


def _integer(source: bytes, at: int) -> tuple[int | None, int]:
    """Return the integer at this position and the position after it.

    Return None and the same position if the element is not an integer.
    """
    marker = source[at]
    if marker < 0x80:
        return marker, at + 1
    if marker >= 0xE0:
        return marker - 0x100, at + 1
    size, signed = _INTEGERS.get(marker, (0, False))
    if not size:
        return None, at
    return int.from_bytes(source[at + 1 : at + 1 + size], "big", signed=signed), at + 1 + size
