"""A process that copies a topic in transactions, from its group's position, until it is killed.

``python -m tests.client.copy_worker <bootstrap>`` reads ``in``, writes ``out``, and uses group ``copy`` and id
``copier``. It prints ``done`` for every committed transaction. With a second argument ``id:seconds`` it begins a
transaction with that id and timeout, writes one record to ``t``, prints ``open``, and waits to be killed.
"""

from __future__ import annotations

import sys
import time

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.producer.producer import Producer

STEP = 25


def copy(bootstrap: str) -> None:
    with Admin(bootstrap) as admin, Producer(bootstrap, transactional_id="copier") as producer:
        # first: this ends the transaction that an earlier process left open, and the offsets are known only afterwards
        producer.begin()
        with Consumer(bootstrap, "in", start=admin.group_offsets("copy")) as consumer:
            while True:
                ends = consumer.end_offsets()
                until = {tp: min(position + STEP, ends[tp]) for tp, position in consumer.positions().items()}
                for value in consumer.to_table(until).column("value").to_pylist():
                    producer.send("out", value, key=value)
                producer.send_offsets(consumer.positions(), group="copy")
                producer.commit()
                print("done", flush=True)
                producer.begin()


def leave_open(bootstrap: str, transactional_id: str, timeout_s: float) -> None:
    producer = Producer(bootstrap, transactional_id=transactional_id, transaction_timeout_s=timeout_s)
    producer.begin()
    producer.send("t", transactional_id.encode(), partition=0).result(30)
    print("open", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        name, _, seconds = sys.argv[2].partition(":")
        leave_open(sys.argv[1], name, float(seconds))
    else:
        copy(sys.argv[1])
