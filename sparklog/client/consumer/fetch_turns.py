"""The partitions that one fetch names, and their order. Pure.

A request's header has a maximum size, and a full response leaves out the partitions at the end.
"""

from __future__ import annotations

from collections.abc import Collection

from sparklog.client.consumer.projection import ColumnsOf
from sparklog.model import TopicPartition
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.header_limits import MAX_HEADER_BYTES

#: An upper bound of a partition's bytes in a request, without its topic and columns.
_ENTRY_BYTES = 80
#: A number of partitions that fit into one request whatever their topics' names.
_FEW = 100


class FetchTurns:
    """The turns of the partitions at each broker.

    If brokers shared one turn and were asked one after the other, each request to a broker could begin with the same
    partition.
    """

    def __init__(self, columns: ColumnsOf) -> None:
        self._columns = columns
        #: By broker, the place in its group of the partition with which its next request begins.
        self._turns: dict[int, int] = {}

    def next(self, broker_id: int, group: list[TopicPartition]) -> list[TopicPartition]:
        """Return the partitions of ``group`` for the broker's next request, as many as the request may have.

        Another partition is the first one each time.
        """
        count = len(group)
        named = min(count, self._most_at_once({tp.topic for tp in group})) if count > _FEW else count
        at = self._turns.get(broker_id, 0) % count
        self._turns[broker_id] = at + (named if named < count else 1)
        return (group[at:] + group[:at])[:named]

    def _most_at_once(self, topics: Collection[str]) -> int:
        """Return the number of partitions of these topics that one request may have."""
        largest = max(
            len(topic) + sum(len(column.encode()) + 3 for column in self._columns(topic) or ()) for topic in topics
        )
        return max(1, min(MAX_ENTRIES, MAX_HEADER_BYTES // (_ENTRY_BYTES + largest)))
