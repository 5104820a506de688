"""Writing to topics: record by record, or tables at once.

Records are acknowledged by all in-sync replicas by default, and sent again under the same sequence until they are, so a
retry is not a duplicate. One thread of the producer does all I/O; ``send`` and ``write`` block only for metadata of a
topic seen the first time and when the buffer is full.
"""

from __future__ import annotations

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
from sparklog.client.consumer.group_session import GroupMetadata
from sparklog.client.errors import CommitOutcomeUnknown, ProducerClosed
from sparklog.client.producer.data_frames import readable_twice, to_table
from sparklog.client.producer.delivery import DeliveryHandle
from sparklog.client.producer.futures import RecordMetadata, TableWrite, WriteResult
from sparklog.client.producer.open_writes import OpenWrites
from sparklog.client.producer.partition_queues import ProducerIdentity
from sparklog.client.producer.partitioning import (
    ProducerTopic,
    check_partition,
    encode_parts,
    fit_to_topic,
    pieces,
    take_destinations,
)
from sparklog.client.producer.producer_lifetime import ProducerLifetime
from sparklog.client.producer.record_arguments import as_bytes, microseconds, typed_row
from sparklog.client.producer.record_buffer import RecordBuffer, header_list
from sparklog.client.producer.sender import Sender
from sparklog.client.producer.sender_settings import SenderSettings
from sparklog.client.producer.transaction_api import ProducerTransactions, producer_run
from sparklog.client.producer.transaction_run import Joined
from sparklog.errors import BrokerError, ConfigError, ErrorCode, SparklogError
from sparklog.model import TopicPartition, check_topic_name
from sparklog.protocol.messages import ACKS_ALL
from sparklog.record.codec import COMPRESSIONS

MIB = 1024 * 1024
#: Of records handed over one by one, whose batches the I/O thread encodes; and of a table: what a batch costs three
#: brokers besides its bytes is a millisecond.
_BATCH_BYTES, _TABLE_BATCH_BYTES = MIB, 4 * MIB
#: Of the buffer, a default batch of a table takes no more than that: several are to be on their way.
_BATCHES_IN_BUFFER = 16


