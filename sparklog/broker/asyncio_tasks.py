"""The reliable cancellation of asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.1


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until all of them have ended.

    The tasks are cancelled repeatedly, because one cancellation can get lost: before Python 3.12 ``asyncio.wait_for``
    ignores a cancellation that arrives together with the awaited result, and the task continues.
    """
    left = {task for task in tasks if task is not asyncio.current_task()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
