"""The choice between the event loop and a thread for work on the records of one batch of the log.

Fetch and ListOffsets requests of Kafka clients need this work. A large batch would block the event loop.
"""

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
    """Run ``work`` on a stored batch, in a thread if the batch is large. Return the result of ``work``.

    This function is a generator for ``Slices``. It yields the future of the work in the thread.

    Raises:
        BrokerError: CORRUPT_MESSAGE, or another error of ``work``.
    """
    if unpacked_bytes(header, stored) <= LOOP_BYTES:
        return work()
    running = asyncio.get_running_loop().run_in_executor(_thread, work)
    yield running
    return running.result()
