"""Work on the records of one batch of the log, for requests of Kafka clients: on the event loop or in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sparklog.broker.requests.slices import Waited
from sparklog.record.header import BatchHeader
from sparklog.record.message import unpacked_bytes

_T = TypeVar("_T")
#: The maximum number of uncompressed bytes of a batch that the event loop handles without a thread.
LOOP_BYTES = 1024 * 1024
#: One thread, so that only one large batch at a time is decompressed in memory.
_thread = ThreadPoolExecutor(1, "kafka reads")


def run_by_size(header: BatchHeader, stored: memoryview, work: Callable[[], _T]) -> Generator[Waited, None, _T]:
    """Return the result of ``work`` on a stored batch, and run it in a thread if the batch is large.

    A generator for ``Slices``, which yields the future of the thread.

    Raises:
        BrokerError: CORRUPT_MESSAGE, or another error of ``work``.
    """
    if unpacked_bytes(header, stored) <= LOOP_BYTES:
        return work()
    running = asyncio.get_running_loop().run_in_executor(_thread, work)
    yield running
    return running.result()
