"""Consumers of a group that record their actions, each in a thread of the test's process or of one that a test kills.

``python -m tests.client.group_worker BOOTSTRAP GROUP TOPIC NAME COUNT FILE`` reads until its standard input ends.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sparklog

SESSION_MS = 3000
MAX_POLL_MS = 4000

Note = Callable[[dict[str, Any]], None]


class Worker(threading.Thread):
    """A consumer that polls until ``stop``. ``nap`` makes it pause once for that number of seconds."""

    def __init__(self, bootstrap: str, group: str, topic: str, name: str, note: Note) -> None:
        super().__init__(name=name, daemon=True)
        self._note = note
        self._arguments = (bootstrap, group, topic)
        self._stopped = threading.Event()
        self.nap = 0.0
        self.assigned: frozenset[int] = frozenset()
        self.refused = 0
        self.error: BaseException | None = None

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self.error = error
            self._note({"who": self.name, "error": repr(error)})

    def _read(self) -> None:
        bootstrap, group, topic = self._arguments
        with sparklog.Consumer(
            bootstrap, [topic], group=group, session_timeout_ms=SESSION_MS, heartbeat_interval_ms=500,
            max_poll_interval_ms=MAX_POLL_MS, auto_commit_interval_ms=200, timeout_s=60,
            on_assign=lambda partitions: self._told(consumer, "assign", partitions),
            on_revoke=lambda partitions: self._told(consumer, "revoke", partitions),
            on_lost=lambda partitions: self._told(consumer, "lost", partitions),
        ) as consumer:  # fmt: skip
            while not self._stopped.is_set():
                for batch in consumer.poll(0.5):
                    place = sparklog.origin(batch)
                    self._note({"who": self.name, "seen": [place.partition, place.offset, batch.num_rows]})
                if self.nap:
                    self._sleep(consumer)

    def _sleep(self, consumer: sparklog.Consumer) -> None:
        before = {tp: offset + 1 for tp, offset in consumer.positions().items()}
        nap, self.nap = self.nap, 0.0
        time.sleep(nap)
        if before and nap * 1000 > MAX_POLL_MS + 1000:
            try:
                consumer.commit(before)
            except sparklog.CommitRefused:
                self.refused += 1
            else:
                raise AssertionError(f"{self.name} has slept for {nap:g} s and could commit")

    def _told(self, consumer: sparklog.Consumer, event: str, partitions: list[sparklog.TopicPartition]) -> None:
        numbers = [tp.partition for tp in partitions]
        self._note({"who": self.name, event: numbers, "member": consumer.member_id, "epoch": consumer.member_epoch})
        changed = self.assigned.union(numbers) if event == "assign" else self.assigned.difference(numbers)
        self.assigned = frozenset(changed)


def main() -> None:
    bootstrap, group, topic, name, count, file = sys.argv[1:]
    lock = threading.Lock()
    with Path(file).open("a", buffering=1) as out:

        def note(event: dict[str, Any]) -> None:
            with lock:
                out.write(json.dumps(event) + "\n")

        workers = [Worker(bootstrap, group, topic, f"{name}.{number}", note) for number in range(int(count))]
        for worker in workers:
            worker.start()
        sys.stdin.read()
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.join(60)


if __name__ == "__main__":
    main()
