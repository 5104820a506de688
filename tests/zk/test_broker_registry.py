"""Tests of registrations: one incarnation for each, whatever an earlier process has left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from sparklog.cluster.barrier_task import retire_through
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.process import ProcessIdentity
from sparklog.errors import ClusterError
from sparklog.model import BrokerRegistration, SeenNumbers, TopicPartition
from sparklog.testing.network import ZOOKEEPER, broker_party
from sparklog.testing.proxies import ProxyNetwork
from sparklog.zk import codecs, paths
from sparklog.zk.broker_registry import BrokerRegistry
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.controller_store import ControllerStore
from sparklog.zk.errors import BrokerIdTaken, ZkError
from sparklog.zk.ops import Create, Delete, Op
from sparklog.zk.session import SessionState

from .support import broker, expire, opened, retire, until


async def registered(store: ClusterStore, registration: BrokerRegistration, **callbacks: object) -> BrokerRegistry:
    registry = BrokerRegistry(store.session, registration, **callbacks)  # type: ignore[arg-type]
    await registry.start(timeout_ms=30_000)
    return registry


def test_each_registration_has_a_higher_incarnation(connect: str) -> None:
    async def scenario() -> None:
        seen = []
        for _ in range(3):
            async with opened(connect) as store:
                registry = await registered(store, broker(1))
                seen.append(registry.incarnation)
                assert [b.incarnation for b in await store.live_brokers()] == [registry.incarnation]
                assert (await store.session.get(paths.incarnation(1))).version == registry.incarnation
                await registry.close()
        assert seen == [1, 2, 3]

    asyncio.run(scenario())


def test_broker_re_registers_over_its_own_old_ephemeral_node(connect: str) -> None:
    """The process was killed and returns before ZooKeeper has noticed. It does not wait for the session timeout."""

    async def scenario() -> None:
        async with opened(connect, session_timeout_ms=40_000) as dead, opened(connect) as store:
            killed = await registered(dead, broker(1, port=9092))
            await killed.close()  # without this, it would see its node disappear and register again
            registry = await asyncio.wait_for(registered(store, broker(1, port=9093)), 30)
            [found] = await store.live_brokers()
            assert (found.incarnation, found.port) == (2, 9093)
            assert (await store.session.get(paths.broker(1))).ephemeral_owner == store.session.session_id
            await dead.session.close()  # the end of the old session must not delete the new node
            assert await store.session.exists(paths.broker(1))
            await registry.close()

    asyncio.run(scenario())


def test_another_hosts_registration_delays_and_then_refuses_a_broker(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as theirs, opened(connect) as store:
            await registered(theirs, broker(1, host="h1"))
            registry = BrokerRegistry(store.session, broker(1, host="h2"))
            with pytest.raises(BrokerIdTaken, match=r"broker id 1 is registered by h1:9092 .*, not by .* at h2"):
                await registry.start(timeout_ms=300)
            waiting = asyncio.create_task(registry.start(timeout_ms=30_000))
            await theirs.session.close()
            assert await waiting == 2
            await registry.close()

    asyncio.run(scenario())


def test_the_same_process_registers_again_after_a_session_expiry(connect: str) -> None:
    async def scenario() -> None:
        incarnations: list[int] = []
        async with opened(connect) as store:
            registry = await registered(store, broker(1), on_registered=incarnations.append)
            await expire(store.session)
            await until(lambda: incarnations == [2], "a second registration")
            assert registry.incarnation == 2
            assert [b.incarnation for b in await store.live_brokers()] == [2]
            await registry.close()

    asyncio.run(scenario())


def test_a_living_process_whose_registration_was_deleted_registers_again(connect: str) -> None:
    """The process that reported it dead was wrong. Without a registration the broker would receive no updates, and
    would still give clients old metadata."""

    async def scenario() -> None:
        incarnations: list[int] = []
        async with opened(connect) as store, opened(connect) as other:
            registry = await registered(store, broker(1), on_registered=incarnations.append)
            await other.session.delete(paths.broker(1))
            await until(lambda: incarnations == [2], "a second registration")
            await other.session.delete(paths.broker(1))
            await until(lambda: incarnations == [2, 3], "a third registration")
            assert [(b.incarnation, b.trusted) for b in await other.live_brokers()] == [(3, True)]
            await registry.close()

    asyncio.run(scenario())


def test_a_registration_refused_for_an_unknown_reason_is_retried(connect: str) -> None:
    """No other event would repeat it: the broker would serve without updates."""

    async def scenario() -> None:
        incarnations: list[int] = []
        failures: list[Exception] = []
        async with opened(connect) as store, opened(connect) as other:
            registry = await registered(store, broker(1), on_registered=incarnations.append, on_failed=failures.append)
            multi = store.session.multi

            def refused(ops: Sequence[Op]) -> asyncio.Future[tuple[object, ...]]:
                store.session.multi = multi  # type: ignore[method-assign]
                answer: asyncio.Future[tuple[object, ...]] = asyncio.get_running_loop().create_future()
                answer.set_exception(ZkError("not understood"))
                return answer

            store.session.multi = refused  # type: ignore[method-assign]
            await other.session.delete(paths.broker(1))
            await until(lambda: incarnations == [2], "a second registration")
            assert len(failures) == 1
            store.session.multi = refused  # type: ignore[method-assign]
            await expire(store.session)
            await until(lambda: incarnations == [2, 3], "a third registration")
            assert len(failures) == 2
            await registry.close()

    asyncio.run(scenario())


def test_a_process_whose_id_is_taken_stops_trying(connect: str) -> None:
    """The process stops after two session timeouts: the registration of a dead process would have expired."""

    async def scenario() -> None:
        failures: list[Exception] = []
        async with opened(connect, session_timeout_ms=1000) as store, opened(connect) as theirs:
            registry = await registered(store, broker(1, host="h1"), on_failed=failures.append)
            path, claim = paths.broker(1), codecs.encode_broker(broker(1, host="h2"))
            await theirs.session.multi([Delete(path), Create(path, claim, ephemeral=True)])
            await until(lambda: failures != [], "word that the id is taken")
            assert isinstance(failures[0], BrokerIdTaken)
            assert "broker id 1 is registered by h2:9092" in str(failures[0])
            assert registry._task is not None
            await registry._task
            assert len(failures) == 1 and registry.incarnation == 1
            assert (await theirs.session.get(path)).ephemeral_owner == theirs.session.session_id
            await registry.close()

    asyncio.run(scenario())


def test_a_stopping_notice_refused_for_an_unknown_reason_is_repeated(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            registry = await registered(store, broker(1))
            create = store.session.create

            def refused(path: str, *found: object, **options: object) -> asyncio.Future[str]:
                store.session.create = create  # type: ignore[method-assign]
                answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
                answer.set_exception(ZkError("not understood"))
                return answer

            store.session.create = refused  # type: ignore[method-assign]
            await registry.announce_stopping()
            assert await store.session.exists(paths.stopping(1))
            await registry.close()

    asyncio.run(scenario())


def test_a_registration_whose_response_was_lost_is_recognized(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            first = await registered(store, broker(1))
            await first.close()
            again = await registered(store, broker(1))  # the same session, as if the first response had not arrived
            assert again.incarnation == first.incarnation == 1
            await again.close()

    asyncio.run(scenario())


def test_an_untrusted_process_stays_untrusted_until_a_controller_acts(connect: str) -> None:
    """The process crashes and returns with an intact page cache before a controller saw it: its claims are still
    void."""

    async def scenario() -> None:
        async with opened(connect) as store:
            registry = await registered(store, broker(1, trusted=False))
            await registry.close()
        async with opened(connect) as store:
            registry = await registered(store, broker(1, trusted=True))
            assert [b.trusted for b in await store.live_brokers()] == [False]
            await registry.close()
            await store.session.delete(paths.untrusted(1))  # the controller does this
        async with opened(connect) as store:
            registry = await registered(store, broker(1, trusted=True))
            assert [b.trusted for b in await store.live_brokers()] == [True]
            await registry.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("trusted", [False, True])
def test_a_mark_survives_the_registration_of_another_untrusted_process(connect: str, trusted: bool) -> None:
    """After a second power failure the controller's action for the first incarnation comes late, between the read
    and the multi. It must not make the second incarnation trusted. A process that is marked as trusted is
    trusted from then on."""

    async def scenario() -> None:
        async with opened(connect) as store:
            await (await registered(store, broker(1, trusted=False))).close()
        async with opened(connect) as store, opened(connect) as other:
            controller = ControllerStore(other.session)
            late = iter([controller.trust_broker(1, 1)])
            multi = store.session.multi

            async def after_the_controller(ops: Sequence[Op]) -> tuple[object, ...]:
                for word in late:
                    await word
                return await multi(ops)

            store.session.multi = after_the_controller  # type: ignore[assignment, method-assign]
            registry = await registered(store, broker(1, trusted=trusted))
            assert [b.trusted for b in await controller.levels.brokers()] == [trusted]
            assert [b.trusted for b in await store.live_brokers()] == [trusted]
            assert await store.session.exists(paths.untrusted(1)) is not trusted
            await controller.trust_broker(1, 1)
            assert await store.session.exists(paths.untrusted(1)) is not trusted, (
                "not the incarnation that the controller acted on"
            )
            await registry.close()

    asyncio.run(scenario())


class Noted:
    """A log directory with the number of its broker's last incarnation. If ``full``, it cannot store the next one."""

    def __init__(self, incarnation: int | None, *, full: bool = False) -> None:
        self.incarnation = incarnation
        #: The last incarnation that ZooKeeper has counted, according to the directory.
        self.counted = -1
        self.noted: list[int] = []
        self._full = full

    def note_incarnation(self, incarnation: int) -> None:
        if self._full:
            raise OSError("no space left on device")
        self.incarnation = incarnation
        self.noted.append(incarnation)

    def note_counted(self, incarnation: int) -> None:
        self.counted = incarnation

    def seen(self) -> SeenNumbers:
        return SeenNumbers(5, "controller", 7000, 3)


