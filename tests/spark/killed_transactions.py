"""A Kafka client that a test kills: it copies a topic exactly once, in transactions of confluent-kafka.

It continues at the offsets that the group ``copier`` has committed in transactions. Every fifth transaction is aborted;
its records have values that begin with ``dropped``. The program prints one line for each step of a transaction:
``begun``, ``flushed``, ``positioned``, ``ending``, and ``committed`` or ``aborted``. It ends when it has copied all.

python -m tests.spark.killed_transactions <Kafka bootstrap> <transactional id> <from> <to>
"""

from __future__ import annotations

import sys
from typing import Any

import confluent_kafka

_PATIENCE_S = 60.0
_AT_ONCE = 25


def main(bootstrap: str, key: str, source: str, target: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": key, "linger.ms": 1})
    producer.init_transactions(_PATIENCE_S)
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "copier",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    _, count = consumer.get_watermark_offsets(confluent_kafka.TopicPartition(source, 0), _PATIENCE_S)
    partitions = len(consumer.list_topics(target, _PATIENCE_S).topics[target].partitions)
    at = _seek_to_committed(consumer, source)
    number = 0
    while at < count:
        messages = [one for one in consumer.consume(_AT_ONCE, 1.0) if one.error() is None]
        if not messages:
            continue
        number += 1
        drops = number % 5 == 0
        producer.begin_transaction()
        _say("begun")
        for one in messages:
            value = b"dropped " + one.value() if drops else one.value()
            producer.produce(target, value, one.value(), int(one.value()) % partitions)
        assert producer.flush(_PATIENCE_S) == 0
        _say("flushed")
        position = confluent_kafka.TopicPartition(source, 0, messages[-1].offset() + 1)
        producer.send_offsets_to_transaction([position], consumer.consumer_group_metadata(), _PATIENCE_S)
        _say("positioned")
        _say("ending")
        if drops:
            producer.abort_transaction(_PATIENCE_S)
            at = _seek_to_committed(consumer, source)
            _say("aborted")
        else:
            producer.commit_transaction(_PATIENCE_S)
            at = position.offset
            _say("committed")
    consumer.close()


def _seek_to_committed(consumer: Any, source: str) -> int:
    (found,) = consumer.committed([confluent_kafka.TopicPartition(source, 0)], _PATIENCE_S)
    at = max(0, int(found.offset))
    consumer.assign([confluent_kafka.TopicPartition(source, 0, at)])
    return at


def _say(step: str) -> None:
    sys.stdout.write(f"{step}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
