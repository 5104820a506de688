"""Tests of the controller's loop on a real ZooKeeper, with brokers that only store its updates."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from sparklog.cluster.controller_loop import ControllerLoop, ControllerStatus
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.controller.controller import Controller, ControllerSettings
from sparklog.controller.effects import Effect
from sparklog.controller.events import Event, TopicRead
from sparklog.controller.reassignments import moving_record
from sparklog.errors import ClusterError
from sparklog.model import LeaderAndIsr, TopicPartition, TopicRecord, TopicStates, VersionedState
from sparklog.zk import codecs, paths
from sparklog.zk.broker_registry import BrokerRegistry
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.codecs import ElectionRequest
from sparklog.zk.session import Delete, SessionState, ZkSession
from sparklog.zk.state_store import Written

from .hearers import RECORD, SESSION_TIMEOUT_MS, Hearer, controlled, hearing, run_with_three
from .support import opened, retire, until, write_isr

pytestmark = pytest.mark.integration


def test_topics_brokers_and_isr_changes_reach_everyone(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        one = hearers[0]
        assert loop.status.state == "active"
        assert one.brokers == [1, 2, 3]
        tp = TopicPartition("t", 0)
        await lead_on(one, tp, 1, 2)
        # All brokers except the leader, which wrote it.
        await until(lambda: all(h.known[tp].isr == (1, 2) for h in hearers[1:]), "the smaller ISR, known to the others")
        assert await one.store.session.children(paths.ISR_CHANGES) == ()

    run_with_three(connect, scenario)


def test_a_term_that_fails_on_a_watch_event_has_a_successor(connect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        epoch = loop.status.controller_epoch
        step = Controller.step

        def failing(core: Controller, event: Event, now_ms: int) -> list[Effect]:
            if core.controller_epoch == epoch and isinstance(event, TopicRead):
                raise KeyError("a bug")
            return step(core, event, now_ms)

        monkeypatch.setattr(Controller, "step", failing)
        await hearers[0].store.create_topic(msgspec.structs.replace(RECORD, name="u", topic_id="id-2"))
        await until(lambda: all("u" in h.topics for h in hearers), "the new topic, known to all")
        assert loop.status.controller_epoch > epoch

    run_with_three(connect, scenario)


def test_all_brokers_are_informed_when_each_knows_all_others(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        assert await asyncio.to_thread(loop.wait_informed, {1, 2, 3}, 60)
        hearers[1].hold()
        async with hearing(connect, 4) as four:
            await until(lambda: bool(hearers[1].held), "an update that broker 2 does not respond to")
            await until(lambda: 4 in loop.status.informed, "the response of broker 4")
            assert not await asyncio.to_thread(loop.wait_informed, {1, 2, 3, 4}, 0)
            hearers[1].release()
            assert await asyncio.to_thread(loop.wait_informed, {1, 2, 3, 4}, 60)
            assert hearers[1].brokers == four.brokers == [1, 2, 3, 4]

    run_with_three(connect, scenario)


async def lead_on(hearer: Hearer, tp: TopicPartition, *isr: int, tell: bool = True) -> None:
    """Change the partition's ISR as its leader."""
    known = hearer.known[tp]
    state = LeaderAndIsr(hearer.broker_id, known.leader_epoch, isr, known.controller_epoch)
    written = await write_isr(
        hearer.store,
        tp,
        state,
        expected_version=hearer.versions[tp],
        leader_incarnation=hearer.incarnation,
        topic_id="id-1",
    )
    assert isinstance(written, Written), written
    if tell:
        stored = VersionedState(state, written.version, hearer.incarnation)
        await hearer.store.states.notify_isr_change(
            hearer.broker_id, [TopicStates(tp.topic, "id-1", {tp.partition: stored})]
        )


async def begin_move(store: ClusterStore, partition: int, *target: int) -> None:
    found = await store.read_topic("t")
    assert found is not None
    assert await store.update_topic(moving_record(found[0], {partition: target}), found[1]) is not None


