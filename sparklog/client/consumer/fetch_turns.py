"""The selection and the order of the partitions in a fetch request.

This module is pure. The header of a request has a maximum size, so a request may not have room for all partitions. When
a response is full, it has no batches of the last partitions of the request. So each request begins with another
partition.
"""

from __future__ import annotations

from collections.abc import Collection

from sparklog.client.consumer.projection import ColumnsOf
from sparklog.model import TopicPartition
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.header_limits import MAX_HEADER_BYTES

#: The maximum size of a partition in a request, in bytes, without the names of its topic and columns.
_ENTRY_BYTES = 80
#: A group of at most this number of partitions always fits into one request, however long the topics' names are.
_FEW = 100


class FetchTurns:
    """A selector of the partitions in each fetch request, which gives each partition of a broker its turn.

    The selector has a counter for each broker. If all brokers shared one counter, and requests went to the brokers in
    turn, each request to the same broker might begin with the same partition.
    """

    def __init__(self, columns: ColumnsOf) -> None:
        self._columns = columns
        #: The next start by broker id: the index of the partition with which the next request to the broker begins.
        self._turns: dict[int, int] = {}

    def next(self, broker_id: int, group: list[TopicPartition]) -> list[TopicPartition]:
        """Return the partitions of ``group`` for the next request to the broker, up to the limit of a request.

        Each request begins with another partition.
        """
        count = len(group)
        named = min(count, self._most_at_once({tp.topic for tp in group})) if count > _FEW else count
        at = self._turns.get(broker_id, 0) % count
        self._turns[broker_id] = at + (named if named < count else 1)
        return (group[at:] + group[:at])[:named]

    def _most_at_once(self, topics: Collection[str]) -> int:
        """Return how many partitions of these topics fit into one request."""
        largest = max(
            len(topic) + sum(len(column.encode()) + 3 for column in self._columns(topic) or ()) for topic in topics
        )
        return max(1, min(MAX_ENTRIES, MAX_HEADER_BYTES // (_ENTRY_BYTES + largest)))
