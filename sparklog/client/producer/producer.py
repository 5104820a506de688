"""The producer: a client that writes single records or whole tables.

By default all in-sync replicas acknowledge a record. Until then the producer retries with the same sequence, so a retry
creates no duplicate. One thread of the producer does all I/O. ``send`` and ``write`` block only for the metadata of a
topic that they use for the first time, and while the buffer is full.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import functools
import operator
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from sparklog.client.cluster import forks
from sparklog.client.cluster.bootstrap import parse_bootstrap
from sparklog.client.cluster.quota_waits import QuotaWaits
from sparklog.client.consumer.group_session import GroupMetadata
from sparklog.client.errors import CommitOutcomeUnknown, ProducerClosed
from sparklog.client.producer.data_frames import readable_twice, to_table
from sparklog.client.producer.delivery import DeliveryHandle
from sparklog.client.producer.open_writes import OpenWrites
from sparklog.client.producer.partition_queues import ProducerIdentity
from sparklog.client.producer.partitioning import (
    ProducerTopic,
    check_partition,
    encode_parts,
    fit_to_topic,
    pieces,
    split_destinations,
)
from sparklog.client.producer.record_arguments import as_bytes, header_list, microseconds, typed_row
from sparklog.client.producer.results import RecordMetadata, WriteResult
from sparklog.client.producer.sender import Sender
from sparklog.client.producer.sender_settings import SenderSettings
from sparklog.client.producer.table_write import TableWrite
from sparklog.client.producer.transaction_api import ProducerTransactions, producer_run
from sparklog.client.producer.transaction_run import Joined
from sparklog.errors import BrokerError, ConfigError, ErrorCode, SparklogError
from sparklog.model import TopicPartition, check_topic_name
from sparklog.net.client_security import Security, client_security
from sparklog.protocol.messages import ACKS_ALL
from sparklog.record.codec import COMPRESSIONS

MIB = 1024 * 1024
#: The default batch sizes: of single records, and of tables. Each batch costs three brokers about a millisecond in
#: total, in addition to the cost of its bytes.
_BATCH_BYTES, _TABLE_BATCH_BYTES = MIB, 4 * MIB
#: The size of the buffer divided by this number limits a table's default batch, so that several batches are in flight.
#: The limit is at least ``_BATCH_BYTES``.
_BATCHES_IN_BUFFER = 16

#: The maximum time that a producer that was not closed flushes when the program ends.
_EXIT_FLUSH_S = 5.0


class ProducerLifetime:
    """The part of a producer that ends it: on ``close``, at the program's end, or when no code refers to the producer.

    This object does not refer to the producer, so Python can garbage-collect a producer that no code uses. Then the I/O
    thread sends the accepted records, and ends. The exit handlers of the interpreter refer to this object until the I/O
    thread has ended.
    """

    def __init__(self, sender: Sender, writes: OpenWrites) -> None:
        self.closed = False
        self.transactions: ProducerTransactions | None = None
        self._sender = sender
        self._writes = writes
        # A producer that was not closed still sends its records when the program ends.
        atexit.register(self.close_at_exit)
        sender.thread.on_end = self.unregister_exit

    def close(self, timeout_s: float | None) -> None:
        """Abort an open transaction, flush, and end the I/O thread. Raises the same errors as ``Producer.close``."""
        if self.closed:
            return
        self.closed = True
        try:
            self.finish(timeout_s)
        finally:
            self.stop()

    def finish(self, timeout_s: float | None) -> None:
        """Abort an open transaction and flush."""
        if self.transactions is not None:
            self.transactions.close()
        self._writes.flush(self._sender.buffer, timeout_s)

    def stop(self) -> None:
        self.unregister_exit()
        self._sender.thread.stop(ProducerClosed("the producer was closed before the record was acknowledged"))

    def close_at_exit(self) -> None:
        """Close the producer when the program ends. Python prints the error if records could not be sent."""
        self.close(_EXIT_FLUSH_S)

    def unregister_exit(self) -> None:
        atexit.unregister(self.close_at_exit)

    def retire(self) -> None:
        """Make the I/O thread end after it has sent all accepted records.

        Python calls this when it garbage-collects the producer, in any thread and at any point of that thread's code.
        So this method takes no lock and waits for nothing.
        """
        if not self.closed:
            self._sender.thread.retire()


class Producer:
    """A client that writes records. Threads may share it. Close it, or use it in a ``with`` block.

    >>> with Producer("localhost:9092") as producer:                                        # doctest: +SKIP
    ...     future = producer.send("events", b"hello", key=b"k")
    ...     producer.write("flights", table).result().record_count
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        *,
        acks: str | int = "all",
        linger_ms: float = 5.0,
        batch_bytes: int | None = None,
        compression: str | None = None,
        buffer_bytes: int = 64 * MIB,
        max_block_s: float = 60.0,
        request_timeout_s: float = 30.0,
        delivery_timeout_s: float = 120.0,
        idempotent: bool = True,
        transactional_id: str | None = None,
        transaction_timeout_s: float = 60.0,
        in_transaction: Joined | None = None,
        client_id: str = "sparklog-producer",
        metadata_max_age_ms: int = 60_000,
        security: Security = None,
    ) -> None:
        """Start the I/O thread. Connections open at the first request.

        Args:
            acks: ``"all"`` in-sync replicas, 1 for the leader alone, or 0 for none. With 0, the results have no offset
                and the producer does not detect losses. Unless ``acks`` is ``"all"``, retries may write duplicates.
            linger_ms: the maximum time that a record waits for more records while earlier ones are in flight. The
                actual wait is half of a round trip if that is less. Without records in flight, a record is sent at
                once.
            batch_bytes: the approximate size of a batch before compression. Default: 1 MiB for single records, 4 MiB
                for tables.
            compression: None, ``"lz4"`` or ``"zstd"``, inside Arrow.
            buffer_bytes: the maximum size of records that are accepted but not acknowledged. At this size ``send`` and
                ``write`` block.
            max_block_s: how long ``send`` and ``write`` block before they raise BufferFull, or ClientTimeout for
                metadata.
            request_timeout_s: how long the producer waits for a broker's response before it sends the batch again.
            delivery_timeout_s: a record that is not acknowledged within this time fails with ClientTimeout.
            idempotent: whether to number the batches, so that retries write no duplicates. Has no effect unless
                ``acks`` is ``"all"``.
            transactional_id: the name of the producer in transactions, which ``begin`` and ``commit`` need. A new
                producer with the same id fences the earlier one and aborts its open transaction.
            transaction_timeout_s: the coordinator aborts an open transaction if it gets no request of its producer for
                this time.
            in_transaction: the transaction of another process in which to write (the result of
                ``sink_transaction.join``). That process begins and ends it.
            metadata_max_age_ms: the maximum age of metadata. The producer finds new partitions and columns within this
                time, or at once when it writes to them.
            security: the settings for TLS and login, with Kafka's names, or the path of a file with them. None: the
                file that ``SPARKLOG_CLIENT_CONFIG`` names.

        Raises:
            ConfigError: an argument is invalid; the message has its name, its value and the expected values.
        """
        acks_code = {"all": ACKS_ALL, "-1": ACKS_ALL, "1": 1, "0": 0}.get(str(acks))
        if acks_code is None:
            raise ConfigError(f"acks={acks!r}: expected 'all', 1 or 0")
        if compression not in {None, "none", *COMPRESSIONS}:
            raise ConfigError(f"compression={compression!r}: expected None, {', '.join(map(repr, COMPRESSIONS))}")
        chunk_bytes = table_bytes = batch_bytes or _BATCH_BYTES
        if batch_bytes is None:
            table_bytes = min(_TABLE_BATCH_BYTES, max(_BATCH_BYTES, buffer_bytes // _BATCHES_IN_BUFFER))
        for name, value in {
            "batch_bytes": 1 if batch_bytes is None else batch_bytes,
            "buffer_bytes": buffer_bytes,
            "max_block_s": max_block_s,
            "request_timeout_s": request_timeout_s,
            "delivery_timeout_s": delivery_timeout_s,
            "metadata_max_age_ms": metadata_max_age_ms,
        }.items():
            if value <= 0:
                raise ConfigError(f"{name}={value!r}: expected more than 0")
        if linger_ms < 0:
            raise ConfigError(f"linger_ms={linger_ms!r}: expected 0 or more")
        run = in_transaction.run if in_transaction is not None else None
        if transactional_id is not None:
            if run is not None:
                raise ConfigError("transactional_id and in_transaction: expected one of them")
            run = producer_run(transactional_id, transaction_timeout_s)
        if run is not None and (acks_code != ACKS_ALL or not idempotent):
            raise ConfigError(f"acks={acks!r}, idempotent={idempotent!r}: transactions need acks='all' and True")
        self._compression = None if compression == "none" else compression
        self._table_batch_bytes = table_bytes
        self._max_block_s = max_block_s
        self._writes = OpenWrites()
        settings = SenderSettings(
            bootstrap=",".join(map(str, parse_bootstrap(bootstrap))),
            client_id=client_id,
            acks=acks_code,
            idempotent=idempotent and acks_code == ACKS_ALL,
            batch_bytes=chunk_bytes,
            linger_ms=linger_ms,
            buffer_bytes=buffer_bytes,
            max_block_s=max_block_s,
            compression=self._compression,
            request_timeout_s=request_timeout_s,
            delivery_timeout_s=delivery_timeout_s,
            max_request_bytes=max(8 * MIB, table_bytes),
            metadata_max_age_s=metadata_max_age_ms / 1000,
            transaction=run.key if run is not None else "",
            security=client_security(security),
        )
        self._transactions: ProducerTransactions | None = None
        self._sender = Sender(settings, self._writes)
        self._buffer = self._sender.buffer
        self._direct_sender = self._sender.direct_sender
        self._lifetime = ProducerLifetime(self._sender, self._writes)
        weakref.finalize(self, self._lifetime.retire).atexit = False
        forks.watch(self)
        if run is not None:
            self._transactions = ProducerTransactions(
                self._sender,
                run,
                settle=functools.partial(self._writes.settle, self._buffer),
                drop_failures=self._writes.drop_failures,
                timeout_s=max_block_s,
            )
            self._lifetime.transactions = self._transactions
            self._writes.on_error = self._transactions.failed
            if in_transaction is not None:
                self._transactions.join(ProducerIdentity(in_transaction.producer_id, in_transaction.producer_epoch))

    # --- writing ---

    def send(
        self,
        topic: str,
        value: bytes | str | Mapping[str, Any] | None = None,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]] | None = None,
        timestamp: dt.datetime | int | None = None,
        partition: int | None = None,
    ) -> Future[RecordMetadata]:
        """Accept one record. The returned future completes with the record's position when the record is acknowledged.

        Text is stored as UTF-8. ``timestamp`` is a datetime or microseconds since the epoch; the default is now.
        Without ``partition`` the producer hashes the key with Kafka's murmur2. Without a key, batches go to the
        partitions in turn.

        For a typed topic (a topic with its own columns), ``value`` is a mapping from the topic's column names to
        values, and ``key`` and ``headers`` must not be given. A value is stored exactly: numbers are not rounded or
        truncated, and text is not parsed. If a column cannot hold its value exactly, or a struct has an unknown field,
        the future fails with SCHEMA_MISMATCH, which names the column and the value. None, ``pandas.NA`` and ``NaT`` are
        null. A datetime without a time zone is UTC, also inside nested values.

        The I/O thread calls the callbacks of futures. A thread inside ``send`` or ``result`` may call them too, when it
        does the I/O itself. So a callback must not take a lock that a thread holds while it calls these methods.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION, SCHEMA_MISMATCH.
            BufferFull: the buffer had no room within ``max_block_s``.
            ClientTimeout: no broker returned the topic's metadata within ``max_block_s``.
            TypeError: a value, key, header, timestamp or partition has a wrong type.
            ValueError: a text is not valid Unicode (a lone surrogate), or a timestamp has more than 64 bits.
            ProducerClosed: after ``close``, or after an unexpected error in the I/O thread, which is the ``__cause__``.
                An interrupt (Ctrl-C) also ends the producer if it reaches a thread that does the producer's I/O. A
                thread that waits for a result may do this I/O.
            TransactionStateError: the producer is transactional and no transaction is open.
        """
        if self._transactions is not None:
            self._transactions.require_open()
        known = self._sender.topics.get(topic)
        if known is None:
            known = self._topic(topic)
        if partition is not None:
            if type(partition) is not int:
                partition = operator.index(partition)
            if not 0 <= partition < known.partition_count:
                known = self._newest(known)
                check_partition(known, partition)
        time_us = time.time_ns() // 1000 if timestamp is None else microseconds(timestamp)
        try:
            if not known.is_default:
                value, size = typed_row(known, value, key, headers)
            else:
                if type(value) is not bytes and value is not None and not (type(value) is str and value.isascii()):
                    value = as_bytes("value", value)
                if type(key) is not bytes and key is not None and not (type(key) is str and key.isascii()):
                    key = as_bytes("key", key)
                size = (len(value) if value is not None else 0) + (len(key) if key is not None else 0)
        except (BrokerError, TypeError) as error:
            # The topic may have a new column, or it was created again with columns of its own or without them.
            if isinstance(error, TypeError) and isinstance(value, Mapping) != known.is_default:
                raise
            if self._newest(known) is known:
                raise
            return self.send(topic, value, key=key, headers=headers, timestamp=timestamp, partition=partition)
        found = None
        if headers:
            found = header_list(headers)
            size += sum(len(header["key"] or "") + len(header["value"] or b"") for header in found)
        record = (key, value, found, time_us)
        if self._direct_sender is not None:
            future = self._direct_sender.try_send(known, partition, record, size)
            if future is not None:
                return future
        if size > known.max_message_bytes:  # the limit may have been raised
            known = self._newest(known)
        return self._buffer.append(known, partition, record=record, size=size)

    def write(self, topic: str, data: Any, *, partition: int | None = None) -> Future[WriteResult]:
        """Write a pyarrow, pandas or polars table, or any object that exports Arrow data.

        Columns are matched by name. A value is stored exactly, or an error names its column, row and value. A timestamp
        without a time zone is UTC.

        All rows go to ``partition`` if it is given. Otherwise an integer column ``_partition``, which is not stored,
        chooses the partition of each row. If there is no such column, the topic's key columns choose it, and without
        key columns the partitions take turns.

        The calling thread encodes the rows while earlier batches are in flight. The future completes when all rows are
        acknowledged. If it fails, some rows may be in the log.

        Raises:
            BrokerError: SCHEMA_MISMATCH (the message names the columns), UNKNOWN_TOPIC_OR_PARTITION,
                INVALID_TOPIC_EXCEPTION, MESSAGE_TOO_LARGE.
            BufferFull, ClientTimeout, ProducerClosed, TransactionStateError: for the same reasons as in ``send``.
            TypeError: ``data`` is not a table.
        """
        if self._transactions is not None:
            self._transactions.require_open()
        known = self._topic(topic)
        data = readable_twice(data)
        now_us = time.time_ns() // 1000
        try:
            table, destination = split_destinations(known, to_table(data, known.schema), partition)
            table = fit_to_topic(known, table, now_us)
        except BrokerError:  # the topic may have a new column or partition
            known = self._newest(known)
            table, destination = split_destinations(known, to_table(data, known.schema), partition)
            table = fit_to_topic(known, table, now_us)
        writing = TableWrite(topic)
        self._writes.opened(writing)
        try:
            for piece, where in pieces(known, table, destination, batch_bytes=self._table_batch_bytes):
                for part in encode_parts(
                    known,
                    piece,
                    where,
                    compression=self._compression,
                    batch_bytes=self._table_batch_bytes,
                    newest_limit=lambda: self._newest(known).max_message_bytes,
                ):
                    size = int(part.encoded.header.length)
                    self._buffer.reserve(size)
                    self._sender.submit(
                        known, part.partition, part.encoded, DeliveryHandle(writing, writing.add_batch(), size)
                    )
        except BaseException as error:
            writing.future.error_seen = True
            writing.seal(error)
            raise
        writing.seal()
        return writing.future

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all earlier records are acknowledged or have failed.

        Raises:
            SparklogError: the first failure since the last flush, except failures that a future has reported.
            ClientTimeout: the records are still in flight after ``timeout_s``. The producer continues to send them.
        """
        self._writes.flush(self._buffer, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, abort an open transaction, and end the I/O thread. Do nothing in a forked child.

        A producer that is not closed sends its accepted records when no code refers to it, or when the program ends.

        Raises:
            SparklogError, ClientTimeout: for the same reasons as in ``flush``. Records that are not acknowledged in
                time fail with ProducerClosed.
        """
        self._lifetime.close(timeout_s)

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The error of the ``with`` block matters more than the outcome of the remaining records. So they get only a
        # short time.
        if self._lifetime.closed:
            return
        self._lifetime.closed = True
        try:
            self._lifetime.finish(5.0)
        except Exception as second:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"sparklog producer while closing: {second}")
        finally:
            self._lifetime.stop()

    # --- transactions ---

    def begin(self) -> None:
        """Begin a transaction. Readers of committed records see all of its writes together after the commit, or never.

        Use a transaction from one thread: no other thread may write while it begins or ends.

        Raises:
            ProducerFenced: a later producer has this ``transactional_id``.
            TransactionStateError: a transaction is open already.
            ClientTimeout: the coordinator did not respond within ``max_block_s``.
        """
        self._transactional().begin()

    def commit(self) -> None:
        """Wait until all records of the transaction are acknowledged, and commit it.

        When this method returns, the commit is durable. Readers see the records once every partition has its commit
        marker, for which this method waits up to 30 s.

        Raises:
            TransactionStateError: a write failed, so the transaction must be aborted; or no transaction is open.
            ProducerFenced: the transaction was aborted.
            CommitOutcomeUnknown: the commit may have succeeded or not. Call ``commit`` again to learn the outcome.
            ProducerClosed: the producer had failed before, and sent no commit. The transaction will be aborted.
        """
        self._transactional().commit()

    def abort(self) -> None:
        """Abort the transaction: discard all its records, including records that were not sent yet.

        Raises:
            TransactionStateError: no transaction is open.
            ClientTimeout: the coordinator did not respond in time. The next ``begin`` or the transaction's timeout
                aborts the transaction.
        """
        self._transactional().abort()

    def send_offsets(self, offsets: Mapping[TopicPartition, int], *, group: str | GroupMetadata) -> None:
        """Commit the offsets at which a consumer group continues to read, as part of the transaction.

        For a group whose members share the partitions, pass ``consumer.group_metadata()``. Then no other member gets an
        offset of these partitions until the transaction has ended.

        Raises:
            CommitRefused: the member gave up a partition, or was removed. Abort the transaction.
            TransactionStateError: no transaction is open, or the open transaction can only be aborted.
            ProducerFenced, ClientTimeout: for the same reasons as in ``begin``.
        """
        self._transactional().send_offsets(offsets, group)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Producer]:
        """Begin a transaction for a ``with`` block. Commit it at the end, or abort it if the block raises.

        Raises the same errors as ``begin`` and ``commit``. A transaction that cannot be committed is aborted.
        """
        self.begin()
        try:
            yield self
        except BaseException as error:
            self._abort_for(error)
            raise
        try:
            self.commit()
        except CommitOutcomeUnknown:
            raise
        except BaseException as error:
            self._abort_for(error)
            raise

    def _abort_for(self, error: BaseException) -> None:
        """Abort the transaction after ``error``.

        Suppress errors of the abort, so that the caller sees ``error``.
        """
        try:
            self.abort()
        except SparklogError as second:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"sparklog producer while aborting: {second}")

    @property
    def quota_waits(self) -> QuotaWaits:
        """Return how often, and how long, brokers made this producer wait because it had exceeded a quota."""
        return self._sender.quota_waits

    def partitions(self, topic: str) -> int:
        """Return the number of partitions of a topic. Raises the same errors as ``send``."""
        return self._topic(topic).partition_count

    def topic_id(self, topic: str) -> str:
        """Return the id of the topic to which ``send`` and ``write`` write now. A recreated topic has another id.

        Raises the same errors as ``send``.
        """
        return self._topic(topic).topic_id

    # --- internal ---

    def _topic(self, name: str) -> ProducerTopic:
        if self._lifetime.closed:
            raise ProducerClosed("the producer is closed")
        if wrong := check_topic_name(name):
            raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, wrong)
        return self._sender.topic(name, self._max_block_s)

    def _newest(self, known: ProducerTopic) -> ProducerTopic:
        """Refresh the metadata of a topic, because a column or partition that is missing may have been added.

        Return the known metadata if no broker responds, or in a future's callback.
        """
        with contextlib.suppress(SparklogError):
            self._sender.refresh_topic(known.name)
        return self._sender.topics.get(known.name, known)

    def after_fork(self) -> None:
        """End all waits for futures, and unregister the exit handler. A forked child calls this method."""
        self._lifetime.unregister_exit()
        self._writes.after_fork()

    def _transactional(self) -> ProducerTransactions:
        if self._lifetime.closed:
            raise ProducerClosed("the producer is closed")
        if self._transactions is None:
            raise ConfigError("transactions: make the producer with transactional_id='...'")
        return self._transactions
