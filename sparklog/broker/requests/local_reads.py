"""Local reads: readers on the same host get file descriptors of a segment, and map the part that they may read.

If clients must log in or the broker has ACLs, a reader needs a ticket (``local_read_tickets``). Even with a ticket,
only processes of the broker's user may use the socket, because an open file shows the whole segment.

Only the leader or an in-sync follower gives out files. As in a consumer's fetch, readers may read up to the high
watermark or the last stable offset. A descriptor is still valid after the file was deleted. The log marks a segment
whose files were given out, and never truncates these files in place, so the pages that a reader has mapped stay valid.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.fetch_read import parted_from_consumer, require_readable
from sparklog.broker.requests.local_read_tickets import LocalReadTickets
from sparklog.broker.security.quota_manager import QuotaManager
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.net.descriptors import MAX_PACKET_BYTES, DescriptorServer
from sparklog.protocol.local_reads import FORMAT_VERSION, OpenedSegment, OpenSegment, decode_request, encode
from sparklog.protocol.messages import AbortedRange, FetchPartition

_log = logging.getLogger(__name__)

_SUFFIX = ".readers"


def readers_socket(control_socket: str) -> Path:
    """Return the path of the socket for readers on the same host.

    The socket is in the directory of ``control_socket``, which only this user may enter.
    """
    return Path(control_socket).with_suffix(_SUFFIX)


class LocalReads:
    """A server that gives file descriptors of segments to readers on the same host.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        partitions: Partitions,
        quotas: QuotaManager,
        tickets: LocalReadTickets,
        path: Path,
    ) -> None:
        self._context = context
        self._tickets = tickets
        self._quotas = quotas
        self._partitions = partitions
        self._path = path
        self._server: DescriptorServer | None = None

    @property
    def address(self) -> str:
        """Return the path of the socket for readers; empty if local reads are disabled or unavailable."""
        return str(self._path) if self._server is not None else ""

    def open(self) -> None:
        """Start the server if the settings enable local reads.

        An error is only logged, because all reads also work over TCP.
        """
        if not self._context.config.local_reads:
            return
        server = DescriptorServer(self._path, self._answer)
        try:
            server.open()
        except OSError as error:
            _log.warning("local reads are not available: %s", error)
            return
        self._server = server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _answer(self, packet: bytes) -> tuple[bytes, list[int]]:
        counters = self._context.counters
        try:
            reply, descriptors = self._open_segment(decode_request(packet))
        except BrokerError as error:
            counters["local.refused"] += 1
            return encode(self._reply(error.code, error.detail)), []
        except Exception as error:  # the event loop calls this function, so no caller would respond to the reader
            counters["requests.failed"] += 1
            _log.exception("a local read failed")
            return encode(self._reply(ErrorCode.UNKNOWN_SERVER_ERROR, f"{type(error).__name__}: {error}")), []
        payload = encode(reply)
        if len(payload) > MAX_PACKET_BYTES:
            for descriptor in descriptors:
                os.close(descriptor)
            counters["local.refused"] += 1
            detail = f"{len(reply.aborted)} aborted transactions are too many for one packet"
            return encode(self._reply(ErrorCode.FRAME_TOO_LARGE, detail)), []
        if descriptors:
            counters["local.segments"] += 1
            counters["local.batches"] += reply.batch_count
        return payload, descriptors

    def _open_segment(self, request: OpenSegment) -> tuple[OpenedSegment, list[int]]:
        topic_ids = self._tickets.check(request) if self._tickets.required else None
        if self._quotas.limits_consumers:  # the bytes that a reader maps cannot be counted
            raise BrokerError(ErrorCode.REPLICA_NOT_AVAILABLE, "consumers have quotas, so they must fetch")
        if request.isolation not in {0, 1}:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"isolation {request.isolation} found, expected 0 or 1")
        wanted = FetchPartition(
            request.topic,
            request.partition,
            request.topic_id,
            request.leader_epoch,
            request.offset,
            0,
            last_epoch=request.last_epoch,
        )
        partition, parted = require_readable(self._partitions, wanted)
        if topic_ids is not None and partition.topic_id not in topic_ids:
            detail = f"{partition.tp}: the ticket does not name topic id {partition.topic_id}"
            raise BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, detail)
        self._require_in_sync(partition)
        parted = parted or parted_from_consumer(partition, wanted, in_sync=True)
        if parted is not None:
            return self._reply(partition=partition, diverging=(parted.epoch, parted.end_offset)), []
        end = partition.replica.readable_end(request.isolation)
        try:
            found = partition.log.hand_out(request.offset, end_offset=end)
        except StorageError as error:
            raise partition.storage_failed(error) from error
        if found is None:
            return self._reply(partition=partition), []
        aborted: tuple[AbortedRange, ...] = ()
        if request.isolation == 1:
            ranges = partition.log.transactions.aborted_between(request.offset, found.next_offset)
            aborted = tuple(AbortedRange(*ended) for ended in ranges)
        reply = self._reply(
            partition=partition,
            batches=(found.first, found.last - found.first, found.data_bytes),
            aborted=aborted,
        )
        return reply, _opened(found.data_path, found.index_path)

    def _require_in_sync(self, partition: Partition) -> None:
        if partition.replica.is_leader:
            return
        known = self._context.cache.partition(partition.tp)
        # It is not enough to be in sync with an earlier leader: after an unclean election the log may have to be
        # truncated.
        current = known is not None and known.state.leader_epoch == partition.replica.leader_epoch
        if known is None or not current or self._context.broker_id not in known.state.isr:
            raise BrokerError(
                ErrorCode.REPLICA_NOT_AVAILABLE, f"{partition.tp}: broker {self._context.broker_id} is not in sync"
            )

    def _reply(
        self,
        code: ErrorCode = ErrorCode.NONE,
        detail: str = "",
        *,
        partition: Partition | None = None,
        batches: tuple[int, int, int] = (0, 0, 0),
        diverging: tuple[int, int] | None = None,
        aborted: tuple[AbortedRange, ...] = (),
    ) -> OpenedSegment:
        context = self._context
        marks = (-1, -1, -1, -1)
        if partition is not None:
            replica, log = partition.replica, partition.log
            marks = (replica.high_watermark, replica.readable_end(1), log.log_start_offset, log.log_end_offset)
        return OpenedSegment(
            FORMAT_VERSION,
            code,
            context.broker_id,
            context.incarnation,
            context.cluster_id,
            detail,
            *marks,
            *batches,
            diverging=diverging,
            aborted=aborted,
        )


def _opened(data_path: Path, index_path: Path) -> list[int]:
    """Open both files for reading and return their descriptors. If one fails, close the other and raise BrokerError."""
    try:
        data = os.open(data_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return [data, os.open(index_path, os.O_RDONLY | os.O_CLOEXEC)]
        except OSError:
            os.close(data)
            raise
    except OSError as error:
        raise BrokerError(ErrorCode.REPLICA_NOT_AVAILABLE, f"{error}") from None
