"""Early checks of a request's batches, for requests whose checks could block the event loop for too long.

Each batch may have ``max.message.bytes`` after decompression, even if few bytes were sent. The check of one batch is
short, but the check of a thousand batches is not. So this module checks the batches before the append, and the event
loop runs other work between two batches. A very large batch is checked in a thread. The append then uses the results of
the checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from sparklog.broker.replication.partition import AppendRules, Batches, CheckedBatches, Partition, check_batch
from sparklog.broker.requests.slices import Slices
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.header import BatchHeader
from sparklog.record.message import unpacked_bytes

MIB = 1024 * 1024
#: The maximum number of batches of one partition in one request. Producers send only one.
MAX_BATCHES = 1000
#: The maximum number of bytes that the batches of one partition in one request may have together after decompression.
MAX_BYTES = 4096 * MIB
#: A batch with more bytes after decompression is checked in a thread.
LOOP_BYTES = 32 * MIB

#: One thread, so that only one large batch at a time is decompressed in memory.
_thread = ThreadPoolExecutor(1, "batch checks")

Checking = Generator["asyncio.Future[Any] | None", None, CheckedBatches]


class _Batch(NamedTuple):
    header: BatchHeader
    body: memoryview
    placed: bool


def check_count(batch_count: int) -> None:
    """Raise BrokerError INVALID_REQUEST if a request has more than ``MAX_BATCHES`` batches of one partition."""
    if batch_count > MAX_BATCHES:
        detail = f"{batch_count} batches of one partition found in one request, at most {MAX_BATCHES} expected"
        raise BrokerError(ErrorCode.INVALID_REQUEST, detail)


def check_batches(partition: Partition, batches: Batches, slices: Slices, *, placed: bool = False) -> Checking:
    """Check all batches against the partition's current rules, and return the result.

    The function is a generator, which the caller runs with ``Slices``.

    Raises:
        BrokerError: MESSAGE_TOO_LARGE if all batches together have more than ``MAX_BYTES`` after decompression.
    """
    rules, refusals, unpacked = partition.rules, dict[int, BrokerError](), 0
    for number, (header, body) in enumerate(batches):
        if slices.over():
            yield None
        try:
            size = unpacked_bytes(header, body)
            unpacked += min(size, rules.max_message_bytes)
            if size <= LOOP_BYTES or size > rules.max_message_bytes:  # the check refuses an oversized batch
                check_batch(partition.tp, rules, header, body, placed=placed)
            else:
                work = (partition.tp, rules, _Batch(header, body, placed))
                checked = asyncio.get_running_loop().run_in_executor(_thread, _check_in_thread, *work)
                yield checked
                checked.result()
        except BrokerError as error:
            refusals[number] = error
        if unpacked > MAX_BYTES:
            detail = f"{partition.tp}: batches of more than {MAX_BYTES} bytes uncompressed found in one request"
            raise BrokerError(ErrorCode.MESSAGE_TOO_LARGE, detail)
    return CheckedBatches(rules, refusals)


def _check_in_thread(tp: Any, rules: AppendRules, batch: _Batch) -> None:
    check_batch(tp, rules, batch.header, batch.body, placed=batch.placed)
