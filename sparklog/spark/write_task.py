"""One attempt of one task of a write: it sends its rows with its own producer and waits for all acknowledgements.

``writer`` loads this module only in tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pyarrow as pa

from sparklog.client.producer.producer import Producer
from sparklog.client.producer.transaction_run import Joined
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition
from sparklog.spark.coalesce_batches import gathered
from sparklog.spark.gc_freeze import freeze_worker
from sparklog.spark.options import CLIENT_ID
from sparklog.spark.route import TopicRoute, rows_by_value
from sparklog.spark.sink import SinkRun, WrittenRows, is_known, join_run
from sparklog.spark.token_renewal import renewing

if TYPE_CHECKING:
    from sparklog.client.producer.results import WriteResult
    from sparklog.spark.write_plan import WritePlan

#: Spark splits a task's rows into batches of at most 10,000. This number of bytes is encoded together, and stored as
#: one batch per partition, because each batch takes three brokers a millisecond in addition to the time for its bytes.
_BATCH_BYTES = 4 * 1024 * 1024
#: The bytes that are enough not to wait for more rows. They are fewer, because Spark's own batches of that size vary
#: slightly.
_ENOUGH_BYTES = _BATCH_BYTES * 7 // 8
#: The maximum wait of a batch for its acknowledgement. It is long enough for several elections.
_DELIVERY_TIMEOUT_S = 120.0


def write_rows(plan: WritePlan, run: SinkRun | None, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
    """Write the rows of one attempt of one task; return the result for the driver.

    Raises:
        BrokerError: an error persists after retries, such as ProducerFenced.
        ClientTimeout: no coordinator responded.
    """
    with renewing(plan.options.bootstrap, plan.options.security, plan.renewal):
        written = _written(plan, run, batches)
    freeze_worker()
    return written


def _written(plan: WritePlan, run: SinkRun | None, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
    joined = None
    if run is not None:
        options = plan.options
        joined = join_run(options.bootstrap, run, timeout_s=options.timeout_s, security=options.security)
        if joined is None:
            return WrittenRows(_count(batches), (), run)
    with _producer(plan, joined) as producer:  # From here on it keeps the transaction alive.
        if run is not None and run.topic_id and _is_known(plan, run, run.topic_id):
            return WrittenRows(_count(batches), (), run)
        destinations = _Destinations(plan, run)
        appender = _Appender(producer, named=plan.options.named is not None)
        known_rows = 0
        for rows in gathered(batches, _ENOUGH_BYTES):
            for topic, part in _by_topic(plan, rows):
                route = destinations.route(topic)
                if topic in destinations.known:
                    known_rows += part.num_rows
                else:
                    appender.add(route, part)
        appended, ranges = appender.finish()
    if run is None or joined is None:
        return WrittenRows(appended, ranges)
    return WrittenRows(appended, ranges, run, joined.producer_id, destinations.topic_ids(), known_rows)


def _is_known(plan: WritePlan, run: SinkRun, topic_id: str) -> bool:
    return is_known(plan.options.bootstrap, run, topic_id, security=plan.options.security)


def _count(batches: Iterator[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


class _Destinations:
    """The routes to the topics that the rows of one attempt of one task name."""

    def __init__(self, plan: WritePlan, run: SinkRun | None) -> None:
        self._plan = plan
        self._run = run
        self._routes = dict(plan.routes)
        #: The topics that already have this version of a named write (txnAppId, txnVersion).
        self.known: set[str] = set()

    def route(self, topic: str) -> TopicRoute:
        """Return the route of a topic. The topic is looked up or created on first use.

        Rows of topics in ``known`` are not written.
        """
        found = self._routes.get(topic)
        if found is None:
            from sparklog.spark.topic_resolution import (
                look_up_route,  # A write to one topic has its route from planning.
            )

            options = self._plan.options
            found = self._routes[topic] = look_up_route(topic, self._plan.columns, options)
            if self._run is not None and self._run.is_by_topic and _is_known(self._plan, self._run, found.topic_id):
                self.known.add(topic)
        return found

    def topic_ids(self) -> tuple[tuple[str, str], ...]:
        """Return the topic ids by name, in the order of names."""
        return tuple((topic, self._routes[topic].topic_id) for topic in sorted(self._routes))


def _producer(plan: WritePlan, joined: Joined | None) -> Producer:
    return Producer(
        plan.options.bootstrap,
        acks=plan.options.acks,
        compression=plan.options.compression,
        batch_bytes=_BATCH_BYTES,
        delivery_timeout_s=_DELIVERY_TIMEOUT_S,
        in_transaction=joined,
        client_id=CLIENT_ID,
        security=plan.options.security,
    )


class _Appender:
    """A sender that passes rows to one producer and tracks their acknowledgements."""

    def __init__(self, producer: Producer, *, named: bool) -> None:
        """Create a sender for ``producer``. ``named`` means that no row may go to another topic with the same name.

        A named write is identified by its topic's id.
        """
        self._producer = producer
        self._named = named
        self._topic_ids: dict[str, str] = {}
        self._acknowledged = _Acknowledged()

    def add(self, route: TopicRoute, rows: pa.RecordBatch) -> None:
        self._topic_ids[route.topic] = route.topic_id
        for partition, payload in route.split(rows):
            self._acknowledged.expect(self._producer.write(route.topic, payload, partition=partition))

    def finish(self) -> tuple[int, tuple[tuple[TopicPartition, OffsetRange], ...]]:
        """Wait until all rows are acknowledged.

        Raises BrokerError INCONSISTENT_TOPIC_ID if a topic of a named write (txnAppId, txnVersion) was recreated.
        """
        self._producer.flush()
        found = self._acknowledged.all()
        if self._named:
            self._require_same_topics()
        return found

    def _require_same_topics(self) -> None:
        """Raise BrokerError if a topic was recreated. One check at the end is enough, because ids are never reused."""
        for topic, expected in self._topic_ids.items():
            found = self._producer.topic_id(topic)
            if found != expected:
                detail = (
                    f"topic {topic} was deleted and created again since the write began (id {found}, not {expected}"
                )
                raise BrokerError(ErrorCode.INCONSISTENT_TOPIC_ID, f"{detail}): run the write again")


class _Acknowledged:
    """The results of the tables that were sent to a producer, in the order of sending.

    A failure is raised soon after it happens.
    """

    def __init__(self) -> None:
        self._open: deque[Future[WriteResult]] = deque()
        self._rows = 0
        self._ranges: set[tuple[TopicPartition, OffsetRange]] = set()

    def expect(self, future: Future[WriteResult]) -> None:
        self._open.append(future)
        while self._open and self._open[0].done():
            self._on_result(self._open.popleft().result())

    def all(self) -> tuple[int, tuple[tuple[TopicPartition, OffsetRange], ...]]:
        while self._open:
            self._on_result(self._open.popleft().result())
        return self._rows, tuple(sorted(self._ranges))

    def _on_result(self, result: WriteResult) -> None:
        self._rows += result.record_count
        self._ranges.update((TopicPartition(result.topic, found.partition), found.offsets) for found in result.ranges)


def _by_topic(plan: WritePlan, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    if plan.topic_column is None:
        yield str(plan.options.topic), rows
        return
    for topic, part in rows_by_value(rows, rows.column(rows.schema.get_field_index(plan.topic_column))):
        if topic is None:
            raise ConfigError(
                f"column {plan.topic_column} is null in {part.num_rows} rows: every row needs a topic, unless the"
                " write has the option topic, as in INSERT INTO t WITH ('topic'='x')"
            )
        yield topic, part
