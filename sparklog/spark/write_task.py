"""What one attempt of one task of a write does: its rows, batch by batch, into a producer of its own, all acknowledged.

``writer`` loads this in tasks only.
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
from sparklog.spark.gc_freeze import rest_what_is_loaded
from sparklog.spark.options import CLIENT_ID
from sparklog.spark.route import TopicRoute, rows_by_value
from sparklog.spark.sink import SinkRun, Written, is_known, take_part

if TYPE_CHECKING:
    from sparklog.client.producer.futures import WriteResult
    from sparklog.spark.write_plan import WritePlan

#: Spark cuts a task's rows into batches of at most 10,000; so many bytes of them are encoded together, and stored as
#: one batch where they go to one partition: what a batch costs three brokers besides its bytes is a millisecond.
_BATCH_BYTES = 4 * 1024 * 1024
#: What is enough for that: Spark's own batches of so many bytes end a little below or above.
_ENOUGH_BYTES = _BATCH_BYTES * 7 // 8
#: How long a batch may wait for its acknowledgement: several elections.
_DELIVERY_TIMEOUT_S = 120.0


def write_rows(plan: WritePlan, run: SinkRun | None, batches: Iterator[pa.RecordBatch]) -> Written:
    """One attempt of one task. Raises as ``BatchWriter.write``."""
    written = _written(plan, run, batches)
    rest_what_is_loaded()
    return written


def _written(plan: WritePlan, run: SinkRun | None, batches: Iterator[pa.RecordBatch]) -> Written:
    joined = None
    if run is not None:
        joined = take_part(plan.options.bootstrap, run, timeout_s=plan.options.timeout_s)
        if joined is None:
            return Written(_count(batches), (), run)
    with _producer(plan, joined) as producer:  # which gives signs of life from here on
        if run is not None and run.topic_id and is_known(plan.options.bootstrap, run, run.topic_id):
            return Written(_count(batches), (), run)
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
        return Written(appended, ranges)
    return Written(appended, ranges, run, joined.producer_id, destinations.topic_ids(), known_rows)


def _count(batches: Iterator[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


class _Destinations:
    """Topics as the rows of one attempt of one task turn out to name them."""

    def __init__(self, plan: WritePlan, run: SinkRun | None) -> None:
        self._plan = plan
        self._run = run
        self._routes = dict(plan.routes)
        #: Topics that have this version of a named write already.
        self.known: set[str] = set()

    def route(self, topic: str) -> TopicRoute:
        """Looked up, or made, when it is first asked for; ``known`` says then whether rows go there."""
        found = self._routes.get(topic)
        if found is None:
            from sparklog.spark.topic_resolution import (
                look_up_route,  # a write to one topic has its route from planning
            )

            options = self._plan.options
            found = self._routes[topic] = look_up_route(topic, self._plan.columns, options)
            if (
                self._run is not None
                and self._run.is_by_topic
                and is_known(options.bootstrap, self._run, found.topic_id)
            ):
                self.known.add(topic)
        return found

    def topic_ids(self) -> tuple[tuple[str, str], ...]:
        """By name, in order of names."""
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
    )


class _Appender:
    """Rows of topics into one producer, and what became of them. Owner: the task."""

    def __init__(self, producer: Producer, *, named: bool) -> None:
        """``named``: the write is known by its topic's id, so that nothing may go to another of that name."""
        self._producer = producer
        self._named = named
        self._topic_ids: dict[str, str] = {}
        self._acknowledged = _Acknowledged()

    def add(self, route: TopicRoute, rows: pa.RecordBatch) -> None:
        self._topic_ids[route.topic] = route.topic_id
        for partition, payload in route.split(rows):
            self._acknowledged.expect(self._producer.write(route.topic, payload, partition=partition))

    def finish(self) -> tuple[int, tuple[tuple[TopicPartition, OffsetRange], ...]]:
        """Wait until all of it is acknowledged. Raises BrokerError INCONSISTENT_TOPIC_ID, see ``named``."""
        self._producer.flush()
        found = self._acknowledged.all()
        if self._named:
            self._require_same_topics()
        return found

    def _require_same_topics(self) -> None:
        """In the end: no id ever comes back, so it was this one all the time."""
        for topic, expected in self._topic_ids.items():
            found = self._producer.topic_id(topic)
            if found != expected:
                detail = f"topic {topic} was deleted and created again since the write began ({found} found, {expected}"
                raise BrokerError(ErrorCode.INCONSISTENT_TOPIC_ID, f"{detail} expected): run it again")


class _Acknowledged:
    """What became of the tables handed to a producer, in their order; a failure is raised soon after it happens."""

    def __init__(self) -> None:
        self._open: deque[Future[WriteResult]] = deque()
        self._rows = 0
        self._ranges: set[tuple[TopicPartition, OffsetRange]] = set()

    def expect(self, future: Future[WriteResult]) -> None:
        self._open.append(future)
        while self._open and self._open[0].done():
            self._take(self._open.popleft().result())

    def all(self) -> tuple[int, tuple[tuple[TopicPartition, OffsetRange], ...]]:
        while self._open:
            self._take(self._open.popleft().result())
        return self._rows, tuple(sorted(self._ranges))

    def _take(self, result: WriteResult) -> None:
        self._rows += result.record_count
        self._ranges.update((TopicPartition(result.topic, found.partition), found.offsets) for found in result.ranges)


def _by_topic(plan: WritePlan, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    if plan.topic_column is None:
        yield str(plan.options.topic), rows
        return
    for topic, part in rows_by_value(rows, rows.column(rows.schema.get_field_index(plan.topic_column))):
        if topic is None:
            raise ConfigError(
                f"column {plan.topic_column} is null in {part.num_rows} rows: every row needs a topic, or the write "
                "the option topic, as in INSERT INTO t WITH ('topic'='x')"
            )
        yield topic, part
