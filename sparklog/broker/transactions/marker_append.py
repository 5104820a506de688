"""WriteMarkers requests: the partition's leader appends a control batch, and responds when the batch is committed.

If the producers have no open transaction in the partition, the leader still appends a marker, which then names no
transaction. Only the commit of this marker proves that no other broker leads the partition. A deposed leader that does
not know its successor yet may not have the transactions that are open in the successor's log. Source: Kafka's leaders
append each marker that they get.

The producers are fenced: their pending verifications fail, and the leader refuses their late batches without asking the
coordinator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.partition import Answer, Partition, PendingProduce
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.access import Access
from sparklog.broker.requests.slices import Slices, Steps, answer_failure
from sparklog.broker.transactions.coordinator_epochs import CoordinatorEpochs
from sparklog.broker.transactions.leader_transactions import LeaderTransactions
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    ACKS_ALL,
    PartitionResult,
    TransactionMarker,
    WriteMarkers,
    WriteMarkersReply,
)
from sparklog.record.marker import Marker, encode_marker

_log = logging.getLogger(__name__)

#: The maximum wait for the commit of a marker. After this time the coordinator sends the marker again.
_TIMEOUT_MS = 2000

OnResult = Callable[[PartitionResult], None]


class _Once:
    """A callback for a marker's result that is called at most once.

    An error in the callback is only logged, because the marker itself may be written.
    """

    def __init__(self, marker: TransactionMarker, on_result: OnResult) -> None:
        self._marker = marker
        self._on_result: OnResult | None = on_result

    def __call__(self, result: PartitionResult) -> None:
        on_result, self._on_result = self._on_result, None
        if on_result is None:
            return
        try:
            on_result(result)
        except Exception:
            _log.exception(
                "could not handle the response about a marker for %s-%d", self._marker.topic, self._marker.partition
            )


class MarkerAppend:
    """The writer of transaction markers to the partitions that this broker leads.

    Not thread-safe: use it only on the broker's event loop, and not inside a partition's step.
    """

    def __init__(
        self,
        context: BrokerContext,
        partitions: Partitions,
        *,
        epochs: CoordinatorEpochs,
        rules: LeaderTransactions,
    ) -> None:
        self._context = context
        self._partitions = partitions
        self._epochs = epochs
        self._rules = rules

    def write(self, marker: TransactionMarker, on_result: OnResult, *, proved: bool = True) -> None:
        """Write a marker, and call ``on_result`` once, now or later.

        ``on_result`` gets the code NONE when the marker is committed.

        ``proved`` is whether the sender of the marker has proved that it is a broker.
        """
        once = _Once(marker, on_result)
        try:
            if marker.coordinator >= 0 and not proved:
                self._epochs.check_announced(marker.coordinator, marker.coordinator_epoch)
            self._write(marker, once)
        except BrokerError as error:
            once(PartitionResult(marker.topic, marker.partition, error.code, error.detail))
        except Exception as error:
            # An error of one marker must not fail the other markers of the request.
            _log.exception("could not write a marker for %s-%d", marker.topic, marker.partition)
            detail = f"{type(error).__name__}: {error}"
            once(PartitionResult(marker.topic, marker.partition, ErrorCode.UNKNOWN_SERVER_ERROR, detail))

    def _write(self, marker: TransactionMarker, on_result: OnResult) -> None:
        """Write a marker. Raise BrokerError."""
        tp = TopicPartition(marker.topic, marker.partition)
        if marker.coordinator >= 0:
            self._epochs.record(marker.coordinator, marker.coordinator_epoch)
        if self._context.quiesced:
            raise BrokerError(
                ErrorCode.BROKER_STOPPING, f"broker {self._context.broker_id} is stopping and accepts no new writes"
            )
        partition = self._partitions.require(tp, marker.topic_id)
        partition.require_leader(-1)
        self._append(partition, self._rules.fence(partition.log, marker), on_result)

    def _append(self, partition: Partition, what: Marker, on_result: OnResult) -> None:
        tp, context = partition.tp, self._context
        header, body = encode_marker(what, partition.rules.schema, schema_id=partition.rules.schema_id)

        def ended(answer: Answer) -> None:
            context.counters["markers.written" if answer.code is ErrorCode.NONE else "markers.refused"] += 1
            on_result(PartitionResult(tp.topic, tp.partition, answer.code, answer.detail))

        pending = PendingProduce([(header, memoryview(body))], ended, own=True)
        partition.produce(pending, acks=ACKS_ALL, deadline_ms=context.now_ms() + _TIMEOUT_MS)


class MarkerRequests:
    """The handler of WriteMarkers requests, which write transaction markers to partitions that this broker leads."""

    def __init__(self, access: Access, slices: Slices, markers: MarkerAppend) -> None:
        self._access = access
        self._slices = slices
        self._markers = markers

    def handle(self, connection: ServerConnection, request: WriteMarkers, body: memoryview) -> None:
        results: list[PartitionResult | None] = [None] * len(request.markers)
        missing = len(results)

        def answer(number: int, result: PartitionResult) -> None:
            nonlocal missing
            results[number] = result
            missing -= 1
            if missing == 0:
                connection.reply(WriteMarkersReply(request.cid, tuple(found for found in results if found)))

        if not request.markers:
            connection.reply(WriteMarkersReply(request.cid, ()))
        proved = self._access.proves_broker(connection)

        def steps() -> Steps:
            for number, marker in enumerate(request.markers):
                if self._slices.over():
                    yield None
                self._markers.write(
                    marker,
                    lambda result, number=number: answer(number, result),  # type: ignore[misc]
                    proved=proved,
                )

        self._slices.run(connection, steps(), lambda error: answer_failure(connection, request, error))
