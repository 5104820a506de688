"""A stop that is asked for by a signal, at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from sparklog.cluster.stop_request import StopRequest
from tests.waiting import wait_until

#: Waits again and again, for so short that most signals come where something of the wait is being done in Python.
WAITING = """
import signal
from sparklog.cluster.stop_request import StopRequest
stop = StopRequest()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
print("waiting", flush=True)
while not stop.wait({timeout_s}):
    pass
"""
MANY = 20


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    request = StopRequest()
    before = signal.signal(signal.SIGUSR1, lambda *_: request.set())
    yield request
    signal.signal(signal.SIGUSR1, before)


def test_nobody_has_asked() -> None:
    stop = StopRequest()
    began = time.monotonic()
    assert (stop.is_set(), stop.wait(0.0), stop.wait(0.05)) == (False, False, False)
    assert time.monotonic() - began >= 0.05


def test_a_handler_wakes_who_waits(stop: StopRequest) -> None:
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    began = time.monotonic()
    assert stop.wait(60.0)
    assert time.monotonic() - began < 30
    timer.join()
    assert (stop.is_set(), stop.wait(60.0), stop.wait(60.0)) == (True, True, True), "from then on nothing is waited for"


def test_all_who_wait_are_woken() -> None:
    stop = StopRequest()
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(stop.wait(60.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    stop.set()
    stop.set()
    for thread in threads:
        thread.join()
    assert woken == [True] * 4
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("timeout_s", [0.0, 1e-6])
def test_a_signal_comes_at_any_moment(timeout_s: float) -> None:
    """With an event of threading's half of them would not end."""
    waiting = [
        subprocess.Popen([sys.executable, "-c", WAITING.format(timeout_s=timeout_s)], stdout=subprocess.PIPE)
        for _ in range(MANY)
    ]
    try:
        for process in waiting:
            assert process.stdout is not None
            assert process.stdout.readline() == b"waiting\n"
            process.terminate()
        wait_until(lambda: all(process.poll() is not None for process in waiting), timeout_s=60)
        assert [process.returncode for process in waiting] == [0] * MANY
    finally:
        for process in waiting:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
