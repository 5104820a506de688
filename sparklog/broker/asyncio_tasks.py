"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.1


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel and wait until all have ended.

    Again and again: ``asyncio.wait_for`` before Python 3.12 loses a cancellation that comes together with the result
    it waits for, and the task then goes on as if nothing had been said.
    """
    left = {task for task in tasks if task is not asyncio.current_task()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