@pytest.mark.parametrize(("known", "trusted"), [(0, False), (1, False), (2, True), (3, True), (None, True)])
def test_a_directory_that_missed_an_incarnation_is_not_trusted(connect: str, known: int | None, trusted: bool) -> None:
    """The directory is empty or an older copy. A directory that is ahead belongs to a process that ended before its
    registration."""

    async def scenario() -> None:
        for _ in range(2):
            async with opened(connect) as store:
                await (await registered(store, broker(1))).close()
        async with opened(connect) as store:
            directory = Noted(known)
            registry = await registered(store, broker(1), directory=directory)
            assert [(b.incarnation, b.trusted) for b in await store.live_brokers()] == [(3, trusted)]
            assert await store.session.exists(paths.untrusted(1)) is not trusted
            assert directory.incarnation == 3
            await expire(store.session)
            await until(lambda: registry.incarnation == 4, "a new registration")
            assert [b.trusted for b in await store.live_brokers()] == [trusted], "the mark must stay"
            await registry.close()

    asyncio.run(scenario())


def test_a_doubted_directory_is_not_trusted_whatever_it_stores(connect: str) -> None:
    """The directory's disk failed and stored nothing: the next process finds it as before. No leader adds the broker
    to an ISR meanwhile, and an expired session changes nothing."""

    async def scenario() -> None:
        directory = Noted(0)
        async with opened(connect) as store:
            registry = await registered(store, broker(1), directory=directory)
            assert [b.trusted for b in await store.live_brokers()] == [True]
            await registry.doubt_directory()
            assert (await store.session.get(paths.incarnation(1))).version == registry.incarnation + 1
            await registry.close()
        assert directory.incarnation == 1
        async with opened(connect) as store:
            registry = await registered(store, broker(1), directory=directory)
            assert [b.trusted for b in await store.live_brokers()] == [False]
            await registry.close()

    asyncio.run(scenario())