class Producer:
    """A client that writes. Safe to share between threads; close it, or use it in a ``with`` block.

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
    ) -> None:
        """Starts the I/O thread; connects when there is something to ask.

        Args:
            acks: ``"all"`` in-sync replicas, 1 for the leader alone, 0 for none: then futures tell no offset and
                losses go unseen. Only with ``"all"`` are retries free of duplicates.
            linger_ms: the longest time a record waits for company while earlier ones are on their way, which is half
                of a round trip where that is less; with nothing on its way it is sent at once.
            batch_bytes: about the size of a batch, before compression; by default 1 MiB of records handed over one by
                one, 4 MiB of a table.
            compression: None, ``"lz4"`` or ``"zstd"``, inside Arrow.
            buffer_bytes: what may be handed over and not yet acknowledged; then ``send`` and ``write`` block.
            max_block_s: how long they block before BufferFull, or ClientTimeout for a topic's metadata.
            request_timeout_s: how long one answer of a broker is waited for before the batch is sent again.
            delivery_timeout_s: after that a record that is not acknowledged fails with ClientTimeout.
            idempotent: number the batches, so that a retry is no duplicate; without effect unless acks is ``"all"``.
            transactional_id: write in transactions, see ``begin``. It names the writer from one life to the next: a
                producer that begins under an id fences the one before it, and aborts what that left open.
            transaction_timeout_s: an open transaction is aborted when its producer gave no sign of life for so long.
            in_transaction: write in a transaction that others began and will end (``sink_transaction.join``).
            metadata_max_age_ms: the producer learns of new partitions and columns within this time, or at once when it
                writes to them.

        Raises:
            ConfigError: names the argument, the value and what is expected.
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
            compression=self._compression,
            request_timeout_s=request_timeout_s,
            delivery_timeout_s=delivery_timeout_s,
            max_request_bytes=max(8 * MIB, table_bytes),
            metadata_max_age_s=metadata_max_age_ms / 1000,
            transaction=run.key if run is not None else "",
        )
        self._transactions: ProducerTransactions | None = None
        opened = self._writes.opened
        self._sender = Sender(
            settings,
            lambda attendant: RecordBuffer(
                batch_bytes=chunk_bytes,
                linger_ms=linger_ms,
                buffer_bytes=buffer_bytes,
                max_block_s=max_block_s,
                attendant=attendant,
                opened=opened,
            ),
            self._writes,
        )
        self._collector = self._sender.collector
        self._alone = self._sender.alone
        self._lifetime = ProducerLifetime(self._sender, self._writes)
        weakref.finalize(self, self._lifetime.retire).atexit = False
        forks.watch(self)
        if run is not None:
            self._transactions = ProducerTransactions(
                self._sender,
                run,
                settle=functools.partial(self._writes.settle, self._collector),
                forget=self._writes.forget_failures,
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
        """Hand one record over; the future tells where it is once it is acknowledged.

        Text is stored as UTF-8. ``timestamp`` is a datetime or microseconds since the epoch, by default now. For a
        typed topic ``value`` is a mapping of its columns, and key, headers and timestamp are among those. A value of
        such a mapping is stored exactly, or the future fails with SCHEMA_MISMATCH, which names its column and value:
        numbers are not rounded or cut, text is not parsed, a struct has no unknown field; None, ``pandas.NA`` and
        ``NaT`` are null. A datetime without a time zone is UTC, wherever it stands. Without
        ``partition`` the key decides, by Kafka's murmur2; without a key, batches take turns.

        Callbacks of futures are called by the I/O thread, or by a thread that is in ``send`` or ``result`` and acts for
        it: a lock that is held around these is not to be taken in a callback.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION, SCHEMA_MISMATCH.
            BufferFull: no room within ``max_block_s``.
            ClientTimeout: no metadata within ``max_block_s``.
            TypeError: a value, key, header, timestamp or partition of another type.
            ValueError: text that is no Unicode (a surrogate on its own), a timestamp of more than 64 bits.
            ProducerClosed: after ``close``, or after what the I/O thread did not foresee, which is its cause: also an
                interrupt that came while this thread did some of that one's work, as threads do that wait.
            TransactionStateError: a transactional producer, and no transaction is open.
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
        if not known.is_default:
            try:
                value, size = typed_row(known, value, key, headers)
            except BrokerError:  # it may have a new column
                known = self._newest(known)
                value, size = typed_row(known, value, key, headers)
        else:
            if type(value) is not bytes and value is not None and not (type(value) is str and value.isascii()):
                value = as_bytes("value", value)
            if type(key) is not bytes and key is not None and not (type(key) is str and key.isascii()):
                key = as_bytes("key", key)
            size = (len(value) if value is not None else 0) + (len(key) if key is not None else 0)
        found = None
        if headers:
            found = header_list(headers)
            size += sum(len(header["key"] or "") + len(header["value"] or b"") for header in found)
        record = (key, value, found, time_us)
        if self._alone is not None:
            future = self._alone.send(known, partition, record, size)
            if future is not None:
                return future
        return self._collector.append(known, partition, record=record, size=size)

    def write(self, topic: str, data: Any, *, partition: int | None = None) -> Future[WriteResult]:
        """Hand a table over: pyarrow ``Table`` or ``RecordBatch``, a pandas or polars frame, or what exports Arrow.

        Columns are found by name. A value is stored exactly, or the error names its column, row and value; a
        timestamp without a time zone is UTC. Rows go to ``partition``; else to what an
        integer column ``_partition`` says, which is not stored; else by the topic's key columns; else to the
        partitions in turn. Encoding is done here, in the caller's thread, while earlier batches are on their way. The
        future ends when all rows have; if it fails, some of them may be in the log.

        Raises:
            BrokerError: SCHEMA_MISMATCH (names the columns), UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION,
                MESSAGE_TOO_LARGE.
            BufferFull, ClientTimeout, ProducerClosed: as ``send``.
            TypeError: ``data`` is no table.
        """
        if self._transactions is not None:
            self._transactions.require_open()
        known = self._topic(topic)
        data = readable_twice(data)
        now_us = time.time_ns() // 1000
        try:
            table, destination = take_destinations(known, to_table(data, known.schema), partition)
            table = fit_to_topic(known, table, now_us)
        except BrokerError:  # it may have a new column or partition
            known = self._newest(known)
            table, destination = take_destinations(known, to_table(data, known.schema), partition)
            table = fit_to_topic(known, table, now_us)
        writing = TableWrite(topic)
        self._writes.opened(writing)
        try:
            for piece, where in pieces(known, table, destination, batch_bytes=self._table_batch_bytes):
                for part in encode_parts(
                    known, piece, where, compression=self._compression, batch_bytes=self._table_batch_bytes
                ):
                    size = int(part.encoded.header.length)
                    self._collector.reserve(size)
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
        """Wait until everything handed over before is acknowledged or has failed.

        Raises:
            SparklogError: the first failure since the last flush that no future has told anybody yet.
            ClientTimeout: not done in time; it goes on.
        """
        self._writes.flush(self._collector, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, and end the I/O thread. Abort an open transaction. Does nothing in a forked child.

        A producer that is not closed sends what it has accepted when no code refers to it any more, or when the program
        ends.

        Raises:
            SparklogError, ClientTimeout: as ``flush``. What did not end in time fails with ProducerClosed.
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
        # What led here matters more than what becomes of the rest, which is still given a moment.
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
        """Begin a transaction: what is written from now on becomes visible to readers of committed records together
        when it is committed, or never. A transaction is for one thread: none may write while it is begun or ended.

        Raises:
            ProducerFenced: a later producer has this ``transactional_id``.
            TransactionStateError: one is open already.
            ClientTimeout: the coordinator did not answer within ``max_block_s``.
        """
        self._transactional().begin()

    def commit(self) -> None:
        """Wait for all acknowledgements and commit. When it returns the decision is durable, and readers see it.

        Raises:
            TransactionStateError: something that was written failed: abort. Or no transaction is open.
            ProducerFenced: it was aborted.
            CommitOutcomeUnknown: it may be committed or not; ``commit`` may be called again to find out.
            ProducerClosed: the producer had failed before; nothing was asked, and it will be aborted.
        """
        self._transactional().commit()

    def abort(self) -> None:
        """Take back what the transaction has written. What was not sent yet is not sent.

        Raises:
            TransactionStateError: no transaction is open.
            ClientTimeout: the coordinator did not answer in time: the next ``begin`` aborts it, or its time-out.
        """
        self._transactional().abort()

    def send_offsets(self, offsets: Mapping[TopicPartition, int], *, group: str | GroupMetadata) -> None:
        """Let ``group`` stand at these offsets (of the next records to read) when the transaction commits. A group
        whose members share its partitions is given as ``consumer.group_metadata()``: then nobody else is given an
        offset of these partitions until the transaction has ended.

        Raises:
            CommitRefused: the member has given a partition up, or was removed: abort.
            TransactionStateError, ProducerFenced, ClientTimeout: as ``begin``.
        """
        self._transactional().send_offsets(offsets, group)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Producer]:
        """``with producer.transaction():`` begins, and commits at the end or aborts when the block raises. Raises as
        ``begin`` and ``commit``; what cannot be committed is aborted."""
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
        """Abort what ``error`` has spoilt; it is what the caller is to see."""
        try:
            self.abort()
        except SparklogError as second:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"sparklog producer while aborting: {second}")

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has. Raises as ``send``."""
        return self._topic(topic).partition_count

    def topic_id(self, topic: str) -> str:
        """Of the topic that what is written now goes to, as far as is known: one that is made anew has another. Raises
        as ``send``."""
        return self._topic(topic).topic_id

    # --- inside ---

    def _topic(self, name: str) -> ProducerTopic:
        if self._lifetime.closed:
            raise ProducerClosed("the producer is closed")
        if wrong := check_topic_name(name):
            raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, wrong)
        return self._sender.topic(name, self._max_block_s)

    def _newest(self, known: ProducerTopic) -> ProducerTopic:
        """Ask a broker for the topic before it is said that it lacks a column or a partition: it may have been changed
        since. Where no broker answers, and in a future's callback, what is known has to do."""
        with contextlib.suppress(SparklogError):
            self._sender.refresh_topic(known.name)
        return self._sender.topics.get(known.name, known)

    def after_fork(self) -> None:
        """Let waits for futures end in a forked child, and forget the exit handler."""
        self._lifetime.forget_exit()
        self._writes.after_fork()

    def _transactional(self) -> ProducerTransactions:
        if self._lifetime.closed:
            raise ProducerClosed("the producer is closed")
        if self._transactions is None:
            raise ConfigError("transactions: make the producer with transactional_id='...'")
        return self._transactions
