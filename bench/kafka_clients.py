"""Kafka's Python clients for the rows: confluent-kafka (librdkafka) and aiokafka, each in its fastest mode.

Only benches with Kafka import this module: the packages come with the extra ``bench``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from confluent_kafka import Consumer, KafkaError, Producer

_QUEUE_RECORDS = 1_000_000
_POLL_EVERY = 1024
_POLL_ONCE_S = 1.0
_AT_ONCE = 500
_SILENT_S = 30.0
#: The setting with which the clients log nothing when a cluster stops.
_SILENT = {"log_level": 2}
#: librdkafka waits one second when 100,000 records are in its queue, which would be most of the measured time.
_FAST_READER = {
    "fetch.queue.backoff.ms": 2,
    "queued.min.messages": 1_000_000,
    "queued.max.messages.kbytes": 262_144,
}


def confluent_producer(bootstrap: str, **settings: Any) -> Producer:
    base = {"bootstrap.servers": bootstrap, "acks": "all", "queue.buffering.max.messages": _QUEUE_RECORDS, **_SILENT}
    return Producer({**base, **settings})


def produce_confluent(bootstrap: str, topic: str, values: Sequence[bytes], **settings: Any) -> float:
    """Produce the values; return the seconds until all are acknowledged.

    There is no callback for each record, because callbacks would take most of the time.
    """
    producer = confluent_producer(bootstrap, **settings)
    began = time.perf_counter()
    for number, value in enumerate(values):
        while True:
            try:
                producer.produce(topic, value)
                break
            except BufferError:
                producer.poll(0.01)
        if number % _POLL_EVERY == 0:
            producer.poll(0)
    left = producer.flush(_SILENT_S)
    took = time.perf_counter() - began
    if left:
        raise TimeoutError(f"confluent-kafka: {left} records not acknowledged")
    return took


def produce_aiokafka(bootstrap: str, topic: str, values: Sequence[bytes], **settings: Any) -> float:
    """Produce the values with aiokafka; return the seconds until the future of each ``send`` is complete."""

    async def produce() -> float:
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", **settings)
        await producer.start()
        try:
            began = time.perf_counter()
            waiting = []
            for value in values:
                waiting.append(await producer.send(topic, value))
                if len(waiting) == 20_000:
                    await asyncio.gather(*waiting)
                    waiting.clear()
            await asyncio.gather(*waiting)
            return time.perf_counter() - began
        finally:
            await producer.stop()

    return asyncio.run(produce())


def confluent_consumer(bootstrap: str, topic: str, **settings: Any) -> Consumer:
    base = {"bootstrap.servers": bootstrap, "group.id": uuid.uuid4().hex, "enable.auto.commit": False, **_SILENT}
    consumer = Consumer({**base, "auto.offset.reset": "earliest", **_FAST_READER, **settings})
    consumer.subscribe([topic])
    return consumer


def consume_confluent(bootstrap: str, topic: str, count: int) -> tuple[float, list[bytes]]:
    """Consume ``count`` messages; return the seconds from the first to the last, and the values."""
    consumer = confluent_consumer(bootstrap, topic)
    found: list[bytes] = []
    began, silent_since = 0.0, time.perf_counter()
    try:
        while len(found) < count:
            messages = consumer.consume(_AT_ONCE, _POLL_ONCE_S)
            now = time.perf_counter()
            if messages:
                began, silent_since = began or now, now
                for message in messages:
                    _raise_for(message.error())
                    found.append(message.value())
            elif now - silent_since > _SILENT_S:
                raise TimeoutError(
                    f"confluent-kafka: {len(found):,} of {count:,} records after {_SILENT_S:g} s of silence"
                )
        return time.perf_counter() - began, found
    finally:
        consumer.close()


def _raise_for(error: KafkaError | None) -> None:
    if error is not None:
        raise RuntimeError(f"confluent-kafka: {error}")
