"""Tests of the controller's writes on a real ZooKeeper: fenced by epoch, bound to topic and version, repeatable."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from sparklog.errors import BrokerError
from sparklog.model import LeaderAndIsr, TopicPartition, TopicStates, VersionedState
from sparklog.zk import codecs, paths
from sparklog.zk.broker_registry import BrokerRegistry
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.controller_store import NO_NODE, ControllerStore, EpochLost, StateChange, StateOutcome, WriteSuperseded
from sparklog.zk.session import Node, ZkSession
from sparklog.zk.state_store import FateUnknown, NodeGone, Written

from .support import STATE, TOPIC, TP, broker, opened, retire

NEXT = LeaderAndIsr(2, 1, (2, 3), 2)
ANEW = msgspec.structs.replace(TOPIC, topic_id="id-2")
WRITES = ((TP, STATE, NO_NODE, "id-1"),)


async def write(
    store: ControllerStore, *writes: tuple[TopicPartition, LeaderAndIsr, int, str]
) -> Sequence[StateOutcome | None]:
    """Send all writes and wait for all outcomes."""
    outcomes: dict[int, StateOutcome | None] = {}
    done = asyncio.Event()

    def outcome(index: int, found: StateOutcome | None) -> None:
        outcomes[index] = found
        if len(outcomes) == len(writes):
            done.set()

    for index, (tp, state, version, topic_id) in enumerate(writes):
        store.write_state(
            tp,
            state,
            topic_id=topic_id,
            leader_incarnation=7,
            expected_version=version,
            on_outcome=lambda _, found, index=index: outcome(index, found),  # type: ignore[misc]
        )
    await asyncio.wait_for(done.wait(), 10)
    return [outcomes[index] for index in range(len(writes))]


async def void_request(cluster: ClusterStore) -> None:
    """Request the deletion of a topic that no longer exists."""
    await cluster.session.create(paths.delete_topic("orders"), codecs.encode(codecs.DeletionRequest("id-1")))


async def elected(session: ZkSession) -> ControllerStore:
    store = ControllerStore(session)
    assert await store.elect(f"c-{session.session_id}") is not None
    return store


def test_epochs_grow_and_only_one_controller_is_elected(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as one, opened(connect) as two:
            first, second = ControllerStore(one.session), ControllerStore(two.session)
            epochs = await asyncio.gather(first.elect("c1"), second.elect("c2"))
            assert sorted(epochs, key=str) == [1, None]
            winner, loser = (first, second) if epochs[0] == 1 else (second, first)
            again = ControllerStore(winner.session)
            assert await again.elect("again") == 1, "a repeated claim, whose first response may have been lost"
            await winner.session.delete(paths.CONTROLLER)
            assert await loser.elect("c") == 2

    asyncio.run(scenario())


def test_no_epoch_serves_two_terms(connect: str) -> None:
    """A term that ends while ZooKeeper is unreachable leaves its claim, and the session may return with it."""

    async def scenario() -> None:
        async with opened(connect) as one, opened(connect) as other:
            store = ControllerStore(one.session)
            await other.create_topic(TOPIC)
            assert await store.elect("c1") == 1
            assert await write(store, WRITES[0]) == [Written(0)]
            assert await store.elect("c1") == 2
            assert await store.elect("c1") == 3
            node = await other.session.get(paths.CONTROLLER)
            assert codecs.decode(paths.CONTROLLER, node.data, codecs.ControllerNode).controller_epoch == 3
            assert await write(store, (TP, NEXT, 0, "id-1")) == [Written(1)], "its writes must carry the new epoch"
            assert await ControllerStore(other.session).elect("c2") is None

    asyncio.run(scenario())


def test_outcomes_of_pipelined_writes_are_distinguished(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as cluster:
            store = await elected(cluster.session)
            await cluster.create_topic(TOPIC)
            other = TopicPartition("orders", 1)
            assert await write(
                store,
                (TP, STATE, NO_NODE, "id-1"),
                (TP, NEXT, 0, "id-1"),  # pipelined after the creation
                (TP, NEXT, 0, "id-1"),  # a late write
                (TP, STATE, NO_NODE, "id-1"),  # the node exists
                (other, STATE, NO_NODE, "id-0"),  # an earlier topic with this name
                (TopicPartition("none", 0), STATE, NO_NODE, "id-x"),
            ) == [Written(0), Written(1), None, None, NodeGone(), NodeGone()]
            assert await store.levels.states([TP, other]) == {TP: VersionedState(NEXT, 1, 7), other: None}

    asyncio.run(scenario())


def test_a_record_and_its_states_are_written_atomically(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as cluster:
            store = await elected(cluster.session)
            await cluster.create_topic(TOPIC)
            other = TopicPartition("orders", 1)
            await write(store, (TP, STATE, NO_NODE, "id-1"), (other, STATE, NO_NODE, "id-1"))
            moved = msgspec.structs.replace(TOPIC, assignment=((2, 3), (2, 3, 1)))
            late = [StateChange(TP, NEXT, 7, 0), StateChange(other, NEXT, 7, 5)]
            assert isinstance(await store.write_topic(moved, 0, late), WriteSuperseded)
            assert isinstance(await store.write_topic(moved, 3, []), WriteSuperseded)
            other_topic = msgspec.structs.replace(moved, topic_id="id-0")
            assert isinstance(await store.write_topic(other_topic, 0, []), WriteSuperseded)
            assert await store.levels.topic("orders") == (TOPIC, 0)
            assert await store.write_topic(moved, 0, [StateChange(TP, NEXT, 7, 0)]) == Written(1)
            assert await store.levels.topic("orders") == (moved, 1)
            assert await store.levels.states([TP, other]) == {
                TP: VersionedState(NEXT, 1, 7),
                other: VersionedState(STATE, 0, 7),
            }
            large = msgspec.structs.replace(moved, config={"x": "y" * 1_000_000})
            with pytest.raises(BrokerError, match="at most"):
                await store.write_topic(large, 1, [])

    asyncio.run(scenario())


def test_requests_for_elections_are_read_and_dropped(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as cluster:
            store = await elected(cluster.session)
            asked = codecs.ElectionRequest("preferred", (("orders", 0),))
            await cluster.request_election(paths.election("one"), asked)
            await cluster.request_election(paths.election("other"), codecs.ElectionRequest("unclean"))
            assert (await store.levels.elections())["one"] == asked
            await store.drop_election("one")
            await store.drop_election("one")
            assert await store.levels.elections() == {"other": codecs.ElectionRequest("unclean")}

    asyncio.run(scenario())


def test_an_election_request_ends_with_its_requesters_session(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as one:
            async with opened(connect) as other:
                await other.request_election(paths.election("one"), codecs.ElectionRequest("unclean"))
                assert set(await ControllerStore(one.session).levels.elections()) == {"one"}
            assert await ControllerStore(one.session).levels.elections() == {}

    asyncio.run(scenario())


def told(version: int) -> TopicStates:
    return TopicStates(TP.topic, "id-1", {TP.partition: VersionedState(STATE, version, 1)})


def test_isr_changes_with_and_without_partitions_are_read(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as leader:
            store = ControllerStore(leader.session)
            await leader.session.create(paths.isr_change(1), b'{"version":1,"partitions":[["orders",0]]}')
            await leader.states.notify_isr_change(2, [told(1)])
            assert await store.levels.isr_changes() == ({"1": 0, "2": 0}, (told(1),), (TP,))
            await leader.session.create(paths.isr_change(3), codecs.encode_isr_changes(()))
            assert await store.levels.isr_changes() == ({"1": 0, "2": 0, "3": 0}, (told(1),), None)

    asyncio.run(scenario())


def test_an_isr_change_extended_after_it_was_read_stays(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as leader, opened(connect) as two:
            store = await elected(two.session)
            await leader.states.notify_isr_change(1, [told(1)])
            await leader.states.notify_isr_change(2, [told(0)])
            seen = await store.levels.isr_changes()
            assert (seen.reported, seen.named) == ((told(1), told(0)), ())
            await leader.states.notify_isr_change(1, [told(2)])  # another write of the same ISR
            assert not await store.delete_isr_changes(seen.nodes)
            seen = await store.levels.isr_changes()
            assert (list(seen.nodes), seen.reported, seen.named) == (["1"], (told(2),), ())
            assert await store.delete_isr_changes(seen.nodes)
            assert await store.levels.isr_changes() == ({}, (), ())

    asyncio.run(scenario())


def test_a_deposed_controller_writes_nothing(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as one, opened(connect) as two:
            deposed = await elected(one.session)
            await one.create_topic(TOPIC)
            await one.session.delete(paths.CONTROLLER)
            await elected(two.session)
            await two.states.notify_isr_change(1, [told(1)])
            seen = await deposed.levels.isr_changes()
            assert seen.reported == (told(1),)
            assert await write(deposed, *WRITES) == [EpochLost()]
            assert await deposed.write_topic(TOPIC, 0, []) == EpochLost()
            assert not await deposed.delete_topic("orders", "id-1")
            await deposed.delete_isr_changes(seen.nodes)
            assert await two.read_topic("orders") is not None
            assert len(await two.session.children(paths.ISR_CHANGES)) == 1, "the node must stay for the new controller"

    asyncio.run(scenario())


def test_writes_without_a_connection_have_an_unknown_outcome(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as cluster:
            store = await elected(cluster.session)
            await cluster.session.close()
            assert await write(store, *WRITES) == [FateUnknown(sent=False)]

    asyncio.run(scenario())


def test_a_topics_deletion_removes_everything_and_may_be_repeated(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as cluster:
            store = await elected(cluster.session)
            await cluster.create_topic(TOPIC)
            await write(store, *WRITES)  # one of its two partitions has a state
            await cluster.request_delete_topic("orders", "id-1")
            assert await store.levels.deletions() == {"orders": "id-1"}
            assert [(t.record, t.states) for t in (await store.levels.topics()).topics] == [
                (TOPIC, {0: VersionedState(STATE, 0, 7)})
            ]
            assert await store.delete_topic("orders", "id-1")
            assert (await store.levels.topics()).topics == ()
            assert await store.levels.deletions() == {}
            assert await cluster.session.children(paths.TOPIC_IDS) == ()
            assert await store.delete_topic("orders", "id-1")
            await cluster.create_topic(TOPIC)
            assert await write(store, *WRITES) == [Written(0)], "its paths must be free"

    asyncio.run(scenario())


def test_a_repeated_deletion_spares_a_recreated_topic(connect: str) -> None:
    """The connection broke during the last step, and the topic was created again before the controller returned."""

    async def scenario() -> None:
        async with opened(connect) as cluster:
            store = await elected(cluster.session)
            await cluster.create_topic(TOPIC)
            assert await store.delete_topic("orders", "id-1")
            await cluster.create_topic(ANEW)
            assert await write(store, (TP, STATE, NO_NODE, "id-2")) == [Written(0)]
            await cluster.request_delete_topic("orders", "id-2")
            assert await store.delete_topic("orders", "id-1")
            assert [(t.record, t.states) for t in (await store.levels.topics()).topics] == [
                (ANEW, {0: VersionedState(STATE, 0, 7)})
            ]
            assert await store.levels.deletions() == {"orders": "id-2"}, "nor is what was asked of it forgotten"

    asyncio.run(scenario())


def test_a_repeated_drop_spares_another_topics_deletion_request(connect: str) -> None:
    """The controller repeats a request after a lost response."""

    async def scenario() -> None:
        async with opened(connect) as cluster:
            store = await elected(cluster.session)
            await store.drop_deletion_request("orders", "id-1")
            await cluster.create_topic(ANEW)
            await cluster.request_delete_topic("orders", "id-2")
            await store.drop_deletion_request("orders", "id-1")
            assert await store.levels.deletions() == {"orders": "id-2"}
            await store.drop_deletion_request("orders", "id-2")
            assert await store.levels.deletions() == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("how_often", [1, 2])
def test_dropping_a_deletion_request_spares_its_replacement(
    connect: str, monkeypatch: pytest.MonkeyPatch, how_often: int
) -> None:
    """The replacement may come at any step of the controller's drop."""

    async def scenario() -> None:
        async with opened(connect) as cluster, opened(connect) as other:
            store = await elected(cluster.session)
            await void_request(cluster)
            await cluster.create_topic(ANEW)
            get, is_read, go_on = cluster.session.get, asyncio.Event(), asyncio.Event()

            async def slow(path: str) -> Node:
                monkeypatch.setattr(cluster.session, "get", get)
                node = await get(path)
                is_read.set()
                await go_on.wait()
                return node

            monkeypatch.setattr(cluster.session, "get", slow)
            first = asyncio.create_task(store.drop_deletion_request("orders", "id-1"))
            await is_read.wait()
            more = {asyncio.create_task(store.drop_deletion_request("orders", "id-1")) for _ in range(how_often - 1)}
            if more:
                await asyncio.wait(more, timeout=0.3)  # the operations that can end before the first one
            await other.request_delete_topic("orders", "id-2")
            go_on.set()
            await asyncio.gather(first, *more)
            assert await store.levels.deletions() == {"orders": "id-2"}

    asyncio.run(scenario())


