"""Tests of the supervision of a real process that speaks the control protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sparklog.cluster import supervisor
from sparklog.cluster.broker_process import spawn_broker
from sparklog.cluster.process import ProcessIdentity, identify
from sparklog.cluster.runtime_directory import control_socket, noted_process
from tests.cluster.support import FAKE_BROKER, Supervised, eventually, kill_noted, supervised


def run(test: object) -> None:
    asyncio.run(asyncio.wait_for(test, 60))  # type: ignore[arg-type]


def test_a_broker_starts_in_its_own_session_with_its_own_output(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as one:
            serving = (await one.settled()).serving
            assert serving is not None
            assert (serving.broker_id, serving.port, serving.adopted) == (4, 19092, False)
            assert os.getsid(serving.pid) == serving.pid != os.getsid(0)
            assert Path(f"/proc/{serving.pid}/fd/1").resolve() == (tmp_path / "broker.out").resolve()
            assert (tmp_path / "broker.out").stat().st_mode & 0o077 == 0

    run(test())


def test_a_killed_broker_is_retired_and_started_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as one:
            first = (await one.settled()).serving
            assert first is not None
            os.kill(first.pid, signal.SIGKILL)
            await eventually(lambda: one.retired == [(4, first.pid)])
            await eventually(lambda: (now := one.supervisor.serving) is not None and now.pid != first.pid)
            assert one.supervisor.problem == ""
            assert identify(first.pid) is None

    run(test())


@pytest.mark.parametrize("back", ["before another serves", "after"])
def test_a_death_is_reported_until_another_process_serves(tmp_path: Path, back: str) -> None:
    """The supervisor restarts the broker meanwhile: it does not wait until ZooKeeper knows that the last process is
    dead."""

    async def test() -> None:
        async with supervised(tmp_path) as one:
            first = (await one.settled()).serving
            assert first is not None
            one.zookeeper.clear()
            if back == "before another serves":
                one.supervisor._program = (sys.executable, FAKE_BROKER, "fail")
            os.kill(first.pid, signal.SIGKILL)
            if back == "after":
                await eventually(lambda: (now := one.supervisor.serving) is not None and now.pid != first.pid)
                one.zookeeper.set()
                await asyncio.sleep(0)
                assert one.retired == [], "the new process's registration already replaces the first one"
            else:
                await eventually(lambda: "cheese" in one.supervisor.problem)
                one.zookeeper.set()
                await eventually(lambda: one.retired == [(4, first.pid)])

    run(test())


def test_a_broker_gets_every_restart_it_asks_for_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as one:
            before = (await one.settled()).serving
            for _ in range(4):  # the back-off after four crashes would be 1.4 s in total
                assert before is not None
                await one.supervisor._link.send("stop")
                pid = before.pid
                await eventually(lambda: (now := one.supervisor.serving) is not None and now.pid != pid)  # noqa: B023
                before = one.supervisor.serving
            assert one.supervisor._delay_s == 0.0
            assert one.retired == []
            assert one.supervisor.problem == ""

    run(test())


def test_a_restart_request_during_a_stop_starts_no_broker(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as one:
            serving = (await one.settled()).serving
            assert serving is not None
            await one.supervisor.quiesce()
            await one.supervisor._link.send("stop")
            await asyncio.wait_for(one.task, 5)
            assert identify(serving.pid) is None
            assert one.supervisor.serving is None

    run(test())


def test_the_next_generation_adopts_the_running_process(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path, generation=1) as one:
            first = (await one.settled()).serving
            assert first is not None
            await one.leave()
            assert identify(first.pid) is not None
            async with supervised(tmp_path, generation=2) as two:
                second = (await two.settled()).serving
                assert second is not None
                assert (second.pid, second.adopted) == (first.pid, True)
                # An adopted process is not a child of this process, but the supervisor notices its end.
                os.kill(second.pid, signal.SIGKILL)
                await eventually(lambda: two.retired == [(4, second.pid)])
            assert one.retired == []

    run(test())


def test_a_supervisor_ends_although_its_cancellation_is_lost(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as one:
            serving = (await one.settled()).serving
            assert serving is not None
            waits = asyncio.Event()

            async def lose_the_first() -> None:
                """Lose the first cancellation, as ``asyncio.wait_for`` does if it arrives together with the result."""
                with contextlib.suppress(asyncio.CancelledError):
                    waits.set()
                    await asyncio.Event().wait()
                await one.task

            run = asyncio.create_task(lose_the_first())
            await waits.wait()
            await asyncio.wait_for(one.supervisor.leave(run), 30)
            assert one.task.done()
            assert identify(serving.pid) is not None, "the broker must keep running"

    run(test())


def test_a_supervisor_yields_to_a_newer_generation(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path, generation=1) as one:
            await one.settled()
            async with supervised(tmp_path, generation=2) as two:
                await two.settled()
                await eventually(lambda: one.supervisor.superseded, timeout_s=5)
                assert one.retired == []
                assert two.supervisor.serving is not None
                assert not two.supervisor.superseded

    run(test())


def test_a_stopped_process_is_killed_and_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path) as one:
            first = (await one.settled()).serving
            assert first is not None
            os.kill(first.pid, signal.SIGSTOP)
            await eventually(lambda: (now := one.supervisor.serving) is not None and now.pid != first.pid)
            assert one.retired == [(4, first.pid)]

    run(test())


def test_a_broker_that_never_responds_is_killed(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path, behaviour="deaf") as one:
            supervisor = await one.settled()
            assert supervisor.serving is None
            assert "broker 4" in supervisor.problem

    run(test())


def test_the_last_output_of_a_failing_broker_is_reported(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path, behaviour="fail") as one:
            supervisor = await one.settled()
            assert "the disk of this broker is made of cheese" in supervisor.problem
            assert "code 1" in supervisor.problem
            assert one.retired == []

    run(test())


@pytest.mark.parametrize("behaviour", ["serve", "slow"])
def test_the_ordered_stop_quiesces_waits_and_finishes(tmp_path: Path, behaviour: str) -> None:
    async def test() -> None:
        async with supervised(tmp_path, behaviour=behaviour) as one:
            serving = (await one.settled()).serving
            assert serving is not None
            await one.supervisor.quiesce()
            assert await one.supervisor.caught_up(timeout_s=5)
            await one.supervisor.finish(timeout_s=5)
            assert (tmp_path / "clean").read_text() == "quiesced True"
            await asyncio.wait_for(one.task, 5)
            assert identify(serving.pid) is None

    run(test())


def test_a_stop_reaches_a_broker_that_is_still_starting(tmp_path: Path) -> None:
    """The broker does not listen yet when all brokers are asked to finish."""

    async def test() -> None:
        async with supervised(tmp_path, behaviour="late") as one:
            await eventually(lambda: noted_process(tmp_path) is not None)
            await one.supervisor.quiesce()
            assert await one.supervisor.caught_up(timeout_s=5)
            finishing = asyncio.create_task(one.supervisor.finish(timeout_s=30))
            await asyncio.wait({finishing}, timeout=0.5)
            (tmp_path / "begin").touch()
            await asyncio.wait_for(finishing, 60)
            assert (tmp_path / "clean").exists(), "the broker must exit cleanly, without being killed"

    run(test())


@pytest.mark.parametrize("behaviour", ["loading", "late"])
def test_a_stop_reaches_a_broker_adopted_during_its_start(tmp_path: Path, behaviour: str) -> None:
    """Another supervisor has started the broker, which loads its logs."""

    async def test() -> None:
        async with supervised(tmp_path, behaviour=behaviour) as one:
            await eventually(lambda: noted_process(tmp_path) is not None)
            process = noted_process(tmp_path)
            assert process is not None
            if behaviour == "loading":
                await eventually(lambda: control_socket(tmp_path).exists())
            await one.leave()
            async with supervised(tmp_path, behaviour=behaviour, generation=2) as two:
                await asyncio.wait({two.task}, timeout=0.5)
                await two.supervisor.quiesce()
                finishing = asyncio.create_task(two.supervisor.finish(timeout_s=30))
                await asyncio.wait({finishing}, timeout=0.5)
                (tmp_path / "begin").touch()
                await asyncio.wait_for(finishing, 60)
                assert identify(process.pid) is None
                assert (tmp_path / "clean").exists(), "the broker must exit cleanly, without being killed"
                await asyncio.wait_for(two.task, 5)
                assert noted_process(tmp_path) is None, "no other broker may be started"

    run(test())


def test_a_stop_reaches_a_broker_whose_process_is_being_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def spawn(*args: Any, **kwargs: Any) -> ProcessIdentity:
        begun.set()
        assert go_on.wait(30)
        return spawn_broker(*args, **kwargs)

    monkeypatch.setattr(supervisor, "spawn_broker", spawn)

    async def test() -> None:
        async with supervised(tmp_path) as one:
            await eventually(begun.is_set)
            await one.supervisor.quiesce()
            finishing = asyncio.create_task(one.supervisor.finish(timeout_s=30))
            await asyncio.wait({finishing}, timeout=0.2)
            go_on.set()
            await asyncio.wait_for(finishing, 60)
            await asyncio.wait_for(one.task, 5)
            assert (tmp_path / "clean").exists()
            assert noted_process(tmp_path) is None

    run(test())


def test_a_stop_restarts_no_broker_that_ends_during_adoption(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path, behaviour="late") as one:
            await eventually(lambda: noted_process(tmp_path) is not None)
            await one.leave()
            async with supervised(tmp_path, generation=2) as two:
                await asyncio.wait({two.task}, timeout=0.5)
                await two.supervisor.quiesce()
                kill_noted(tmp_path)
                await asyncio.wait_for(two.task, 10)
                process = noted_process(tmp_path)
                assert process is not None and identify(process.pid) is None

    run(test())


def test_a_stop_leaves_a_broker_that_follows_a_newer_supervisor(tmp_path: Path) -> None:
    async def test() -> None:
        async with supervised(tmp_path, generation=1) as one:
            await one.settled()
            async with supervised(tmp_path, generation=2) as two:
                serving = (await two.settled()).serving
                assert serving is not None
                await asyncio.wait_for(one.supervisor.finish(timeout_s=1), 30)
                assert identify(serving.pid) is not None
                assert one.supervisor.superseded
                assert noted_process(tmp_path) is not None

    run(test())


def test_an_adopt_only_supervisor_starts_no_broker(tmp_path: Path) -> None:
    async def test() -> None:
        one = Supervised(tmp_path, adopt_only=True)
        try:
            await asyncio.wait_for(one.task, 5)
            assert one.supervisor.serving is None
            assert not (tmp_path / "broker.out").exists()
        finally:
            kill_noted(tmp_path)

    run(test())
