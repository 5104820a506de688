"""The recognition of Kafka clients that connect to a port of sparklog's own protocol."""

from __future__ import annotations

import struct

from sparklog.protocol.frames import Buffer

#: The beginning of a request of Kafka's protocol: its length, its API key and its version, big-endian.
_BEGINNING = struct.Struct(">ihh")
BEGINNING_BYTES = _BEGINNING.size
#: The length of the shortest request: a header with a null client id.
_SHORTEST = 10
#: No API has a greater key or version, and no client begins with a longer request.
_MAX_KEY, _MAX_VERSION, _LONGEST = 100, 30, 2**24


def is_kafka_request(first: Buffer) -> bool:
    """Return whether the first bytes of a connection are those of a request of Kafka's protocol.

    Such bytes are never a valid frame of sparklog's own protocol, because the length of its frames is little-endian.
    """
    if len(first) < BEGINNING_BYTES:
        return False
    length, key, version = _BEGINNING.unpack_from(first)
    found: bool = _SHORTEST <= length <= _LONGEST and 0 <= key <= _MAX_KEY and 0 <= version <= _MAX_VERSION
    return found
