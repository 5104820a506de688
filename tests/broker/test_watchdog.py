"""Tests of the watchdog in a separate process, because it ends the process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from sparklog.broker.lifecycle.watchdog import EXIT_STALLED


def run(body: str) -> int:
    program = textwrap.dedent(
        """
        import asyncio, time
        from sparklog.broker.lifecycle.watchdog import Watchdog

        async def main():
            dog = Watchdog(300)
            dog.start()
        {body}
            dog.stop()

        asyncio.run(main())
        """
    ).format(body=textwrap.indent(textwrap.dedent(body).strip(), "    "))
    return subprocess.run([sys.executable, "-c", program], timeout=30, capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("time.sleep(5)", EXIT_STALLED),
        ("await asyncio.sleep(1)", 0),
        ("for _ in range(10): time.sleep(0.08); await asyncio.sleep(0)", 0),
    ],
    ids=["a stalled loop ends the process", "an idle loop does not", "a busy loop that turns does not"],
)
def test_the_watchdog_ends_only_a_stalled_process(body: str, expected: int) -> None:
    assert run(body) == expected
