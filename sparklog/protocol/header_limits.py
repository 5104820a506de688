"""The largest header that a request may have, told from the first bytes of the header.

Decoding holds the broker's only thread from the first byte of a header to its last, so the size of a header bounds how
long that takes: 2 MB of the smallest possible entries take some 0.05 s. What brokers and controllers send grows with
the cluster and has larger bounds, on connections that have proved to be theirs. The bound is checked before the header
is decoded, so the tag, the correlation id and the field after it are read here by hand.
"""

from __future__ import annotations

from typing import NamedTuple

from sparklog.protocol.messages import CONSUMER

MIB = 1024 * 1024
#: Of any request of a client: 5,000 partitions with the longest topic names.
MAX_HEADER_BYTES = 2 * MIB
#: Of what a broker sends that has proved itself: a fetch of 100,000 partitions with the longest topic names, the
#: markers of a transaction of thousands of producers, the offsets that one hands over.
MAX_PEER_HEADER_BYTES = 32 * MIB
#: Of a follower's fetch on a connection that has proved nothing, as those of release 0.1.0: any client can send it.
MAX_UNPROVEN_FETCH_BYTES = 4 * MIB
_OF_BROKERS = frozenset({"write_markers", "commit_offsets", "list_participants"})

#: Bytes of an array's marker, where it is not the one byte of a short array.
_ARRAY_BYTES = {0xDC: 3, 0xDD: 5}
#: Bytes and sign of an integer, by its marker.
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
    """The first elements of a message. ``third`` is the field after the correlation id, None if it is no integer."""

    tag: str
    cid: int
    third: int | None


UNKNOWN = Beginning("", -1, None)


def header_limit(beginning: Beginning, max_frame_bytes: int, *, proved: bool) -> int:
    """Return how many bytes the header of the request that begins so may have. ``proved``: the connection is of a
    broker or a controller, or there is no secret that it could prove."""
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
    """Return the first elements of the message, ``UNKNOWN`` for bytes that do not begin as a message does."""
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
    """Return the integer at this place, None for anything else, and where the next element begins."""
    marker = source[at]
    if marker < 0x80:
        return marker, at + 1
    if marker >= 0xE0:
        return marker - 0x100, at + 1
    size, signed = _INTEGERS.get(marker, (0, False))
    if not size:
        return None, at
    return int.from_bytes(source[at + 1 : at + 1 + size], "big", signed=signed), at + 1 + size
