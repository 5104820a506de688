"""A process that copies a topic in transactions, from where its group stands, until it is killed.

``python -m tests.client.copy_worker <bootstrap>``: reads ``in``, writes ``out``, group ``copy``, id ``copier``; says
``done`` for every transaction it has seen committed. With a second argument it begins a transaction under that id with
that time-out (``id:seconds``), writes one record to ``t``, says ``open``, and waits to be killed.
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
        producer.begin()  # first: what an earlier life left open is ended by it, and only then the offsets are known
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
