"""The start and end offsets of the assigned partitions, and the handling of positions outside of the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.offsets import OffsetQuery, list_offsets
from sparklog.client.consumer.fetch_buffer import FetchBuffer
from sparklog.client.consumer.fetcher import PartitionCursor
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition

OnOutOfRange = Literal["raise", "earliest", "latest"]


class LogEnds:
    """The end offsets. Owner: its ``Consumer``. ``cursors`` belong to the fetcher.

    Methods raise ClientTimeout if a leader does not respond.
    """

    def __init__(
        self,
        cluster: BlockingCluster,
        cursors: Mapping[TopicPartition, PartitionCursor],
        buffer: FetchBuffer,
        *,
        isolation: int,
        on_out_of_range: OnOutOfRange,
    ) -> None:
        self._cluster = cluster
        self._cursors = cursors
        self._buffer = buffer
        self._isolation = isolation
        self.on_out_of_range = on_out_of_range

    def visible(self) -> dict[TopicPartition, int]:
        """Return the offset of the next record that will become visible in each partition."""
        at: dict[TopicPartition, OffsetQuery] = dict.fromkeys(self._cursors, "latest")
        return list_offsets(self._cluster, at, isolation=self._isolation, known=self._buffer.positions())

    def to_read_to(self) -> dict[TopicPartition, int]:
        """Return the end offsets of the partitions, up to which a table is read.

        A position beyond the end is out of range; it does not mean that the partition has no new records.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE, unless ``on_out_of_range`` moves positions.
        """
        ends = self.visible()
        beyond = {tp: position for tp, position in self._buffer.positions().items() if position > ends[tp]}
        if beyond and self._isolation:
            # The records between belong to open transactions, and cannot be read yet.
            ends |= list_offsets(self._cluster, dict.fromkeys(beyond, "latest"))
            ends |= {tp: position for tp, position in beyond.items() if position <= ends[tp]}
        beyond = {tp: position for tp, position in beyond.items() if position > ends[tp]}
        if not beyond:
            return ends
        if self.on_out_of_range == "raise":
            tp, position = next(iter(beyond.items()))
            raise BrokerError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"{tp}: position {position} found; the log ends at {ends[tp]}"
            )
        self.bring_back()
        return ends

    def bring_back(self) -> None:
        """Move each position that is outside of its log to the configured end.

        An error names one partition, but several may be affected.
        """
        starts = list_offsets(self._cluster, dict.fromkeys(self._cursors, "earliest"), isolation=self._isolation)
        ends = self.visible()
        log_ends = list_offsets(self._cluster, dict.fromkeys(self._cursors, "latest"), known=self._buffer.positions())
        for tp, cursor in self._cursors.items():
            if not starts[tp] <= cursor.position <= log_ends[tp]:
                cursor.move((starts if self.on_out_of_range == "earliest" else ends)[tp])