def test_a_move_ends_in_one_write_that_every_broker_sees(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        one, _, three = hearers
        tp = TopicPartition("t", 3)
        record = msgspec.structs.replace(RECORD, assignment=(*RECORD.assignment, (1, 2)))
        assert await one.store.update_topic(record, 0) == 1
        await until(lambda: all(h.leaders() == [1, 2, 3, 1] for h in hearers), "the added partition's leader")
        await begin_move(one.store, 3, 3, 2)
        await until(lambda: all(h.decisions[tp].replicas == (3, 2, 1) for h in hearers), "the move, known to all")
        await lead_on(one, tp, 1, 2, 3)
        await until(lambda: all(h.known[tp].leader == 3 for h in hearers), "leadership moves into the target")
        assert three.decisions[tp].leaving == (1,)
        await lead_on(three, tp, 3, 2)
        await until(lambda: all(h.decisions[tp].replicas == (3, 2) for h in hearers), "the end, known to all")
        assert one.known[tp] == LeaderAndIsr(3, 2, (3, 2), loop.status.controller_epoch, lossy_epoch=2)
        found = await one.store.read_topic("t")
        assert found is not None
        assert (found[0].assignment[3], found[0].reassigning) == ((3, 2), {})

    run_with_three(connect, scenario)


def test_a_requested_election_is_performed_and_its_node_removed(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        one, two, _ = hearers
        tp = TopicPartition("t", 0)
        await begin_move(one.store, 0, 2, 1, 3)  # the order changes: broker 2 is to lead
        await until(lambda: two.decisions[tp].replicas == (2, 1, 3), "the new order")
        assert two.known[tp].leader == 1
        path = paths.election("asked")
        await one.store.request_election(path, ElectionRequest("preferred", (("t", 0),)))
        gone = asyncio.Event()
        while await one.store.session.exists(path, on_change=gone.set):
            await asyncio.wait_for(gone.wait(), 10)
        node = await one.store.states.read(tp)
        assert node is not None
        assert node.state.leader == 2, "the node must stay until the election is written"
        await until(lambda: all(h.known[tp].leader == 2 for h in hearers), "the leader, known to all")

    run_with_three(connect, scenario)


def test_more_isr_changes_than_can_be_named_reach_everyone(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        one = hearers[0]
        await lead_on(one, TopicPartition("t", 0), 1, 2, tell=False)
        await one.store.session.create(paths.isr_change(1), codecs.encode_isr_changes(()))
        await until(lambda: all(h.known[TopicPartition("t", 0)].isr == (1, 2) for h in hearers), "the smaller ISR")

    run_with_three(connect, scenario)


def test_a_standby_continues_what_the_expired_controller_began(connect: str) -> None:
    async def scenario(first: ControllerLoop, hearers: list[Hearer]) -> None:
        one, two, _ = hearers
        tp = TopicPartition("t", 0)
        async with controlled(connect) as second:
            await until(lambda: second.status.state == "standby", "the second stands by")
            await begin_move(one.store, 0, 2, 3)
            await until(lambda: one.decisions[tp].replicas == (2, 3, 1), "the first told of the move")
            await until(lambda: one.known[tp].leader == 2 and two.decisions[tp].leaving == (1,), "and moved the leader")
            await _expire_elsewhere(session_of(first))
            loops = (first, second)
            await until(
                lambda: (
                    sorted(loop.status.state for loop in loops) == ["active", "standby"]
                    and max(loop.status.controller_epoch for loop in loops) > one.known[tp].controller_epoch
                ),
                "one of them is active in a new term",
            )
            await lead_on(two, tp, 2, 3)
            await until(lambda: all(h.decisions[tp].replicas == (2, 3) for h in hearers), "the move ends")
            assert one.known[tp].controller_epoch == max(loop.status.controller_epoch for loop in loops)
            active = first if first.status.state == "active" else second
            await asyncio.to_thread(active.stop)
            other = second if active is first else first
            await until(lambda: other.status.state == "active", "the other takes over")
            assert await retire(one.store, hearers[2].registry)
            await until(lambda: one.leaders() == two.leaders() == [2, 2, 1], "and elects")

    run_with_three(connect, scenario)


def test_a_retired_broker_is_replaced_and_leads_after_its_return(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        one, two, three = hearers
        assert await retire(two.store, one.registry)
        # Not by the end of its session, which continues.
        await until(lambda: two.leaders() == three.leaders() == [2, 2, 3], "broker 1 is replaced")
        assert two.brokers == [2, 3]
        one.registry = BrokerRegistry(one.store.session, one.registry.registration)
        await one.registry.start()
        await until(lambda: one.leaders() == [2, 2, 3] and two.brokers == [1, 2, 3], "broker 1 is back as a follower")
        assert one.updates[-1].incarnation == one.incarnation

    run_with_three(connect, scenario)


def test_two_of_three_retired_brokers_are_replaced_at_once(connect: str) -> None:
    """The brokers' supervisors saw them exit: no broker waits for a session timeout, as it would if they disappeared
    together."""

    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        one, two, three = hearers
        for hearer in (one, two):
            assert await retire(three.store, hearer.registry)
        await until(lambda: three.leaders() == [3, 3, 3], "both are replaced", timeout_s=SESSION_TIMEOUT_MS / 2000)
        assert three.brokers == [3]

    run_with_three(connect, scenario)


def test_an_end_known_after_expired_registrations_counts(connect: str) -> None:
    """The brokers' sessions expire before their supervisors can report the ends. Most brokers disappear together, so
    the controller waits. Then only the marks arrive."""
    held_for_ms = 60_000

    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        one, two, three = hearers
        for hearer in (one, two):
            await hearer.registry.close()
        await three.store.session.multi([Delete(paths.broker(1)), Delete(paths.broker(2))])
        await until(
            lambda: [b.broker_id for b in loop.status.brokers] == [3], "the controller knows that they are gone"
        )
        assert three.leaders() == [1, 2, 3], "the controller must wait for them"
        for hearer in (one, two):
            assert await retire(three.store, hearer.registry)
            assert await retire(three.store, hearer.registry), "the report is repeated after a lost response"
        await until(lambda: three.leaders() == [3, 3, 3], "both are replaced", timeout_s=held_for_ms / 2000)

    run_with_three(connect, scenario, session_timeout_ms=held_for_ms)


def test_a_controlled_stop_and_a_deletion_reach_all_brokers(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        one, two, _ = hearers
        await one.registry.announce_stopping()
        await until(lambda: one.leaders() == [2, 2, 3] and two.brokers == [2, 3], "broker 1 is relieved")
        assert all(1 in state.isr for state in two.known.values()), "only its leaders remove it from the ISRs"
        await two.store.request_delete_topic("t", "id-1")
        await until(lambda: all(h.topics == set() and not h.known for h in hearers), "the topic is gone everywhere")
        assert await two.store.topic_names() == ()
        assert await two.store.session.children(paths.DELETE_TOPICS) == ()
        assert await two.store.session.children(paths.TOPIC_IDS) == ()
        await two.store.create_topic(TopicRecord("t", "id-2", ((2, 3),), ()))
        await until(lambda: two.leaders() == [2], "a new topic of that name")

    run_with_three(connect, scenario)


def test_controller_never_regained_after_session_expiry(connect: str) -> None:
    """The controller gets a new epoch, and a broker has failed in between."""

    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        _, two, three = hearers
        before = loop.status.controller_epoch
        holder = await two.store.session.get(paths.CONTROLLER)
        session = session_of(loop)
        assert session.session_id == holder.ephemeral_owner
        await _expire_elsewhere(session)
        assert await retire(two.store, hearers[0].registry)
        await until(lambda: loop.status.state == "active" and loop.status.controller_epoch > before, "a new term")
        await until(lambda: two.leaders() == three.leaders() == [2, 2, 3], "the new term elects")
        assert two.updates[-1].controller_epoch == loop.status.controller_epoch

    run_with_three(connect, scenario)


def test_a_zookeeper_restart_moves_no_leader_and_loses_no_event(tmp_path: Path) -> None:
    server = EmbeddedZookeeper.start(tmp_path)

    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        _, two, three = hearers
        epoch = loop.status.controller_epoch
        states = [session_of(loop), *(h.store.session for h in hearers)]
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        await until(lambda: all(s.state is SessionState.DISCONNECTED for s in states), "everybody noticed")
        again = await asyncio.to_thread(EmbeddedZookeeper.start, tmp_path)
        try:
            await until(lambda: all(s.state is SessionState.CONNECTED for s in states), "everybody is back")
            assert {s.generation for s in states} == {1}, "the sessions must be the same"
            await two.store.create_topic(TopicRecord("u", "id-u", ((3, 2),), ()))
            await until(lambda: "u" in three.topics and "u" in two.topics, "a topic made afterwards")
            assert two.leaders() == three.leaders() == [1, 2, 3, 3]
            assert {state.leader_epoch for state in two.known.values()} == {0}
            assert loop.status.controller_epoch == epoch
        finally:
            # The sessions need a server to close.
            cleanup.append(again)

    cleanup: list[EmbeddedZookeeper] = []
    try:
        # A session's time begins when the server has loaded it, and a JVM's first requests are slow. The sessions are
        # long, because this test is about what survives a restart.
        run_with_three(server.connect, scenario, session_timeout_ms=6000)
    finally:
        for found in (server, *cleanup):
            found.stop()


def test_a_standby_takes_over_and_a_deposed_controller_cannot_write(connect: str) -> None:
    async def run() -> None:
        async with hearing(connect, 1) as one, controlled(connect) as first:
            await until(lambda: first.status.state == "active", "the first is active")
            async with controlled(connect) as second:
                await until(lambda: second.status.state == "standby", "the second stands by")
                await one.store.session.delete(paths.CONTROLLER)  # as an operator may do
                await until(
                    lambda: (
                        {first.status.state, second.status.state} == {"active", "standby"}
                        and 2 in {first.status.controller_epoch, second.status.controller_epoch}
                    ),
                    "one of them is active under a new epoch",
                )
                active, standby = (first, second) if first.status.state == "active" else (second, first)
                await asyncio.to_thread(active.stop)
                await until(lambda: standby.status.state == "active", "the other takes over")
                await one.store.create_topic(TopicRecord("t", "id-1", ((1,),), ()))
                await until(lambda: one.leaders() == [1], "and leads")
                assert one.known[TopicPartition("t", 0)].controller_epoch == standby.status.controller_epoch

    asyncio.run(run())


def test_a_power_cut_elects_the_longest_log_and_trusts_afterwards(connect: str) -> None:
    async def run() -> None:
        tp = TopicPartition("t", 0)
        async with hearing(connect, 1) as one, hearing(connect, 2), controlled(connect):
            await one.store.create_topic(TopicRecord("t", "id-1", ((1, 2),), ()))
            await until(lambda: one.leaders() == [1], "a leader")
        async with (
            hearing(connect, 1, trusted=False) as one,
            hearing(connect, 2, trusted=False) as two,
            controlled(connect),
        ):
            one.log_ends, two.log_ends = {tp: (0, 10)}, {tp: (0, 20)}
            await until(lambda: one.leaders() == [2], "the one with the longer log leads")
            assert one.known[tp].isr == (2,)
            deadline = asyncio.get_running_loop().time() + 5
            while await one.store.session.children(paths.UNTRUSTED):
                assert asyncio.get_running_loop().time() < deadline, "the marks must be removed"
                await asyncio.sleep(0.02)

    asyncio.run(run())


def test_another_cluster_and_no_zookeeper_are_clear_errors(connect: str) -> None:
    async def make() -> None:
        async with opened(connect) as store:
            await store.cluster_id()

    asyncio.run(make())
    wrong = ControllerLoop(connect, "another")
    wrong.start()
    with pytest.raises(ClusterError, match="expected another"):
        wrong.wait_ready(10)
    wrong.stop()
    settings = {"zookeeper.connection.timeout.ms": "100"}
    nowhere = ControllerLoop("127.0.0.1:1", settings=settings)
    nowhere.start()
    with pytest.raises(ClusterError, match=r"no ZooKeeper responded at 127\.0\.0\.1:1"):
        nowhere.wait_ready(0.5)
    nowhere.stop()


def test_settings_reach_the_core() -> None:
    keys = {"unclean.recovery.timeout.ms": "1234", "zookeeper.session.timeout.ms": "900", "min.insync.replicas": "1"}
    loop = ControllerLoop("127.0.0.1:1", settings=keys)
    assert loop.settings == ControllerSettings(900, 1234, {"min.insync.replicas": "1"}, 30_000, -1)
    keys = {"preferred.leader.rebalance": "false", "broker.replace.after.ms": "60000"}
    settings = ControllerLoop("127.0.0.1:1", settings=keys).settings
    assert (settings.preferred_leader_rebalance_interval_ms, settings.broker_replace_after_ms) == (0, 60_000)
    assert ControllerLoop("127.0.0.1:1").settings.unclean_recovery_timeout_ms == 30_000


def test_status_changes_are_reported(zookeeper_server: EmbeddedZookeeper, connect: str) -> None:
    seen: list[ControllerStatus] = []
    loop = ControllerLoop(connect, on_change=seen.append)
    loop.start()
    assert loop.wait_ready(10).state == "active"
    loop.stop()
    loop.stop()
    assert seen[0].state == "active"
    assert seen[-1].state == "stopped"


def session_of(loop: ControllerLoop) -> ZkSession:
    """Return the controller's session, which belongs to its thread. The test only reads it."""
    found = loop.session
    assert found is not None
    return found


async def _expire_elsewhere(session: ZkSession) -> None:
    """Expire the session of another thread at the server.

    The two connections take it from each other until a thief's request to close it arrives while the thief has it.
    """
    generation, client_id = session.generation, session.client_id
    end = time.monotonic() + 60
    while session.generation == generation:
        assert time.monotonic() < end, "the session did not expire"
        with suppress(ClusterError):
            thief = await ZkSession.open(
                session.connect_string,
                session_timeout_ms=session.session_timeout_ms,
                connect_timeout_ms=3000,
                client_id=client_id,
            )
            await thief.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(until(lambda: session.generation != generation, "a new session"), 2)