def test_a_deposed_controller_drops_no_deletion_request(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as cluster, opened(connect) as other:
            deposed = await elected(cluster.session)
            await void_request(cluster)
            await cluster.session.delete(paths.CONTROLLER)
            store = await elected(other.session)
            await deposed.drop_deletion_request("orders", "id-1")
            assert await store.levels.deletions() == {"orders": "id-1"}
            await store.drop_deletion_request("orders", "id-1")
            assert await store.levels.deletions() == {}

    asyncio.run(scenario())


def test_a_deletion_request_for_an_earlier_topic_is_ignored(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as cluster:
            store = await elected(cluster.session)
            await void_request(cluster)
            await cluster.create_topic(ANEW)
            changed = asyncio.Event()
            await cluster.session.children(paths.DELETE_TOPICS, on_change=changed.set)
            await cluster.request_delete_topic("orders", "id-2")
            await asyncio.wait_for(changed.wait(), 10)
            assert await store.levels.deletions() == {"orders": "id-2"}

    asyncio.run(scenario())


def test_a_retired_broker_stays_known_until_it_registers_again(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as cluster:
            store = await elected(cluster.session)
            registry = BrokerRegistry(cluster.session, broker(1))
            await registry.start()
            assert not await retire(cluster, registry, pid=registry.registration.pid + 1)
            assert await store.levels.retired(()) == frozenset(), "what was tried and refused proves nothing"
            assert await retire(cluster, registry)
            assert await store.levels.retired(()) == {1}
            assert await store.levels.retired({1}) == frozenset()
            await registry.close()
            again = BrokerRegistry(cluster.session, broker(1))
            await again.start()
            await again.close()
            await cluster.session.delete(paths.broker(1))
            assert await store.levels.retired(()) == frozenset(), "this incarnation has merely vanished"

    asyncio.run(scenario())


def test_a_broker_is_untrusted_while_its_mark_exists(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as cluster:
            store = await elected(cluster.session)
            registry = BrokerRegistry(cluster.session, broker(1, trusted=False))
            incarnation = await registry.start()
            assert [found.trusted for found in await store.levels.brokers()] == [False]
            await store.trust_broker(1, incarnation - 1)
            assert [found.trusted for found in await store.levels.brokers()] == [False], "meant for another incarnation"
            await store.trust_broker(1, incarnation)
            assert [found.trusted for found in await store.levels.brokers()] == [True]
            await store.trust_broker(1, incarnation)
            await registry.announce_stopping()
            assert await store.levels.stopping() == {1: incarnation}
            await registry.close()

    asyncio.run(scenario())


def test_brokers_without_a_registration_are_found_by_their_last_one(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as cluster, opened(connect) as doubted:
            store = await elected(cluster.session)
            registry = BrokerRegistry(cluster.session, broker(1, port=9191))
            first = await registry.start()
            assert await store.levels.absent({1}) == ()
            await registry.close()
            await cluster.session.delete(paths.broker(1))
            [found] = await store.levels.absent(())
            assert (found.host, found.port, found.incarnation, found.trusted) == ("h1", 9191, first, True)
            again = BrokerRegistry(cluster.session, broker(1, port=9192))
            await again.start()
            await again.close()
            await cluster.session.delete(paths.broker(1))
            [found] = await store.levels.absent(())
            assert (found.port, found.incarnation) == (9192, first + 1)
            untrusted = BrokerRegistry(doubted.session, broker(2, trusted=False))
            await untrusted.start()
            await untrusted.close()
            await cluster.session.ensure(paths.incarnation(3))  # as from an earlier release
            await cluster.session.delete(paths.broker(2))
            assert [found.broker_id for found in await store.levels.absent(())] == [1]

    asyncio.run(scenario())
