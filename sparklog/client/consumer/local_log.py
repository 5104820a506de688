"""The memory-mapped segment files of a partition, for a reader on the same host as an in-sync replica.

A broker on this host passes open file descriptors of the segment that contains an offset, and the limit up to which the
reader may read. If clients must log in or the broker has ACLs, the reader needs a ticket, which is the broker's signed
permission. The reader requests a ticket over its connection to the broker, and a new one before the ticket expires. The
files stay readable even if the broker ends: an open file survives its deletion, and committed batches are never
truncated in place. If all columns of a batch are read, its checksum is verified.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from typing import NamedTuple

from msgspec.structs import replace

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.metadata import Leader
from sparklog.client.consumer.fetched_batches import PartitionBytes
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.descriptors import DescriptorClient, boot_id, is_this_host
from sparklog.protocol.local_reads import FORMAT_VERSION, OpenedSegment, OpenSegment, decode_reply, encode
from sparklog.protocol.messages import FetchedPartition, HelloReply, LocalReadsReply, RequestLocalReads
from sparklog.record.header import HEADER_BYTES, BatchHeader, unpack_headers
from sparklog.record.projection import header_alone

_TIMEOUT_S = 5.0
#: The part of a ticket's lifetime after which the reader requests a new ticket.
_RENEW_PART = 0.5
#: The number of headers read from the index at a time.
_HEADERS_AT_ONCE = 1024


class _Source(NamedTuple):
    """A broker on this host that provides files: its hello, its socket for local reads, and the reader's ticket."""

    hello: HelloReply
    socket: str
    #: The ticket, or empty if the broker gives files to each process that may use its socket.
    ticket: bytes = b""
    #: The monotonic time from which the reader requests a new ticket.
    renew_at_s: float = math.inf


class _Segment:
    """One segment: its data file is mapped, and its index is open until ``close``."""

    def __init__(self, opened: OpenedSegment, data: int, index: int) -> None:
        """Map the data file. ``close`` closes the descriptor ``index``; the caller must close ``data``.

        Raises:
            OSError: the file cannot be mapped.
            ValueError: the file is too short.
        """
        self.opened = opened
        self._data = memoryview(mmap.mmap(data, opened.data_bytes, access=mmap.ACCESS_READ))
        self._index = index
        self._next = opened.first_batch
        #: The headers that were read from the index and not returned yet.
        self._headers: list[BatchHeader] = []

    @property
    def ended(self) -> bool:
        return not self._headers and self._next >= self.opened.first_batch + self.opened.batch_count

    def read(self, max_bytes: int, *, headers_only: bool) -> tuple[list[BatchHeader], memoryview]:
        """Return the next batches, at least one. Their bodies are views of the mapped file.

        Raises:
            BrokerError: CORRUPT_MESSAGE if the index is invalid, or does not fit the length of the data.
        """
        headers = self._headers or self._read_headers()
        if headers_only and not any(header.offset_array_length for header in headers):
            self._headers = []
            return [header_alone(header).header for header in headers], memoryview(b"")
        start = end = headers[0].position
        count = 0
        for header in headers:
            if count and end - start + header.stored_bytes > max_bytes:
                break
            if header.position != end or end + header.stored_bytes > len(self._data):
                raise BrokerError(
                    ErrorCode.CORRUPT_MESSAGE,
                    f"offset {header.base_offset}: {header.stored_bytes} bytes at position {header.position} found;"
                    f" expected position {end} and an end of at most {len(self._data)}",
                )
            end += header.stored_bytes
            count += 1
        self._headers = headers[count:]
        return headers[:count], self._data[start:end]

    def _read_headers(self) -> list[BatchHeader]:
        left = self.opened.first_batch + self.opened.batch_count - self._next
        count = min(left, _HEADERS_AT_ONCE)
        packed = os.pread(self._index, count * HEADER_BYTES, self._next * HEADER_BYTES)
        if len(packed) != count * HEADER_BYTES:
            raise BrokerError(
                ErrorCode.CORRUPT_MESSAGE, f"index: {len(packed)} bytes found; expected {count * HEADER_BYTES}"
            )
        self._next += count
        return unpack_headers(packed)

    def close(self) -> None:
        """Close the index. Returned batches keep the memory map alive."""
        os.close(self._index)


