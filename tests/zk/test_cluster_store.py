"""Tests of the typed operations on a real ZooKeeper: compare-and-set, incarnation checks, ids, topics."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.model import LeaderAndIsr, TopicStates, VersionedState
from sparklog.zk import codecs, paths
from sparklog.zk.broker_registry import BrokerRegistry
from sparklog.zk.cluster_store import BarrierJob
from sparklog.zk.session import Delete, Node
from sparklog.zk.state_store import FateUnknown, NodeGone, WriteRefused, Written

from .support import STATE, TOPIC, TP, broker, expire, opened, put_state, until, write_isr


def test_write_isr_is_a_compare_and_set(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            await put_state(store)
            shrunk = LeaderAndIsr(1, 0, (1, 2), 1)
            written = await write_isr(store, TP, shrunk, expected_version=0, leader_incarnation=4)
            assert written == Written(1)
            assert await store.states.read(TP) == VersionedState(shrunk, 1, 4)
            late = await write_isr(store, TP, STATE, expected_version=0, leader_incarnation=4)
            assert isinstance(late, WriteRefused)
            assert late.found == VersionedState(shrunk, 1, 4)
            assert "version 0" in late.reason

    asyncio.run(scenario())


def test_an_isr_write_that_adds_names_the_added_incarnation(connect: str) -> None:
    """A follower that restarts while the leader is about to add it is not added: its log may be shorter now."""

    async def scenario() -> None:
        async with opened(connect) as store, opened(connect) as follower:
            await put_state(store, LeaderAndIsr(1, 0, (1,), 1))
            registry = BrokerRegistry(follower.session, broker(2))
            incarnation = await registry.start()
            grown = LeaderAndIsr(1, 0, (1, 2), 1)
            await expire(follower.session)
            await until(lambda: registry.incarnation != incarnation, "a new incarnation")
            added = [(2, incarnation)]
            refused = await write_isr(store, TP, grown, expected_version=0, leader_incarnation=1, added=added)
            assert isinstance(refused, WriteRefused)
            assert refused.found.version == 0, "the node must be unchanged: only the follower has changed"
            assert refused.reason == "broker 2 is no longer incarnation 1"
            added = [(2, registry.incarnation)]
            assert await write_isr(store, TP, grown, expected_version=0, leader_incarnation=1, added=added) == Written(
                1
            )
            await registry.close()

    asyncio.run(scenario())


def test_an_isr_write_for_a_deleted_topic_names_the_reason(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            assert await write_isr(store, TP, STATE, expected_version=0, leader_incarnation=1) == NodeGone()
            assert await store.states.read(TP) is None

    asyncio.run(scenario())


def test_an_isr_write_for_a_recreated_topic_is_refused(connect: str) -> None:
    """The old leader was away. Paths and versions are the same as before, and only the topic id differs."""

    async def scenario() -> None:
        async with opened(connect) as store:
            again = msgspec.structs.replace(TOPIC, topic_id="id-2")
            await store.create_topic(again)
            await put_state(store)
            for topic_id, outcome in (("id-1", NodeGone()), ("id-2", Written(1))):
                assert outcome == await write_isr(
                    store, TP, STATE, expected_version=0, leader_incarnation=1, topic_id=topic_id
                )

    asyncio.run(scenario())


def test_write_isr_without_a_connection_is_not_sent(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            await store.session.close()
            outcome = await write_isr(store, TP, STATE, expected_version=0, leader_incarnation=1)
            assert outcome == FateUnknown(sent=False)

    asyncio.run(scenario())


def test_two_leaders_writing_at_once_leave_one_winner(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as first, opened(connect) as second:
            await put_state(first)
            for version in range(20):
                one, two = await asyncio.gather(
                    write_isr(first, TP, STATE, expected_version=version, leader_incarnation=1),
                    write_isr(second, TP, STATE, expected_version=version, leader_incarnation=2),
                )
                won = [outcome for outcome in (one, two) if outcome == Written(version + 1)]
                lost = [outcome for outcome in (one, two) if isinstance(outcome, WriteRefused)]
                assert len(won) == len(lost) == 1

    asyncio.run(scenario())


def test_read_state_again_waits_through_an_expiry(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            await put_state(store)
            reading = asyncio.gather(expire(store.session), store.states.read_again(TP))
            assert (await asyncio.wait_for(reading, 10))[1] == VersionedState(STATE, 0, 1)

    asyncio.run(scenario())


def test_topics_are_created_once_and_read_back(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            await store.create_topic(TOPIC)
            assert await store.read_topic("orders") == (TOPIC, 0)
            assert await store.topic_names() == ("orders",)
            with pytest.raises(BrokerError) as refused:
                await store.create_topic(TOPIC)
            assert refused.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
            wider = msgspec.structs.replace(TOPIC, assignment=(*TOPIC.assignment, (3, 1, 2)))
            assert await store.update_topic(wider, 0) == 1
            assert await store.update_topic(wider, 0) is None
            assert await store.read_topic("nothing") is None

    asyncio.run(scenario())


def test_a_change_for_a_deleted_topic_spares_the_recreated_one(connect: str) -> None:
    """Both records have version 0."""
    recreated = msgspec.structs.replace(TOPIC, topic_id="id-2")

    async def scenario() -> None:
        async with opened(connect) as store:
            await store.create_topic(TOPIC)
            found = await store.read_topic("orders")
            assert found is not None
            await store.session.multi(
                [Delete(path) for path in (paths.partitions("orders"), paths.topic("orders"), paths.topic_id("id-1"))]
            )
            await store.create_topic(recreated)
            changed = msgspec.structs.replace(found[0], config={"retention.ms": "1000"})
            assert await store.update_topic(changed, found[1]) is None
            assert await store.read_topic("orders") == (recreated, 0)

    asyncio.run(scenario())


def test_a_too_large_topic_record_is_refused_before_it_is_sent(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            huge = msgspec.structs.replace(TOPIC, assignment=((1001, 1002, 1003),) * 100_000)
            with pytest.raises(BrokerError) as refused:
                await store.create_topic(huge)
            assert refused.value.code is ErrorCode.INVALID_PARTITIONS
            assert "100000 partitions" in str(refused.value)

    asyncio.run(scenario())


def test_ids_are_never_handed_out_twice(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as one, opened(connect) as two:
            ids = await asyncio.gather(*(store.allocate_broker_id() for store in (one, two) * 5))
            assert sorted(ids) == list(range(10))
            blocks = await asyncio.gather(*(store.next_producer_ids(now_s=0) for store in (one, two) * 3))
            assert sorted(block.start for block in blocks) == [i * 1000 for i in range(6)]
            found = await asyncio.gather(one.cluster_id(), two.cluster_id())
            assert found[0] == found[1] == await two.cluster_id(create=False)

    asyncio.run(scenario())


def test_producer_ids_stay_distinct_when_their_counter_decreases(connect: str) -> None:
    """ZooKeeper is restored from an older copy, while the clock has advanced."""

    async def scenario() -> None:
        async with opened(connect) as store:
            await store.session.set(paths.PRODUCER_IDS, b'{"value": 5000}')
            first = await store.next_producer_ids(now_s=1_800_000_000.9)
            second = await store.next_producer_ids(now_s=1_800_000_000.9)
            assert (first.start, second.start) == (1_800_000_000 * 2**20, first.stop)
            await store.session.set(paths.PRODUCER_IDS, b'{"value": 5000}')
            assert (await store.next_producer_ids(now_s=1_800_000_001)).start > second.stop
            # A clock that goes back, or a counter ahead of it, gives no number twice.
            ahead = await store.next_producer_ids(now_s=1_700_000_000)
            assert ahead.start == 1_800_000_001 * 2**20 + 1000
            # A number that a broker has seen counts as well.
            seen = ahead.stop + 7
            assert (await store.next_producer_ids(now_s=1_700_000_000, above=seen)).start == seen
            # But a number that no clock can reach does not.
            damaged = await store.next_producer_ids(now_s=1_700_000_000, above=2**63)
            assert damaged.start == seen + len(ahead)

    asyncio.run(scenario())


def test_a_missing_cluster_is_named_in_the_error(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            with pytest.raises(ClusterError, match="there is no sparklog cluster"):
                await store.cluster_id(create=False)

    asyncio.run(scenario())


def test_isr_changes_do_not_accumulate_without_a_controller(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:

            async def noted(broker_id: int) -> tuple[TopicStates, ...]:
                return codecs.decode_isr_changes(
                    "", (await store.session.get(paths.isr_change(broker_id))).data
                ).reported

            def told(*versions: int, topic: str = "b", topic_id: str = "id") -> TopicStates:
                states = enumerate(versions)
                return TopicStates(topic, topic_id, {p: VersionedState(STATE, version) for p, version in states})

            for version in range(30):
                await store.states.notify_isr_change(1, [told(version, 5), told(version, topic_id="other")])
            await store.states.notify_isr_change(1, [told(3)])  # repeated after another one overtook it
            others = [told(number, topic=f"t{number}") for number in range(3)]
            await asyncio.gather(*(store.states.notify_isr_change(2, [other]) for other in others))
            assert sorted(await store.session.children(paths.ISR_CHANGES)) == ["1", "2"]
            assert await noted(1) == (told(29, 5), told(29, topic_id="other"))
            assert sorted(await noted(2), key=lambda said: said.topic) == others
            await store.states.notify_isr_change(2, [told(*range(20_000))])
            assert await noted(2) == (), "too many partitions to name: any"
            await store.states.notify_isr_change(2, [told(1)])
            assert await noted(2) == ()

    asyncio.run(scenario())


def test_requests_to_the_controller_are_nodes(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            await store.create_topic(TOPIC)
            await store.request_delete_topic("orders", "id-1")
            await store.request_delete_topic("orders", "id-1")
            assert await store.session.children(paths.DELETE_TOPICS) == ("orders",)

    asyncio.run(scenario())


def test_a_late_deletion_request_spares_that_of_a_recreated_topic(connect: str) -> None:
    recreated = msgspec.structs.replace(TOPIC, topic_id="id-2")

    async def scenario() -> None:
        async with opened(connect) as store:
            await store.create_topic(recreated)
            await store.request_delete_topic("orders", "id-2")
            await store.request_delete_topic("orders", "id-1")  # from a broker that does not know the second topic
            path = paths.delete_topic("orders")
            assert codecs.decode(path, (await store.session.get(path)).data, codecs.DeletionRequest).topic_id == "id-2"

    asyncio.run(scenario())


def test_a_deletion_request_for_a_missing_topic_spares_its_successors(
    connect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client finds a void request. Before it replaces the request, another topic exists with a valid request."""
    first, recreated = (msgspec.structs.replace(TOPIC, topic_id=topic_id) for topic_id in ("id-2", "id-3"))

    async def scenario() -> None:
        async with opened(connect) as store, opened(connect) as other:
            path, get = paths.delete_topic("orders"), store.session.get
            await store.session.create(path, codecs.encode(codecs.DeletionRequest("id-1")))
            await store.create_topic(first)

            async def late(path: str) -> Node:
                monkeypatch.setattr(store.session, "get", get)
                node = await get(path)
                gone = (paths.partitions("orders"), paths.topic("orders"), paths.topic_id("id-2"))
                await other.session.multi([Delete(path) for path in gone])
                await other.create_topic(recreated)
                await other.request_delete_topic("orders", "id-3")
                return node

            monkeypatch.setattr(store.session, "get", late)
            await store.request_delete_topic("orders", "id-2")
            assert codecs.decode(path, (await get(path)).data, codecs.DeletionRequest).topic_id == "id-3"

    asyncio.run(scenario())


