"""Tests of a stop that a signal requests at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from sparklog.cluster.stop_request import StopRequest, exit_on_first, unless_asked
from tests.waiting import wait_until

#: It polls without waiting, so that most signals arrive within the Python code of a poll.
WAITING = """
import signal
from sparklog.cluster.stop_request import StopRequest, exit_on_first, unless_asked
stop = StopRequest()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
print("waiting", flush=True)
while not stop.wait(0.0):
    pass
"""
#: It prints what a second and a third signal do to the work that the first one began.
ENDING = """
import signal, time
from sparklog.cluster.stop_request import exit_on_first
exit_on_first(signal.SIGTERM)
try:
    print("begun", flush=True)
    time.sleep(60)
finally:
    print("ending", flush=True)
    input()
    print("ended", flush=True)
"""
#: It loses the first exception, as finalizers do.
LOSING = """
import signal, sys, time
from sparklog.cluster import stop_request
stop_request._PATIENCE_S = 0.5
stop_request.exit_on_first(signal.SIGTERM)
try:
    print("begun", flush=True)
    time.sleep(60)
except SystemExit:
    print("lost", flush=True)
try:
    while True:
        time.sleep(0.01)
finally:  # one more signal, while Python ends, would end the process by itself
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
STOPPING = """
import time
from sparklog.cluster.start import _StopSignals
signals = _StopSignals()
print("ready", flush=True)
while not signals.asked.wait(60.0):
    pass
print("stopping", flush=True)
time.sleep(60)
"""
#: It writes until the pipe without a reader is full.
FILLING = """import os
os.set_blocking(2, False)
try:
    while os.write(2, b"x" * 65536):
        pass
except BlockingIOError:
    os.set_blocking(2, True)
"""
MANY = 20


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    request = StopRequest()
    before = signal.signal(signal.SIGUSR1, lambda *_: request.set())
    yield request
    signal.signal(signal.SIGUSR1, before)


def test_without_a_signal_no_stop_is_requested() -> None:
    stop = StopRequest()
    began = time.monotonic()
    assert (stop.is_set(), stop.wait(0.0), stop.wait(0.05)) == (False, False, False)
    assert time.monotonic() - began >= 0.05


def test_a_handler_wakes_a_waiting_thread(stop: StopRequest) -> None:
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    began = time.monotonic()
    assert stop.wait(60.0)
    assert time.monotonic() - began < 30
    timer.join()
    assert (stop.is_set(), stop.wait(60.0), stop.wait(60.0)) == (True, True, True), "after the stop no wait may block"


def test_every_waiting_thread_is_woken() -> None:
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


def test_a_signal_may_arrive_at_any_moment() -> None:
    """With a threading.Event half of the processes would not end."""
    waiting = [subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE) for _ in range(MANY)]
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


def test_only_the_first_sigterm_ends_the_work() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ENDING], stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == b"begun\n"
            process.terminate()
            assert process.stdout.readline() == b"ending\n"
            for _ in range(2):
                process.terminate()
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.read() == b"ended\n"
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_a_lost_exception_is_raised_again_by_a_later_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", LOSING], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            process.terminate()
            assert process.stdout.readline() == b"lost\n"

            def ended() -> bool:
                process.terminate()
                return process.poll() is not None

            wait_until(ended, timeout_s=60)
            assert process.returncode == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_a_handler_sets_a_given_stop_request(stop: StopRequest) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        exit_on_first(signal.SIGTERM, stop=stop)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_work_runs_directly_where_no_signal_can_arrive(stop: StopRequest) -> None:
    assert unless_asked(stop, threading.current_thread) is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        unless_asked(stop, lambda: 1 // 0)


def test_a_stop_leaves_work_that_continues(stop: StopRequest) -> None:
    begun, over, called = threading.Event(), threading.Event(), list[int]()

    def work() -> None:
        begun.set()
        over.wait(60)

    def ask() -> None:
        begun.wait(60)
        stop.set()

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(SystemExit) as caught:
        unless_asked(stop, work)
    assert caught.value.code == 128 + signal.SIGTERM and not over.is_set()
    over.set()
    asking.join()
    with pytest.raises(SystemExit):  # and work that has not begun does not begin
        unless_asked(stop, lambda: called.append(1))
    assert not called


def test_a_stalled_output_reader_does_not_block_the_exit() -> None:
    full = STOPPING.replace("signals = ", FILLING + "signals = ")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", full], stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.terminate()
            assert process.stdout.readline() == b"stopping\n"
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()


@pytest.mark.parametrize("is_read", [True, False])
def test_a_cluster_stops_although_its_output_is_not_read(is_read: bool) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", STOPPING], stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == b"ready\n"
            if not is_read:
                process.stderr.close()
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == b"stopping\n"
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
            if is_read:
                said = process.stderr.read()
                assert said.index(b"stopping the cluster (a second signal") < said.index(b"leaving without")
        finally:
            process.kill()