class LocalLog:
    """A reader of the segment files of one partition, which a broker on this host opens for it; see the module.

    Not thread-safe: use and close it only in the thread of its ``PartitionReader``.
    """

    def __init__(self, cluster: BlockingCluster, tp: TopicPartition, *, isolation: int, max_bytes: int) -> None:
        self._cluster = cluster
        self._tp = tp
        self._isolation = isolation
        self._max_bytes = max_bytes
        self._client: DescriptorClient | None = None
        self._source: _Source | None = None
        self._segment: _Segment | None = None
        self._position = -1

    def read(
        self, position: int, *, topic_id: str, leader: Leader, last_epoch: int, headers_only: bool
    ) -> PartitionBytes:
        """Return whole batches from ``position`` on.

        Return no batches if there is nothing to read yet, or if the log has diverged from the records that were read.

        Raises:
            BrokerError: the same error as for a fetch at ``position``; REPLICA_NOT_AVAILABLE if no in-sync replica on
                this host passes its files.
            OSError: the broker has ended, this process must not use its socket, or the files cannot be mapped.
        """
        segment = self._segment
        if segment is None or segment.ended or position != self._position:
            self._release_segment()
            opened, segment = self._open(
                OpenSegment(FORMAT_VERSION, *self._tp, topic_id, leader.epoch, last_epoch, position, self._isolation),
                leader,
            )
            if segment is None:
                return PartitionBytes(_answer(self._tp, opened), [], memoryview(b""))
            self._segment = segment
        headers, bodies = segment.read(self._max_bytes, headers_only=headers_only)
        self._position = headers[-1].next_offset
        return PartitionBytes(_answer(self._tp, segment.opened), headers, bodies, mapped=True)

    def close(self) -> None:
        self._release_segment()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _release_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _open(self, request: OpenSegment, leader: Leader) -> tuple[OpenedSegment, _Segment | None]:
        client, source = self._connected(leader)
        payload, descriptors = client.request(encode(replace(request, ticket=source.ticket)))
        try:
            opened = decode_reply(payload)
            self._check(opened, source, len(descriptors))
            if not descriptors:
                return opened, None
            data, index = descriptors
            try:
                segment = _Segment(opened, data, index)
            except ValueError as error:  # This is mmap's error for a file that is too short.
                raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"{self._tp}: {error}") from None
            descriptors.remove(index)
            return opened, segment
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _check(self, opened: OpenedSegment, source: _Source, descriptors: int) -> None:
        hello = source.hello
        found = (opened.cluster_id, opened.broker_id, opened.incarnation)
        if found != (hello.cluster_id, hello.broker_id, hello.incarnation):
            raise BrokerError(
                ErrorCode.REPLICA_NOT_AVAILABLE, f"{source.socket} is {found}; expected broker {hello.broker_id}"
            )
        if opened.code != ErrorCode.NONE:
            raise BrokerError(opened.code, opened.detail)
        if descriptors != (2 if opened.batch_count else 0):
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"{descriptors} descriptors found with {opened.batch_count} batches of {self._tp}",
            )

    def _connected(self, leader: Leader) -> tuple[DescriptorClient, _Source]:
        if self._client is None or self._source is None:
            self._source = self._find_broker(leader)
            self._client = DescriptorClient(self._source.socket, timeout_s=_TIMEOUT_S)
        elif time.monotonic() >= self._source.renew_at_s:
            self._source = self._with_ticket(self._source.hello)
        return self._client, self._source

    def _find_broker(self, leader: Leader) -> _Source:
        """Return the leader or an in-sync follower that is on this host and provides files."""
        partition = self._cluster.metadata.partition(self._tp)
        isr = partition.isr if partition is not None else ()
        refusal = ""
        for broker_id in dict.fromkeys((leader.broker_id, *isr)):
            endpoint = self._cluster.metadata.endpoint(broker_id)
            if endpoint is None or not is_this_host(endpoint.host):
                continue
            hello = self._cluster.connection(broker_id).hello
            # A broker that requires a ticket, or a login before it names its host's boot, names no socket.
            if hello.local_socket and hello.boot_id == boot_id():
                return _Source(hello, hello.local_socket)
            if not hello.local_socket and hello.boot_id in {"", boot_id()}:
                try:
                    return self._with_ticket(hello)
                except BrokerError as error:  # One is an older broker, which does not know the request.
                    refusal = f": broker {broker_id}: {error.detail}"
        detail = f"{self._tp}: no in-sync replica {list(isr)} provides files on this host{refusal}"
        raise BrokerError(ErrorCode.REPLICA_NOT_AVAILABLE, detail)

    def _with_ticket(self, hello: HelloReply) -> _Source:
        """Request a ticket for the topic. Raises BrokerError if the broker gives none to this process."""
        asked_s = time.monotonic()
        request = RequestLocalReads(0, (self._tp.topic,))
        reply = self._cluster.ask_broker(hello.broker_id, request, LocalReadsReply)
        if not reply.local_socket or reply.boot_id != boot_id():
            raise BrokerError(ErrorCode.REPLICA_NOT_AVAILABLE, "it has no socket for local reads on this host")
        renew_at_s = asked_s + reply.lifetime_ms / 1000 * _RENEW_PART
        return _Source(hello, reply.local_socket, reply.ticket, renew_at_s)


def _answer(tp: TopicPartition, opened: OpenedSegment) -> FetchedPartition:
    return FetchedPartition(
        tp.topic,
        tp.partition,
        opened.code,
        opened.high_watermark,
        opened.last_stable_offset,
        opened.log_start_offset,
        opened.log_end_offset,
        diverging=opened.diverging,
        aborted=opened.aborted,
    )