def test_a_second_driver_is_refused_while_the_first_is_registered(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as first, opened(connect) as second:
            assert await first.claim_driver("h1", 10) == 1
            assert await first.claim_driver("h1", 10) == 1, "a repeated claim of the same driver"
            with pytest.raises(ClusterError, match="h1 pid 10, driver epoch 1"):
                await second.claim_driver("h2", 20)
            await first.session.close()
            assert await second.claim_driver("h2", 20) == 2

    asyncio.run(scenario())


def at_work(driver_epoch: int, generation: int) -> BarrierJob:
    return BarrierJob(at_work=codecs.GenerationName(driver_epoch, generation))


def test_a_generation_is_awaited_from_its_claim_to_its_report(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as driver, opened(connect) as store:

            async def put(path: str, epoch: int, generation: int) -> None:
                value = codecs.encode(codecs.GenerationName(epoch, generation))
                if await driver.session.exists(path):
                    await driver.session.set(path, value)
                else:
                    await driver.session.create(path, value)

            await put(paths.DIRECTIVE, 1, 1)
            assert await store.barrier_job() == BarrierJob(), "no driver is registered"
            await put(paths.GENERATION, 1, 1)
            assert await store.barrier_job() == BarrierJob(), "no generation after that either"
            assert await driver.claim_driver("h1", 10) == 1
            assert await store.barrier_job() == at_work(1, 1)
            await put(paths.DIRECTIVE, 1, 2)
            assert await store.barrier_job() == BarrierJob(awaited=True)
            await put(paths.GENERATION, 1, 2)
            assert await store.barrier_job() == at_work(1, 2)
            await driver.session.delete(paths.DRIVER)
            assert await driver.claim_driver("h1", 11) == 2
            assert await store.barrier_job() == BarrierJob(awaited=True), "a later driver has started no generation yet"
            await put(paths.DIRECTIVE, 2, 1)
            assert await store.barrier_job() == BarrierJob(awaited=True), "the first generation of a later driver"
            await put(paths.GENERATION, 2, 1)
            assert await store.barrier_job() == at_work(2, 1)

    asyncio.run(scenario())
