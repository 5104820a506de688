"""A reliable end of asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.1


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until all have ended.

    The cancellation repeats: before Python 3.12 ``asyncio.wait_for`` loses a cancellation that comes together with the
    result that it waits for, and the task then continues.
    """
    left = {task for task in tasks if task is not asyncio.current_task()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
