"""One command in this process, with pipes as standard streams: it prints what a separate process would print, but
faster."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from sparklog.cli.main import run


class Result(NamedTuple):
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()


Cli = Callable[..., Result]


class _Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def in_process(*arguments: object, stdin: bytes = b"", on_terminal: bool = False) -> Result:
    out, err = _Terminal() if on_terminal else io.BytesIO(), io.StringIO()
    stdout = io.TextIOWrapper(out, write_through=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", err)
        code = run([str(argument) for argument in arguments])
        stdout.flush()
        found = out.getvalue()
        stdout.detach()
    return Result(code, found, err.getvalue())
