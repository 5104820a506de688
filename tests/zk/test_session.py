"""Tests of the session wrapper on a real ZooKeeper: pipelining, multis, watches, expiry, loss."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from kazoo.exceptions import EXCEPTIONS, BadVersionError

from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.errors import ClusterError
from sparklog.zk.errors import ZkBadVersion, ZkError, ZkMultiFailed, ZkNodeExists, ZkNoNode, ZkUnreachable
from sparklog.zk.session import WINDOW, Check, Create, Delete, Node, SessionState, SetData, ZkSession

from .support import expire, opened, pause, until


def test_pipelined_requests_above_the_window_keep_their_order(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            await session.ensure("/n")
            versions = await asyncio.gather(*(session.set("/n", str(i).encode()) for i in range(5 * WINDOW)))
            assert list(versions) == list(range(1, 5 * WINDOW + 1))
            assert (await session.get("/n")).data == str(5 * WINDOW - 1).encode()

    asyncio.run(scenario())


def test_errors_of_single_requests_are_typed(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            with pytest.raises(ZkNoNode):
                await session.get("/none")
            await session.ensure("/a")
            with pytest.raises(ZkNodeExists):
                await session.create("/a")
            with pytest.raises(ZkBadVersion):
                await session.set("/a", b"", 7)

    asyncio.run(scenario())


def test_a_failed_multi_names_its_cause_and_changes_nothing(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            await session.ensure("/a")
            with pytest.raises(ZkMultiFailed) as failed:
                await session.multi([Create("/b", b"1"), Check("/a", 5), Create("/c", b"1")])
            assert failed.value.index == 1
            assert isinstance(failed.value.cause, ZkBadVersion)
            assert not await session.exists("/b")
            assert await session.multi([Check("/a", 0), SetData("/a", b"x", 0), Create("/b", b"1"), Delete("/b")]) == (
                None,
                1,
                "/b",
                None,
            )

    asyncio.run(scenario())


def test_watches_report_now_and_after_each_change(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            children: list[tuple[str, ...] | None] = []
            nodes: list[Node | None] = []
            stop = session.watch_children("/w", children.append)
            session.watch_data("/w", nodes.append)
            await until(lambda: children == [None] and nodes == [None], "first reports of a missing node")
            await session.ensure("/w")
            await until(lambda: children[-1] == () and nodes[-1] == Node(b"", 0, 0), "reports of its creation")
            await session.create("/w/x")
            await until(lambda: children[-1] == ("x",), "report of a child")
            await session.set("/w", b"2")
            await until(lambda: nodes[-1] == Node(b"2", 1, 0), "report of the data")
            await session.delete("/w/x")
            await session.delete("/w")
            await until(lambda: children[-1] is None and nodes[-1] is None, "reports of the deletion")
            stop()
            count = len(children)
            await session.ensure("/w")
            await until(lambda: nodes[-1] is not None, "the other watch to continue")
            assert len(children) == count

    asyncio.run(scenario())


def test_a_watch_survives_an_unknown_response(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            get = session.get

            def refused(path: str, *, on_change: Callable[[], None] | None = None) -> asyncio.Future[Node]:
                session.get = get  # type: ignore[method-assign]
                answer: asyncio.Future[Node] = asyncio.get_running_loop().create_future()
                answer.set_exception(ZkError("not understood"))
                return answer

            session.get = refused  # type: ignore[method-assign]
            nodes: list[Node | None] = []
            session.watch_data("/w", nodes.append)
            await until(lambda: nodes == [None], "a report nevertheless")

    asyncio.run(scenario())


def test_watches_and_requests_continue_after_a_session_expiry(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store, opened(connect) as other:
            session = store.session
            states: list[SessionState] = []
            session.add_listener(states.append)
            await session.create("/mine", b"", ephemeral=True)
            seen: list[Node | None] = []
            session.watch_data("/watched", seen.append)
            await until(lambda: seen == [None], "the first report")
            await expire(session)
            assert SessionState.EXPIRED in states
            assert states[-1] is SessionState.CONNECTED
            assert not await session.exists("/mine")
            await other.session.create("/watched", b"1")
            await until(lambda: seen[-1] == Node(b"1", 0, 0), "a report in the new session")

    asyncio.run(scenario())


def test_a_missing_zookeeper_is_an_error_after_the_timeout() -> None:
    async def scenario() -> None:
        with pytest.raises(ClusterError, match=r"no ZooKeeper responded at 127\.0\.0\.1:1 within 300 ms"):
            await ZkSession.open("127.0.0.1:1", session_timeout_ms=1000, connect_timeout_ms=300)

    asyncio.run(scenario())


def test_a_paused_zookeeper_fails_requests_but_keeps_the_session(tmp_path: Path) -> None:
    """The loop is never blocked meanwhile, for any number of requests, and the session continues afterwards."""
    server = EmbeddedZookeeper.start(tmp_path)

    async def scenario() -> None:
        session = await ZkSession.open(server.connect, session_timeout_ms=1500)
        try:
            await session.create("/mine", b"", ephemeral=True)
            generation = session.generation
            await pause(server.pid)
            pending = [session.set("/mine", b"x") for _ in range(3 * WINDOW)]
            results = await asyncio.gather(*pending, return_exceptions=True)
            assert all(isinstance(result, ZkUnreachable) for result in results)
            sent = [result.sent for result in results if isinstance(result, ZkUnreachable)]
            assert sent[:WINDOW] == [True] * WINDOW, "the request may have been performed"
            assert sent[WINDOW:] == [False] * (2 * WINDOW), "the request was never sent"
            assert session.state is SessionState.DISCONNECTED
            with pytest.raises(ZkUnreachable) as refused:
                await session.get("/mine")
            assert not refused.value.sent
            with pytest.raises(ZkUnreachable, match="not connected within 50 ms"):
                await session.connected(timeout_ms=50)
            os.kill(server.pid, signal.SIGCONT)
            await session.connected(timeout_ms=10_000)
            # The server's clock stopped with it, so both outcomes are possible. The client must distinguish them
            # correctly.
            assert await session.exists("/mine") == (session.generation == generation)
        finally:
            os.kill(server.pid, signal.SIGCONT)
            await session.close()

    try:
        asyncio.run(scenario())
    finally:
        server.stop()


def test_a_connection_that_is_never_served_does_not_cost_the_session(connect: str) -> None:
    """A server that has only just started behaves like this. The session has 6 s, and one silent connection may not
    use them all. ZooKeeper itself is real."""
    address, _, chroot = connect.partition("/")
    host, _, port = address.partition(":")
    open_now: list[asyncio.StreamWriter] = []
    count = 0

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        open_now.append(writer)
        if count == 2:
            await reader.read(-1)  # without a response
            return
        there, back = await asyncio.open_connection(host, int(port))
        open_now.append(back)
        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    async def scenario() -> None:
        server = await asyncio.start_server(taken, "127.0.0.1", 0)
        mine = server.sockets[0].getsockname()[1]
        async with opened(f"127.0.0.1:{mine}/{chroot}", session_timeout_ms=6000) as store:
            session = store.session
            for writer in open_now:
                writer.transport.abort()
            await until(lambda: count >= 3 and session.state is SessionState.CONNECTED, "a third connection")
            assert session.generation == 1
        server.close()
        for writer in open_now:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in open_now), return_exceptions=True)

    asyncio.run(scenario())


@contextmanager
def few_descriptors() -> Iterator[Callable[[], None]]:
    """Open all file descriptors that this process may open, and again those that became free since."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def take() -> None:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    try:
        highest = max(int(found.name) for found in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
        yield take
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def test_a_session_survives_a_shortage_of_file_descriptors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The shortage comes with a broken connection. A name lookup needs a descriptor as well, and kazoo's thread
    would end there."""
    server = EmbeddedZookeeper.start(tmp_path)
    connect = server.connect.replace("127.0.0.1", "localhost")

    async def scenario() -> None:
        async with opened(connect, session_timeout_ms=1500) as store:
            session = store.session
            with few_descriptors() as take:

                def tried() -> bool:
                    take()  # including the connection's descriptor, when it is closed
                    return "to ZooKeeper after OSError" in caplog.text or session.state is SessionState.EXPIRED

                os.kill(server.pid, signal.SIGSTOP)
                await until(tried, "an attempt to connect")
            os.kill(server.pid, signal.SIGCONT)
            await session.connected(timeout_ms=30_000)
            assert await session.exists("/")

    try:
        asyncio.run(scenario())
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.stop()


def test_a_request_that_cannot_be_sent_does_not_cost_the_session(connect: str) -> None:
    """kazoo's thread notices the error and ends. The callers of other requests get an error as well."""

    async def scenario() -> None:
        async with opened(connect, session_timeout_ms=20_000) as store:
            session = store.session
            generation = session.generation
            asked = [session.get(path) for path in ("/\ud800", *["/"] * 5)]
            answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
            assert isinstance(answers[0], ZkUnreachable)
            await session.connected(timeout_ms=30_000)
            assert await session.exists("/")
            assert session.generation == generation

    asyncio.run(scenario())


def test_requests_that_kazoo_rejects_leave_room_for_others(connect: str) -> None:
    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            for _ in range(2 * WINDOW):
                with pytest.raises(ZkError, match="relative paths"):
                    await session.exists("/brokers/..")
            assert await asyncio.wait_for(session.exists("/"), 30)

    asyncio.run(scenario())


def test_an_error_unknown_to_kazoo_fails_its_request_alone(connect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(EXCEPTIONS, BadVersionError.code)  # stands for an error that a newer server may send

    async def scenario() -> None:
        async with opened(connect) as store:
            session = store.session
            await session.ensure("/a")
            generation = session.generation
            for _ in range(WINDOW + 1):
                with pytest.raises(ZkError, match="UnknownError"):
                    await asyncio.wait_for(session.set("/a", b"", 7), 30)
            assert await asyncio.wait_for(session.set("/a", b""), 30) == 1
            assert session.generation == generation

    asyncio.run(scenario())
