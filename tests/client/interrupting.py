"""A KeyboardInterrupt in a chosen line: Python handles signals between lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest


def lines(*methods: Callable[..., Any]) -> list[Any]:
    """Yield each line of the functions' bodies, counted from the first line of its method."""
    return [
        pytest.param(method, line - method.__code__.co_firstlineno, id=f"{method.__qualname__}-{line}")
        for method in methods
        for line in sorted({line for *_, line in method.__code__.co_lines() if line is not None})[1:]
    ]


def interrupted_in(method: Callable[..., Any], line: int, work: Callable[[], None]) -> None:
    """Do ``work``, with a KeyboardInterrupt when it first reaches this line."""
    code = method.__code__
    raised: list[bool] = []

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == code.co_firstlineno + line and not raised:
            raised.append(True)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
