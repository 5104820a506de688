"""Tests of nodes that no controller can read, below each path that it reads: it skips them, reports them, and
continues.

ZooKeeper is real, and the brokers have a real wire protocol.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from sparklog.cluster.controller_loop import ControllerLoop
from sparklog.model import TopicPartition
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkNodeExists, ZkNoNode

from .hearers import RECORD, SESSION_TIMEOUT_MS, Hearer, controlled, run_with_three
from .support import retire, until

pytestmark = pytest.mark.integration

RUBBISH = (
    b"",
    b"\xff\xfe{",
    b"{}",
    b"[]",
    b"null",
    b'{"version": 999}',
    b'{"version": 1}',
    b'{"version":1,"leader":0}',
    b'{"version":1,"topic_id":"x","assignment":[[]],"schemas":[]}',
    b"[" * 20000,
)
#: all nodes whose children a controller lists
PARENTS = (
    paths.BROKER_IDS,
    paths.UNTRUSTED,
    paths.RETIRED,
    paths.INCARNATIONS,
    paths.STOPPING,
    paths.DELETE_TOPICS,
    paths.ELECTIONS,
    paths.ISR_CHANGES,
    paths.TOPICS,
)
#: names that are ids, and names that are not
NAMES = ("77", "077", "-1", "abc", "a topic", "99999999999999999999")
UNREADABLE = "controller.zookeeper.unreadable"


async def put(store: ClusterStore, path: str, data: bytes) -> None:
    """Replace a node. If another client deletes it meanwhile, create it again."""
    try:
        await store.session.create(path, data)
    except ZkNodeExists:
        try:
            await store.session.set(path, data)
        except ZkNoNode:
            await put(store, path, data)


async def create_topic(hearers: list[Hearer], name: str, *, but: int = 0) -> None:
    """Check that a controller works: it elects a leader for a new topic, and sends it to the brokers."""
    await hearers[0].store.create_topic(msgspec.structs.replace(RECORD, name=name, topic_id=f"id-{name}"))
    tp = TopicPartition(name, 0)
    alive = [hearer for hearer in hearers if hearer.broker_id != but]
    await until(lambda: all(tp in h.known and h.known[tp].leader > 0 for h in alive), f"{name}, known to all")


async def begin_term(loop: ControllerLoop, store: ClusterStore) -> None:
    """Let the controller begin a new term, which reads everything."""
    epoch = loop.status.controller_epoch
    await store.session.delete(paths.CONTROLLER)
    await until(lambda: loop.status.state == "active" and loop.status.controller_epoch > epoch, "a new term")


def test_invalid_nodes_below_every_listed_path_are_skipped_and_counted(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        store = hearers[0].store
        for parent in PARENTS:
            for name, data in zip(NAMES * 2, RUBBISH, strict=False):
                await put(store, f"{parent}/{name}", data)
        epoch = loop.status.controller_epoch
        await create_topic(hearers, "u")
        assert (loop.status.state, loop.status.controller_epoch) == ("active", epoch), "the term must continue"
        assert loop.status.counters[UNREADABLE] > 0
        await begin_term(loop, hearers[0].store)
        await create_topic(hearers, "v")
        assert loop.status.counters[UNREADABLE] > 0
        assert await retire(store, hearers[2].registry)
        tp = TopicPartition("t", 2)  # led by the third broker
        await until(lambda: all(h.known[tp].leader != 3 for h in hearers[:2]), "another leader")
        assert hearers[0].brokers == [1, 2]

    run_with_three(connect, scenario)


def test_an_invalid_isr_notification_is_read_as_any_change(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        store = hearers[0].store
        for data in RUBBISH:
            await put(store, paths.isr_change(1), data)
            await store.states.notify_isr_change(1, [])
        await create_topic(hearers, "u")
        changed = asyncio.Event()
        while await store.session.children(paths.ISR_CHANGES, on_change=changed.set):
            await asyncio.wait_for(changed.wait(), 60)
            changed.clear()

    run_with_three(connect, scenario)


@pytest.mark.parametrize("data", RUBBISH[:3])
def test_a_live_brokers_overwritten_registration_is_read_from_its_node(connect: str, data: bytes) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        await hearers[0].store.session.set(paths.broker(2), data)
        await begin_term(loop, hearers[0].store)
        await create_topic(hearers, "u")
        assert hearers[0].brokers == [1, 2, 3]
        assert hearers[0].known[TopicPartition("t", 1)].leader == 2, "the broker must not be treated as dead"

    run_with_three(connect, scenario)


def test_an_unreadable_state_delays_only_its_own_partition(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        store, tp = hearers[0].store, TopicPartition("t", 2)
        good = (await store.session.get(paths.state(tp))).data
        await store.session.set(paths.state(tp), b"{}")
        await begin_term(loop, hearers[0].store)
        assert await retire(store, hearers[2].registry)
        await create_topic(hearers, "u", but=3)
        other = TopicPartition("u", 2)
        await until(lambda: hearers[0].known[other].leader != 3, "another leader of what can be read")
        assert hearers[0].decisions[tp].version == -1, "brokers must keep their last update"
        assert not any(update.full for update in hearers[0].updates[-1:])
        await store.session.set(paths.state(tp), good)
        await until(lambda: all(h.known[tp].leader != 3 for h in hearers[:2]), "another leader of the fixed partition")

    run_with_three(connect, scenario)


def test_a_topic_with_an_unreadable_record_is_not_reported_as_deleted(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        store = hearers[0].store
        good = (await store.session.get(paths.topic("t"))).data
        await store.session.set(paths.topic("t"), b'{"version":1,"topic_id":"id-1","assignment":[],"schemas":[]}')
        await begin_term(loop, hearers[0].store)
        await create_topic(hearers, "u")
        assert all("t" in hearer.topics for hearer in hearers)
        assert not hearers[0].updates[-1].full
        await store.session.set(paths.topic("t"), good)
        tp = TopicPartition("t", 0)
        await until(lambda: all(h.updates[-1].partitions for h in hearers), "news")
        await create_topic(hearers, "v")
        assert not any(update.full for hearer in hearers for update in hearer.updates[-3:]), (
            "some topics may be unknown yet"
        )
        await begin_term(loop, store)
        await until(lambda: all(h.updates[-1].full and h.topics == {"t", "u", "v"} for h in hearers), "all, told again")
        assert hearers[0].known[tp].leader == 1

    run_with_three(connect, scenario)


@pytest.mark.parametrize("data", [data for data in RUBBISH if b"999" not in data])
def test_a_lost_controller_epoch_is_restored(connect: str, data: bytes) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        store, epoch = hearers[0].store, loop.status.controller_epoch
        await store.session.set(paths.CONTROLLER_EPOCH, data)
        await store.session.set(paths.CONTROLLER, data)
        await create_topic(hearers, "u")  # the term's first write finds that its epoch has ended
        assert loop.status.controller_epoch > epoch
        node = await store.session.get(paths.CONTROLLER_EPOCH)
        assert codecs.decode("", node.data, codecs.CounterNode).value == loop.status.controller_epoch

    run_with_three(connect, scenario)


def test_a_controller_epoch_of_a_newer_format_is_left_alone(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        store = hearers[0].store
        good = (await store.session.get(paths.CONTROLLER_EPOCH)).data
        newer = b'{"version": 999}'
        await store.session.set(paths.CONTROLLER_EPOCH, newer)
        await store.create_topic(msgspec.structs.replace(RECORD, name="u", topic_id="id-u"))
        await until(lambda: "format version 999" in loop.status.detail, "the reason")
        assert loop.status.state == "connecting"
        assert (await store.session.get(paths.CONTROLLER_EPOCH)).data == newer
        assert not await store.session.exists(paths.CONTROLLER), "a controller that can read it may be elected"
        await store.session.set(paths.CONTROLLER_EPOCH, good)
        await until(lambda: all("u" in hearer.topics for hearer in hearers), "the new topic, known to all")

    run_with_three(connect, scenario)


def test_a_controllers_node_without_a_session_is_removed(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        session = hearers[0].store.session
        await asyncio.to_thread(loop.stop)
        await session.create(paths.CONTROLLER, b"nobody")
        async with controlled(session.connect_string, SESSION_TIMEOUT_MS) as another:
            await until(lambda: another.status.state == "active", "an elected controller")
            await create_topic(hearers, "u")

    run_with_three(connect, scenario)


def test_a_topic_with_foreign_nodes_is_deleted_with_them(connect: str) -> None:
    async def scenario(loop: ControllerLoop, hearers: list[Hearer]) -> None:
        store = hearers[0].store
        below = paths.partitions("t")
        for path in (f"{below}/abc", f"{below}/abc/def", f"{below}/77", f"{below}/0/x", f"{paths.topic('t')}/y"):
            await store.session.create(path, b"?")
        await put(store, paths.delete_topic("t"), b"rubbish, which the request takes the place of")
        await store.request_delete_topic("t", "id-1")
        await until(lambda: all("t" not in hearer.topics for hearer in hearers), "the deletion, known to all")
        assert not await store.session.exists(paths.topic("t"))
        await create_topic(hearers, "t")

    run_with_three(connect, scenario)