def test_a_process_that_doubts_its_directory_stays_untrusted_after_expiry(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            registry = await registered(store, broker(1), directory=Noted(0))
            await registry.doubt_directory()
            before = registry.incarnation
            await expire(store.session)
            await until(lambda: registry.incarnation > before, "a new registration")
            assert [b.trusted for b in await store.live_brokers()] == [False]
            await registry.close()

    asyncio.run(scenario())


def test_a_restored_zookeeper_never_counts_an_incarnation_twice(connect: str) -> None:
    async def scenario() -> None:
        directory = Noted(0)
        async with opened(connect) as store:
            await (await registered(store, broker(1), directory=directory)).close()
            assert directory.counted == 1
            # After 2,500 registrations ZooKeeper is restored from a copy made here.
            directory.incarnation = directory.counted = 2501
        async with opened(connect) as store:
            registry = await registered(store, broker(1), directory=directory)
            [found] = await store.live_brokers()
            assert (found.incarnation, found.trusted) == (2502, True)
            assert found.seen == directory.seen()
            assert (registry.incarnation, directory.counted) == (2502, 2502)
            await registry.close()

    asyncio.run(scenario())


def test_a_process_that_ended_before_its_registration_raises_nothing(connect: str) -> None:
    async def scenario() -> None:
        directory = Noted(2)
        directory.counted = 1
        async with opened(connect) as store:
            await (await registered(store, broker(1))).close()
        async with opened(connect) as store:
            await (await registered(store, broker(1), directory=directory)).close()
            assert directory.counted == 2

    asyncio.run(scenario())


def test_an_unreasonably_large_incarnation_is_ignored(connect: str) -> None:
    async def scenario() -> None:
        directory = Noted(1_000_000)
        directory.counted = 1_000_000
        async with opened(connect) as store:
            with pytest.raises(ClusterError, match=r"counts incarnation 0, and 1000000 .* zookeeper rebuild"):
                await registered(store, broker(1), directory=directory)
            assert await store.live_brokers() == ()

    asyncio.run(scenario())


def test_a_new_broker_is_trusted_without_a_noted_incarnation(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            registry = await registered(store, broker(1), directory=Noted(0, full=True))
            assert [(b.incarnation, b.trusted) for b in await store.live_brokers()] == [(1, True)]
            await registry.close()

    asyncio.run(scenario())


def test_an_untrusted_process_is_trusted_after_a_controller_acts(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            registry = await registered(store, broker(1, trusted=False))
            for marked in (True, False):
                if not marked:
                    await store.session.delete(paths.untrusted(1))
                before = registry.incarnation
                await expire(store.session)
                await until(lambda before=before: registry.incarnation > before, "a new registration")  # type: ignore[misc]
                assert [b.trusted for b in await store.live_brokers()] == [not marked]
            assert not await store.session.exists(paths.untrusted(1))
            await registry.close()

    asyncio.run(scenario())


def test_a_stopping_notice_is_repeated_after_a_session_expiry(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store, opened(connect) as other:
            registry = await registered(store, broker(1))
            await registry.announce_stopping()
            await registry.announce_stopping()
            said: list[int | None] = []
            other.session.watch_data(
                paths.stopping(1),
                lambda node: said.append(
                    None if node is None else codecs.decode("", node.data, codecs.StoppingNode).incarnation
                ),
            )
            await until(lambda: said == [1], "the first announcement")
            await expire(store.session)
            await until(lambda: said[-1] == 2, "the announcement of the new incarnation")
            await registry.close()

    asyncio.run(scenario())


def test_a_stopping_notice_is_withdrawn_even_if_its_response_is_lost(connect: str) -> None:
    """After a reconnection the announcement reads the node while the withdrawal deletes it."""
    host, _, chroot = connect.partition("/")
    network = ProxyNetwork()

    async def scenario() -> None:
        way = network.add_zookeeper(broker_party(1), host)
        async with opened(connect) as other, opened(f"{way}/{chroot}") as store:
            registry = await registered(store, broker(1))
            said: list[bool] = []
            other.session.watch_data(paths.stopping(1), lambda node: said.append(node is not None))
            await until(lambda: said == [False], "a watch")
            network.cut(ZOOKEEPER, broker_party(1), one_way=True)
            announced = asyncio.ensure_future(registry.announce_stopping())
            await until(lambda: said[-1], "the announcement")
            await until(lambda: store.session.state is not SessionState.CONNECTED, "the connection to be given up")
            withdrawn = asyncio.ensure_future(registry.withdraw_stopping())
            await asyncio.sleep(0)  # the withdrawal has begun
            network.heal()
            await asyncio.wait_for(asyncio.gather(announced, withdrawn), 30)
            assert not await other.session.exists(paths.stopping(1))
            await registry.close()

    try:
        asyncio.run(scenario())
    finally:
        network.close()


def test_a_process_known_dead_is_retired_in_any_incarnation(connect: str) -> None:
    """The process's supervisor does not know yet that the process had registered again."""

    async def scenario() -> None:
        async with opened(connect) as store, opened(connect) as other:
            registry = await registered(store, broker(1))
            await expire(store.session)
            await until(lambda: registry.incarnation == 2, "a new registration")
            assert not await retire(other, registry, pid=registry.registration.pid + 1), "another process registered"
            assert [b.broker_id for b in await other.live_brokers()] == [1]
            assert await retire(other, registry)
            assert await other.live_brokers() == ()
            assert (await ControllerStore(other.session).levels.retired(())) == {1}
            await registry.close()

    asyncio.run(scenario())


def test_a_process_with_an_expired_registration_is_known_dead(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store, opened(connect) as other:
            controller = ControllerStore(other.session)
            assert not await other.retire_broker(1, pid=1, boot_id="boot-h1"), "never registered"
            registry = await registered(store, broker(1))
            await registry.close()
            await store.session.close()
            assert await controller.levels.retired(()) == frozenset()
            changed = asyncio.Event()
            await other.session.children(paths.RETIRED, on_change=changed.set)
            for _ in range(2):
                assert await retire(other, registry)
                assert await controller.levels.retired(()) == {1}
            await asyncio.wait_for(changed.wait(), 30)

    asyncio.run(scenario())


@pytest.mark.extended
def test_a_process_end_is_reported_after_zookeeper_returns(tmp_path: Path) -> None:
    server = EmbeddedZookeeper.start(tmp_path)

    async def scenario() -> None:
        async with opened(server.connect, session_timeout_ms=20_000) as store:
            registry = await registered(store, broker(1))
            await registry.close()
            found = registry.registration
            os.kill(server.pid, signal.SIGSTOP)
            telling = asyncio.ensure_future(retire_through(store)(1, ProcessIdentity(found.pid, 0, found.boot_id)))
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda: store.session.state is SessionState.DISCONNECTED, "the connection to break")
            server.stop()
            again.append(await asyncio.to_thread(EmbeddedZookeeper.start, tmp_path))
            assert await asyncio.wait_for(telling, 60)
            assert await store.live_brokers() == ()

    again: list[EmbeddedZookeeper] = []
    try:
        asyncio.run(scenario())
    finally:
        for found in (server, *again):
            found.stop()


ONE, TWO = TopicPartition("t", 0), TopicPartition("u", 5)


def test_a_registration_and_its_mark_name_the_doubted_logs(connect: str) -> None:
    """The doubts of processes that no controller has seen accumulate."""

    async def scenario() -> None:
        async with opened(connect) as other:
            controller = ControllerStore(other.session)
            for found, kept in (([ONE], (ONE,)), ([TWO], (ONE, TWO)), ([], (ONE, TWO))):
                async with opened(connect) as store:
                    registry = BrokerRegistry(store.session, broker(1))
                    registry.doubt(found)
                    await registry.start(timeout_ms=30_000)
                    [live] = await controller.levels.brokers()
                    assert (live.trusted, live.doubted) == (False, kept)
                    assert live.doubts(kept[0]) and not live.doubts(TopicPartition("t", 1))
                    assert [(b.trusted, b.doubted) for b in await store.live_brokers()] == [(False, kept)]
                    await registry.close()
            await controller.trust_broker(1, 3)
            async with opened(connect) as store:
                registry = await registered(store, broker(1))
                [live] = await controller.levels.brokers()
                assert (live.trusted, live.doubted) == (True, ())
                await registry.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("first", ["whole", "earlier release", "too many", "rubbish"])
def test_doubt_about_one_log_does_not_narrow_doubt_about_all(connect: str, first: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            registry = BrokerRegistry(store.session, broker(1, trusted=first != "whole"))
            if first == "too many":
                registry.doubt([TopicPartition("t", number) for number in range(1001)])
            await registry.start(timeout_ms=30_000)
            await registry.close()
            if first == "earlier release":
                await store.session.create(paths.untrusted(1), codecs.encode(codecs.CounterNode(1)))
            if first == "rubbish":
                await store.session.create(paths.untrusted(1), b"?")
        async with opened(connect) as store:
            registry = BrokerRegistry(store.session, broker(1))
            registry.doubt([ONE])
            await registry.start(timeout_ms=30_000)
            [live] = await ControllerStore(store.session).levels.brokers()
            assert (live.trusted, live.doubted, live.doubts(TWO)) == (False, (), True)
            await registry.close()

    asyncio.run(scenario())


def test_an_accepted_process_has_no_doubtful_log_after_an_expiry(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            registry = BrokerRegistry(store.session, broker(1))
            registry.doubt([ONE])
            await registry.start(timeout_ms=30_000)
            registry.mark_trusted()
            await ControllerStore(store.session).trust_broker(1, 1)
            await expire(store.session)
            await until(lambda: registry.incarnation == 2, "a new registration")
            assert [(b.trusted, b.doubted) for b in await store.live_brokers()] == [(True, ())]
            await registry.close()

    asyncio.run(scenario())
