"""The producer's sender: it decides which batches to send to which broker, and when.

One function, ``run_once``, examines all state and starts every action that is possible. ``run_once`` runs after a
caller submits work, after a response or a new connection, after a change of metadata, and when the earliest delay ends.
The function never waits. ``PartitionQueues`` decides about order, retries and sequences. ``InflightRequests`` owns the
requests in flight. ``ProducerThread`` runs all this code, or lends its event loop to a caller that runs the code.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.errors import ClientTimeout, ProducerClosed
from sparklog.client.producer.batch_revalidation import BatchRevalidation
from sparklog.client.producer.chunk_encoder import ChunkEncoder
from sparklog.client.producer.delivery import DeliveryHandle, DeliveryReports, delivery_handles
from sparklog.client.producer.direct_send import DirectSender
from sparklog.client.producer.inflight_requests import InflightRequests
from sparklog.client.producer.open_writes import OpenWrites
from sparklog.client.producer.partition_queues import PartitionQueues, ProducerBatch, ProducerIdentity
from sparklog.client.producer.partitioning import ProducerTopic
from sparklog.client.producer.producer_metadata import ProducerMetadata, TopicRequest
from sparklog.client.producer.producer_thread import ProducerThread
from sparklog.client.producer.record_buffer import RecordBuffer
from sparklog.client.producer.record_chunk import RecordChunk
from sparklog.client.producer.sender_settings import SenderSettings
from sparklog.client.producer.sender_transactions import SenderTransactions
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import InitProducerId, InitProducerIdReply
from sparklog.record.codec import EncodedBatch

T = TypeVar("T")

#: The precision of uvloop's timers. A timer with a delay below half of this time fires at once.
_TICK_MS = 1.0
#: The interval at which an unreferenced producer checks whether all accepted work has ended.
_RETIRE_POLL_S = 0.05


class Sender:
    """The sender of one producer, which owns its queues, its requests in flight and its I/O thread.

    Any thread may call ``submit``, ``topic``, ``call`` and ``refresh_topic``. Only the thread that runs the loop's
    callbacks may call the other methods, which ``SendLoop`` defines.
    """

    def __init__(self, settings: SenderSettings, writes: OpenWrites) -> None:
        """Start the thread.

        ``writes`` keeps each record until the record has an outcome, and fails all open writes when the thread ends.

        Raises:
            ConfigError: the bootstrap servers are not addresses.
        """
        self._settings = settings
        self._writes = writes
        self.thread = thread = ProducerThread(self)
        try:
            self._cluster = LoopCluster(
                settings.bootstrap,
                client_id=settings.client_id,
                changed=self.run_once,
                request_timeout_s=settings.request_timeout_s,
                loop=thread.loop,
                security=settings.security,
            )
        except BaseException:
            thread.loop.close()
            raise
        self._metadata = ProducerMetadata(self._cluster)
        self._queues = PartitionQueues(idempotent=settings.idempotent, transactional=bool(settings.transaction))
        self.buffer = RecordBuffer(
            batch_bytes=settings.batch_bytes,
            linger_ms=settings.linger_ms,
            buffer_bytes=settings.buffer_bytes,
            max_block_s=settings.max_block_s,
            io_thread=thread,
            opened=writes.opened,
        )
        self._encoder = ChunkEncoder(compression=settings.compression, batch_bytes=settings.batch_bytes)
        self._reports = DeliveryReports(self._cluster, self._queues, self.buffer, settings)
        self._revalidation = BatchRevalidation(self._metadata, self._queues, self._reports)
        self._requests = InflightRequests(self, self._cluster, self._reports, settings, loop=thread.loop)
        #: See ``SendLoop.only_connection``.
        self.only_connection = self._requests.only_connection
        self.quota_waits = self._requests.quota_waits
        self.transactions: SenderTransactions | None = None
        if settings.transaction:
            self.transactions = SenderTransactions(self, self._cluster, self._queues, settings)
        #: The fast path for single records. None if the settings exclude it, so that all records go through the buffer.
        self.direct_sender: DirectSender | None = None
        if settings.acks != 0 and settings.compression is None and not settings.transaction:
            self.direct_sender = DirectSender(
                self,
                thread,
                cluster=self._cluster,
                queues=self._queues,
                requests=self._requests,
                reports=self._reports,
                writes=writes,
            )
        self._incoming: deque[ProducerBatch] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._refreshed_ms = 0.0
        self._metadata_max_age_ms = settings.metadata_max_age_s * 1000
        self._requests_producer_id = False
        #: ``_runs`` counts the runs that found work. ``_runs_when_idle`` is its value when the producer was last found
        #: idle.
        self._runs = 0
        self._runs_when_idle = -1
        self._retiring = False
        thread.start()

    # --- from any thread ---

    @property
    def topics(self) -> Mapping[str, ProducerTopic]:
        """Return the topics with known metadata, by name."""
        return self._metadata.topics

    def submit(self, topic: ProducerTopic, partition: int, encoded: EncodedBatch, handle: DeliveryHandle) -> None:
        """Queue one encoded batch. The caller has reserved the batch's bytes in the buffer."""
        self._incoming.append(self._batch(topic, partition, encoded, handle))
        self.thread.wake()
        if self.thread.broken is not None:  # the I/O thread has ended
            self._fail_incoming(self.thread.closed_error)

    def topic(self, name: str, timeout_s: float) -> ProducerTopic:
        """Return a topic. Wait for its metadata if the producer does not know the topic yet.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION, SCHEMA_MISMATCH.
            ClientTimeout: no broker returned the metadata in time.
        """
        known = self._metadata.topics.get(name)
        if known is not None:
            return known
        request = TopicRequest.of(name, timeout_s)
        if self.thread.on_io_thread():
            raise ClientTimeout(f"metadata of topic {name!r} cannot be waited for in a future's callback")
        self.thread.hand_over(self._request_topic, request)
        return request.future.result()

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the I/O thread and wait for its result. Raises ProducerClosed if the thread ends first."""
        return self.thread.call(work, self._cluster.start)

    def refresh_topic(self, name: str) -> None:
        """Request the newest metadata of a topic once, and wait for it.

        Do nothing if a future's callback calls this method.

        Raises:
            BrokerError: no broker responded.
            ProducerClosed: the thread has ended, or ends before the response.
        """
        if self.thread.on_io_thread():
            return

        async def refresh() -> None:
            await self._cluster.refresh_once(name)

        self.call(refresh)

    @property
    def sequence_resets(self) -> int:
        return self._queues.sequence_resets

    # --- the loop ---

    def run_once(self) -> None:
        """Start every action that is possible now, and then deliver the outcomes."""
        self.thread.woken = False
        try:
            if self.thread.broken is None:
                self._start_actions()
        finally:
            # Last, because this thread waits afterwards. A caller that wakes up earlier would only wait for the
            # interpreter lock.
            self._reports.deliver_acknowledged()

    def _start_actions(self) -> None:
        try:
            if self._retiring:
                self._retire()
            if self._has_no_work():
                return
            self._runs += 1
            now = time.monotonic() * 1000
            while self._reports.retried:  # their topics may have changed since they were sent
                self._revalidation.revalidate(self._reports.retried.popleft())
            for topic in self._metadata.update():
                self._revalidation.revalidate_topic(topic)
            self._metadata.complete_requests(now)
            while self._incoming:
                batch = self._incoming.popleft()
                self._queues.add(batch)
                self._revalidation.revalidate(batch)
            if not self.buffer.empty:
                effective_linger_ms = self._requests.effective_linger_ms(now)
                for chunk in self.buffer.consume_due(now + _TICK_MS / 2, self._queues.topic_busy, effective_linger_ms):
                    self._encode_chunk(chunk)
            for name, error in self._metadata.unknown_topics(now):
                self._revalidation.fail_topic(name, error)
            for batch in self._queues.expire(now):
                self._reports.expired(batch)
            self._requests.end_deposed()
            if self.transactions is not None:
                self.transactions.run_once()
            self._send_all(now)
            self._request_missing(now)
            self._set_timer(now)
        except Exception as error:  # a bug here must not leave futures open forever
            self.thread.end(error)
            raise

    def _has_no_work(self) -> bool:
        """Return whether nothing is queued, in flight or awaited.

        This is the usual state after the response to a single record.
        """
        return (
            not self._queues.busy
            and self.buffer.empty
            and not self._incoming
            and not self._requests.in_flight
            and self._metadata.settled
            and self._timer is None
            and self.transactions is None
        )

    def is_idle(self) -> bool:
        """Return whether the producer is idle.

        The check is cheap if the producer was idle at the last call and ``run_once`` has found no work since then.

        A thread that adds work wakes the I/O thread. The buffer is checked too, because another thread may have added a
        record and not yet woken the I/O thread. No later record may overtake that record.
        """
        if self._runs != self._runs_when_idle or self.thread.woken or not self.buffer.empty:
            if not self._has_no_work():
                return False
            self._runs_when_idle = self._runs
        return True

    def may_send(self, now_ms: float) -> bool:
        """Return whether the producer is idle and no metadata refresh is due."""
        return (
            self.thread.broken is None and now_ms - self._refreshed_ms <= self._metadata_max_age_ms and self.is_idle()
        )

    def needs_loop(self) -> bool:
        """Return whether there is work that only a running loop can do."""
        return (
            self.thread.broken is not None
            or self.transactions is not None
            or self._timer is not None
            or bool(self._cluster.tasks or self._queues.sendable or self._cluster.needs_loop)
        )

    def is_current(self, topic: ProducerTopic) -> bool:
        """Return whether ``topic`` matches the newest metadata."""
        return self._metadata.settled and self._metadata.topics.get(topic.name) is topic

    def _send_all(self, now: float) -> None:
        self._queues.leaderless.clear()
        while self._queues.sendable:
            requests = self._queues.drain(
                now,
                self._destination,
                can_accept=self._requests.can_accept,
                max_request_bytes=self._settings.max_request_bytes,
            )
            if not requests:
                return
            for broker_id, batches in requests.items():
                self._requests.send(broker_id, batches)

    def _destination(self, tp: TopicPartition) -> int | None:
        """Return the broker for a partition's batches.

        In a transaction, return None until the coordinator has registered the partition.
        """
        if self.transactions is not None and not self.transactions.may_send(tp):
            return None
        leader = self._cluster.metadata.leader(tp)
        return leader.broker_id if leader else None

    # --- the end ---

    def begin_to_retire(self) -> None:
        """End the producer after all accepted work has ended."""
        self._retiring = True
        self.buffer.seal()
        self.run_once()

    def _retire(self) -> None:
        """End the producer if all work has ended, else check again soon.

        The timer is necessary because a direct send ends without a call of ``run_once``.
        """
        if self.transactions is not None or (self._has_no_work() and not self._writes.open):
            # The coordinator aborts an open transaction after its timeout.
            self.thread.end(ProducerClosed("no code refers to the producer any more"))
        else:
            self.thread.loop.call_later(_RETIRE_POLL_S, self.run_once)

    def fail_all(self, error: BaseException) -> None:
        """Fail all open work. The method is idempotent, because an interrupt may stop a call.

        The I/O thread repeats this call when the thread ends.
        """
        self._reports.deliver_acknowledged()
        for chunk in self.buffer.close(error):
            chunk.fail(error)
        self._fail_incoming(error)
        self._revalidation.fail_all(error)
        self._metadata.fail_all(error)
        self._writes.fail_all(error)

    async def disconnect(self) -> None:
        """Close the connections, and wait until they are closed."""
        self._cluster.close()
        await self._cluster.closed()

    def discard(self, error: BaseException) -> None:
        """Fail every record that is not acknowledged. A batch in flight may still reach the log."""
        for chunk in self.buffer.consume_due(math.inf, lambda _: False, 0.0):
            self.buffer.release(chunk.size)
            chunk.fail(error)
        self._fail_incoming(error)
        self._revalidation.discard_all(error)

    def _fail_incoming(self, error: BaseException) -> None:
        """Fail the submitted batches that the I/O thread has not queued.

        Other threads call this after the I/O thread has ended.
        """
        while True:
            try:
                batch = self._incoming.popleft()
            except IndexError:
                return
            self._reports.fail(batch, error)

    # --- chunks to batches ---

    def _batch(
        self, topic: ProducerTopic, partition: int, encoded: EncodedBatch, handle: DeliveryHandle
    ) -> ProducerBatch:
        return ProducerBatch(
            TopicPartition(topic.name, partition),
            encoded,
            topic_id=topic.topic_id,
            deadline_ms=time.monotonic() * 1000 + self._settings.delivery_timeout_s * 1000,
            handle=handle,
        )

    def _encode_chunk(self, chunk: RecordChunk) -> None:
        topic = self._metadata.topics.get(chunk.topic.name, chunk.topic)
        parts = self._encoder.parts(topic, chunk)
        if not parts:
            assert chunk.error is not None, "every record was refused"
            self.buffer.release(chunk.size)
            chunk.fail(chunk.error)
            return
        rows = [part.rows for part in parts]
        chunk.assign_batches(rows)
        for part, handle in zip(parts, delivery_handles(chunk, rows), strict=True):
            self._queues.add(self._batch(topic, part.partition, part.encoded, handle))

    # --- metadata and identity ---

    def _request_topic(self, request: TopicRequest) -> None:
        self._metadata.request(request)
        if self.thread.broken is not None:
            self._metadata.fail_all(self.thread.closed_error)
        self.run_once()

    def _request_missing(self, now: float) -> None:
        if self._queues.leaderless:
            self._cluster.request_metadata(self._queues.leaderless)
        elif self._metadata.topics and now - self._refreshed_ms > self._metadata_max_age_ms:
            self._refreshed_ms = now
            self._cluster.request_metadata(self._metadata.topics)
        if self._queues.identity_wanted and self.transactions is None:
            self._request_producer_id()

    def _request_producer_id(self) -> None:
        """Request a producer id without waiting. Idempotent while a request is in flight."""
        if not self._requests_producer_id:
            self._requests_producer_id = True
            self._cluster.start(self._ask_for_producer_id())

    async def _ask_for_producer_id(self) -> None:
        """Repeat the request until a broker returns a producer id, or no batch needs one.

        If the principal may not write to any topic, no broker returns one, so all waiting batches fail.
        """
        failures = 0
        while not self._queues.empty:
            try:
                reply = await self._cluster.ask_any(InitProducerId(0), InitProducerIdReply)
            except BrokerError as error:
                if error.code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
                    for topic in {tp.topic for tp in self._queues.busy_partitions()}:
                        self._revalidation.fail_topic(topic, error)
                    break
                self._cluster.last_problem = str(error)
                await asyncio.sleep(self._cluster.pause_s(failures))
                failures += 1
                continue
            self._queues.set_identity(ProducerIdentity(reply.producer_id, reply.producer_epoch))
            break
        self._requests_producer_id = False
        self.run_once()

    def _set_timer(self, now: float) -> None:
        quiet = self._timer is None and not self._queues.sendable
        if quiet and self.buffer.empty and self._metadata.settled:
            return
        times = self._metadata.next_times_ms(now)
        for at in (self._queues.next_time_ms(now), self.buffer.next_due_ms(self._requests.effective_linger_ms(now))):
            if at is not None:
                times.append(at)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if times:
            self._timer = self.thread.loop.call_later(max(_TICK_MS, min(times) - now) / 1000, self.run_once)
