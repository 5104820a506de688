"""The bytes that Kafka's consumers exchange in a classic group: subscriptions and assignments.

The coordinator of a classic group does not need to read these bytes: any client may use the group for another purpose
(Kafka Connect does). For groups of consumers, it reads them to describe the group and to know its topics. Bytes that
are not of this format are ignored.

A subscription is `version: i16, topics: [string], ...`; an assignment is `version: i16, [topic: string, partitions:
[i32]], ...`. Later versions add fields at the end. Source: Kafka, ConsumerProtocolSubscription and
ConsumerProtocolAssignment.
"""

from __future__ import annotations

import struct

from sparklog.protocol.fields import MAX_PLAIN

#: The maximum length of a topic name in the result of ``assigned_partitions``.
_MAX_NAME = 255
#: The protocol type of groups of consumers.
CONSUMER = "consumer"


def subscribed_topics(metadata: bytes) -> tuple[str, ...]:
    """Return the topics of a member's metadata, or no topics if the bytes are not a subscription."""
    try:
        reader = _Reader(metadata)
        return tuple(reader.string() for _ in range(reader.count(2)))
    except (ValueError, struct.error):
        return ()


def assigned_partitions(assignment: bytes) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the topics and partitions of a member's assignment, or nothing if the bytes are not an assignment.

    The result is also empty if a name or a list of partitions is too long for a reply about the group. No existing
    topic has such a name or so large a number of partitions.
    """
    try:
        reader = _Reader(assignment)
        found = tuple((reader.string(), reader.numbers()) for _ in range(reader.count(6)))
    except (ValueError, struct.error):
        return ()
    fits = all(len(topic) <= _MAX_NAME and len(numbers) <= MAX_PLAIN for topic, numbers in found)
    return found if fits else ()


class _Reader:
    """A reader of bytes of the consumer protocol. Raises ValueError or struct.error for other bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 2
        (version,) = struct.unpack_from(">h", data, 0)
        if version < 0:
            raise ValueError(version)

    def count(self, least: int) -> int:
        """Read the length of an array. Each entry of the array has at least ``least`` bytes.

        Raises ValueError if the length is negative, or if the remaining bytes have no room for this number of entries.
        Raises struct.error if no length is left.
        """
        (count,) = struct.unpack_from(">i", self._data, self._at)
        self._at += 4
        if not 0 <= count * least <= len(self._data) - self._at:
            raise ValueError(count)
        return int(count)

    def string(self) -> str:
        (length,) = struct.unpack_from(">h", self._data, self._at)
        start = self._at + 2
        self._at = start + length
        if length < 0 or self._at > len(self._data):
            raise ValueError(length)
        return self._data[start : self._at].decode()

    def numbers(self) -> tuple[int, ...]:
        count = self.count(4)
        found = struct.unpack_from(f">{count}i", self._data, self._at)
        self._at += 4 * count
        return found
