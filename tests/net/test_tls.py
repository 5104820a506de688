"""Tests of TLS between both kinds of connections and the server: what is refused, reloads, and who the peer is."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.net import server_connection
from sparklog.net.async_client import AsyncConnection
from sparklog.net.authentication import ListenerSecurity
from sparklog.net.blocking import BlockingConnection
from sparklog.net.certificate_expiry import not_after_s
from sparklog.net.client_security import ClientSecurity
from sparklog.net.server import Server, serve
from sparklog.net.server_connection import ServerConnection
from sparklog.net.tls import ClientTls, PemFiles, ServerTls
from sparklog.protocol.connection import hello
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.messages import Ack, FetchReply, HelloReply, Metadata, Produce, Reply, Request, encode_message
from sparklog.security.listeners import ClientAuth
from tests.net.certificates import Certificates
from tests.net.test_client_logins import ScramLogins, anna, early
from tests.net.two_step_login import TwoStepLogins
from tests.waiting import wait_until

MAX_FRAME = 8_000_000
__all__ = ["early"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["asyncio", "uvloop"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Handler:
    """A handler that echoes the bodies of produces and acknowledges all other requests."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection

    def request_received(self, request: Request, body: memoryview) -> None:
        if isinstance(request, Produce):
            self.connection.reply(FetchReply(request.cid, 0, 0, ()), [body])
        else:
            self.connection.reply(Ack(request.cid))

    def connection_lost(self) -> None:
        pass


class Closable(Protocol):
    """A client that the server's fixture closes."""

    def close(self) -> None: ...


class Secure:
    """A server in a thread. ``connections`` has its connections in order."""

    def __init__(
        self,
        kind: str,
        tls: ServerTls | None,
        logins: ScramLogins | None,
        *,
        reports: TwoStepLogins | None = None,
        **options: Any,
    ) -> None:
        library: Any = asyncio if kind == "asyncio" else pytest.importorskip(kind)
        self.loop: asyncio.AbstractEventLoop = library.new_event_loop()
        self.connections: list[ServerConnection] = []
        self.clients: list[Closable] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.server: Server = self.run(self._serve(ListenerSecurity("SECURE", logins, tls, reports), options))
        self.port = self.server.port

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def _serve(self, security: ListenerSecurity, options: dict[str, Any]) -> Server:
        def make(connection: ServerConnection) -> Handler:
            self.connections.append(connection)
            return Handler(connection)

        return await serve(
            make,
            host="127.0.0.1",
            port=0,
            describe=lambda cid, version: HelloReply(cid, version, 7, 3, "c", MAX_FRAME, "boot", "/local"),
            max_frame_bytes=MAX_FRAME,
            max_in_flight=10,
            queued_max_bytes=4 * MAX_FRAME,
            security=security,
            **options,
        )

    def open_connections(self) -> int:
        found: Future[int] = Future()
        self.loop.call_soon_threadsafe(lambda: found.set_result(self.server.connections))
        return found.result(10)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextmanager
def secure(kind: str, tls: ServerTls | None, logins: ScramLogins | None = None, **options: Any) -> Iterator[Secure]:
    server = Secure(kind, tls, logins, **options)
    try:
        yield server
    finally:
        server.close()


class Blocking:
    """A ``BlockingConnection`` with the interface that the tests use."""

    def __init__(self, server: Secure, security: ClientSecurity, host: str = "127.0.0.1") -> None:
        self._connection = BlockingConnection(host, server.port, client_id="test", timeout_s=10, security=security)
        self.hello = self._connection.hello
        server.clients.append(self)

    def request(self, request: Request, body: bytes = b"") -> tuple[Reply, bytes]:
        reply, returned = self._connection.request(request, [body] if body else [])
        return reply, bytes(returned)

    def close(self) -> None:
        self._connection.close()


class Async:
    """An ``AsyncConnection`` on the server's own loop, with the interface that the tests use."""

    def __init__(self, server: Secure, security: ClientSecurity, host: str = "127.0.0.1") -> None:
        self._server = server
        opening = AsyncConnection.open(host, server.port, client_id="test", security=security)
        self._connection: AsyncConnection = server.run(opening)
        assert self._connection.hello is not None
        self.hello = self._connection.hello
        server.clients.append(self)

    def request(self, request: Request, body: bytes = b"") -> tuple[Reply, bytes]:
        async def ask() -> tuple[Reply, bytes]:
            reply, returned = await self._connection.request(request, [body] if body else [])
            return reply, bytes(returned)

        answer: tuple[Reply, bytes] = self._server.run(ask())
        return answer

    def close(self) -> None:
        self._server.loop.call_soon_threadsafe(self._connection.close)


Client = Callable[..., "Blocking | Async"]


@pytest.fixture(params=[Blocking, Async])
def client(request: pytest.FixtureRequest) -> Client:
    made: Client = request.param
    return made


def refusal(client: Client, server: Secure, security: ClientSecurity, host: str = "127.0.0.1") -> BrokerError:
    """Return the error of a connect, which comes quickly."""
    began_s = time.monotonic()
    with pytest.raises(BrokerError) as caught:
        client(server, security, host).request(Metadata(0))
    assert time.monotonic() - began_s < 4, "the error comes before a time-out"
    wait_until(lambda: server.open_connections() == 0)
    return caught.value


def test_frames_of_all_sizes_arrive(kind: str, client: Client, certificates: Certificates) -> None:
    with secure(kind, certificates.server()) as server:
        connection = client(server, certificates.client())
        assert (connection.hello.boot_id, connection.hello.local_socket, connection.hello.unix_socket) == ("", "", "")
        for size in (0, 1, 1000, 16_384, 40_000, 1_000_000, MAX_FRAME - 100):
            body = bytes(index % 251 for index in range(251)) * (size // 251 + 1)
            reply, returned = connection.request(Produce(0, -1, 1000, ()), body[:size])
            assert isinstance(reply, FetchReply) and returned == body[:size]
        connection.close()
        wait_until(lambda: server.open_connections() == 0)


def test_a_session_of_tls_1_2_cannot_be_resumed(kind: str, certificates: Certificates) -> None:
    security = certificates.client(certificates.issue("anna", common_name="anna"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(security.ca)
    context.load_cert_chain(security.certificate, security.key or None)
    context.check_hostname, context.maximum_version = False, ssl.TLSVersion.TLSv1_2
    greeting = b"".join(map(bytes, encode_frame(encode_message(hello("test")))))

    @contextmanager
    def connected(port: int, session: ssl.SSLSession | None) -> Iterator[tuple[bytes, ssl.SSLSession | None]]:
        """Connect, and return the bytes that the broker sends after a hello, and the session of the connection."""
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            context.wrap_socket(plain, session=session) as client,
        ):
            assert client.session_reused is (session is not None)
            answer = b""
            with contextlib.suppress(OSError):
                client.sendall(greeting)
                answer = client.recv(65536)
            yield answer, client.session

    with (
        secure(kind, certificates.server(ClientAuth.REQUIRED)) as server,
        connected(server.port, None) as (first, session),  # OpenSSL forgets the session of a connection that has ended
    ):
        assert b"hello_reply" in first and session is not None
        with connected(server.port, session) as (second, _):
            assert second == b""


def test_a_certificate_of_another_authority_is_refused(
    kind: str, client: Client, certificates: Certificates, tmp_path: Any
) -> None:
    with secure(kind, certificates.server()) as server:
        error = refusal(client, server, Certificates(tmp_path / "other").client())
        assert error.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED and not error.retriable
        assert "certificate" in error.detail


def test_a_certificate_of_another_host_is_refused(kind: str, client: Client, certificates: Certificates) -> None:
    tls = ServerTls(PemFiles(certificate=certificates.issue("elsewhere", "example.org")))
    with secure(kind, tls) as server:
        error = refusal(client, server, certificates.client())
        assert error.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED and "127.0.0.1" in error.detail
        relaxed = certificates.client(**{"ssl.endpoint.identification.algorithm": ""})
        assert isinstance(client(server, relaxed).request(Metadata(0))[0], Ack)


def test_an_expired_certificate_is_refused(kind: str, client: Client, certificates: Certificates) -> None:
    with secure(kind, ServerTls(PemFiles(certificate=certificates.issue("expired", days=-1)))) as server:
        error = refusal(client, server, certificates.client())
        assert error.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED and "expired" in error.detail


def test_plain_bytes_to_a_tls_listener_get_a_clear_error(kind: str, client: Client, certificates: Certificates) -> None:
    with secure(kind, certificates.server()) as server:
        assert "this listener uses TLS" in refusal(client, server, ClientSecurity()).detail


def test_tls_to_a_plain_listener_gets_a_clear_error(kind: str, client: Client, certificates: Certificates) -> None:
    with secure(kind, None) as server:
        error = refusal(client, server, certificates.client())
        assert error.code is ErrorCode.INVALID_REQUEST and "does not use TLS" in error.detail


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_tls_1_1_is_refused(kind: str, certificates: Certificates) -> None:
    with secure(kind, certificates.server()) as server:
        for version, accepted in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(certificates.ca)
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            context.minimum_version = context.maximum_version = version
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
                if accepted:
                    with context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped:
                        assert wrapped.version() == "TLSv1.2"
                else:
                    with pytest.raises(OSError, match=r"PROTOCOL_VERSION|UNSUPPORTED_PROTOCOL|EOF|reset"):
                        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_a_client_refuses_tls_1_1(certificates: Certificates) -> None:
    for context in (ClientTls(PemFiles(certificates.ca)).context(), certificates.server().context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


# --- certificates of clients ------------------------------------------------------------------------------------------


def test_the_certificate_of_a_client_is_its_principal(kind: str, client: Client, certificates: Certificates) -> None:
    with secure(kind, certificates.server(ClientAuth.REQUIRED)) as server:
        connection = client(server, certificates.client(certificates.issue("anna", common_name="anna")))
        assert isinstance(connection.request(Metadata(0))[0], Ack)
        assert str(server.connections[-1].principal).startswith("User:CN=anna,")
        connection.close()


def test_a_rule_maps_the_certificate_to_its_principal(kind: str, client: Client, certificates: Certificates) -> None:
    tls = certificates.server(ClientAuth.REQUIRED, "RULE:^CN=([a-z]+),.*$/$1/")
    with secure(kind, tls) as server:
        connection = client(server, certificates.client(certificates.issue("anna", common_name="anna")))
        assert str(server.connections[-1].principal) == "User:anna"
        connection.close()
        wait_until(lambda: server.open_connections() == 0)
        error = refusal(client, server, certificates.client(certificates.issue("number", common_name="12")))
        assert "no mapping rule" in error.detail


def test_a_client_without_a_certificate_is_refused(kind: str, client: Client, certificates: Certificates) -> None:
    with secure(kind, certificates.server(ClientAuth.REQUIRED)) as server:
        error = refusal(client, server, certificates.client())
        assert error.code is ErrorCode.SASL_AUTHENTICATION_FAILED and "CERTIFICATE_REQUIRED" in error.detail


def test_a_clients_certificate_of_another_authority_is_refused(
    kind: str, client: Client, certificates: Certificates, tmp_path: Any
) -> None:
    stranger = Certificates(tmp_path / "other").issue("anna", common_name="anna")
    with secure(kind, certificates.server(ClientAuth.REQUIRED)) as server:
        error = refusal(client, server, certificates.client(stranger))
        assert error.code is ErrorCode.SASL_AUTHENTICATION_FAILED and "UNKNOWN_CA" in error.detail


def test_a_requested_certificate_may_be_missing(kind: str, client: Client, certificates: Certificates) -> None:
    with secure(kind, certificates.server(ClientAuth.REQUESTED)) as server:
        connection = client(server, certificates.client())
        assert str(server.connections[-1].principal) == "User:ANONYMOUS"
        connection.close()


def test_logins_by_certificate_are_reported(
    kind: str, client: Client, certificates: Certificates, tmp_path: Any
) -> None:
    reports = TwoStepLogins()
    tls = certificates.server(ClientAuth.REQUIRED, "RULE:^CN=([a-z]+),.*$/$1/")
    with secure(kind, tls, reports=reports) as server:
        client(server, certificates.client(certificates.issue("anna", common_name="anna"))).close()
        wait_until(lambda: server.open_connections() == 0)
        assert reports.events == ["User:anna by SSL from 127.0.0.1"]
        stranger = Certificates(tmp_path / "other").issue("anna", common_name="anna")
        for refused in ("", stranger, certificates.issue("number", common_name="12")):
            refusal(client, server, certificates.client(refused))
        assert reports.events[1:] == ["SASL_AUTHENTICATION_FAILED by SSL from 127.0.0.1"] * 3


@pytest.mark.usefixtures("early")
def test_a_client_logs_in_over_tls(kind: str, client: Client, certificates: Certificates) -> None:
    logins = ScramLogins(1500)
    login = anna()
    both = certificates.client(
        **{
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": login.mechanism,
            "sasl.username": "anna",
            "sasl.password": login.password.reveal(),
        }
    )
    with secure(kind, certificates.server(), logins) as server:
        connection = client(server, both)
        end_s = time.monotonic() + 1.3
        while time.monotonic() < end_s:
            assert isinstance(connection.request(Metadata(0))[0], Ack)
            time.sleep(0.01)
        assert str(server.connections[-1].principal) == "User:anna" and logins.successes >= 3
        connection.close()


# --- files ------------------------------------------------------------------------------------------------------------


def test_certificates_change_without_a_failed_request(kind: str, client: Client, certificates: Certificates) -> None:
    """The listener first gets a new certificate of the same authority, and then one of another authority."""
    tls = certificates.server()
    with secure(kind, tls) as server:
        security = certificates.client()
        first = client(server, security)
        ended, failures = threading.Event(), list[BaseException]()

        def use() -> None:
            while not ended.is_set():
                assert isinstance(first.request(Produce(0, -1, 1000, ()), bytes(1000))[0], FetchReply)
                another = client(server, security)
                assert isinstance(another.request(Metadata(0))[0], Ack)
                another.close()

        def use_and_report() -> None:
            try:
                use()
            except BaseException as error:
                failures.append(error)

        using = threading.Thread(target=use_and_report)
        using.start()
        seen = set()
        for _ in range(5):
            certificates.issue("broker", common_name="broker")
            time.sleep(0.05)
            seen.add(presented(server.port, certificates))
        ended.set()
        using.join(20)
        assert not failures and len(seen) == 5
        assert isinstance(first.request(Metadata(0))[0], Ack)
        first.close()


def presented(port: int, certificates: Certificates) -> bytes:
    """Return the certificate that the listener presents now."""
    context = ClientTls(PemFiles(certificates.ca)).context()
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
    ):
        found = wrapped.getpeercert(binary_form=True)
        assert found is not None
        return found


def test_a_file_that_cannot_be_used_changes_nothing(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    tls = certificates.server()
    before = tls.context()
    assert tls.context() is before
    Path(tls.files.certificate).write_text("half a certificate", "utf-8")
    with caplog.at_level(logging.WARNING):
        assert tls.context() is before and tls.context() is before
    assert len(caplog.records) == 1
    certificates.issue("broker")
    assert tls.context() is not before


def test_missing_and_broken_files_are_named(certificates: Certificates, tmp_path: Any) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing", "utf-8")
    for files in (PemFiles(certificate=str(broken)), PemFiles(certificate=str(tmp_path / "broken.pem.missing"))):
        with pytest.raises(ConfigError, match=r"broken\.pem"):
            ServerTls(files)
    with pytest.raises(ConfigError, match=r"ssl\.ca\.location"):
        ServerTls(PemFiles(certificate=certificates.issue("x")), ClientAuth.REQUIRED)


def test_a_removed_authority_ends_the_access_of_its_clients(
    kind: str, client: Client, certificates: Certificates, tmp_path: Any
) -> None:
    other = Certificates(tmp_path / "other")
    trusted = tmp_path / "trusted.pem"
    both = Path(certificates.ca).read_text("utf-8") + Path(other.ca).read_text("utf-8")
    trusted.write_text(both, "utf-8")
    tls = ServerTls(PemFiles(str(trusted), certificates.issue("broker")), ClientAuth.REQUIRED)
    stranger = certificates.client(other.issue("anna", common_name="anna"))
    with secure(kind, tls) as server:
        client(server, stranger).close()
        wait_until(lambda: server.open_connections() == 0)
        trusted.write_text(Path(certificates.ca).read_text("utf-8"), "utf-8")
        assert not refusal(client, server, stranger).retriable


@pytest.mark.parametrize("days", [10, -3, 365 * 40])
def test_the_time_of_expiry_follows_the_file(certificates: Certificates, days: int) -> None:
    certificates.issue("broker", days=100)
    tls = ServerTls(PemFiles(certificate=str(certificates.directory / "broker.pem")))
    for expected in (100, days):
        certificates.issue("broker", days=expected)
        found = tls.expires_at_s()
        assert found is not None and abs(found - time.time() - expected * 86_400) < 60


def test_a_broken_certificate_has_no_expiry() -> None:
    for content in (b"", b"\x30", b"\x30\x05\x30\x03\x02\x01", b"\x02\x01\x01", b"\x30\x02\x30\x00"):
        with pytest.raises((ValueError, IndexError)):
            not_after_s(content)


def test_the_server_reports_its_first_expiry(kind: str, certificates: Certificates) -> None:
    with secure(kind, certificates.server()) as server:
        Blocking(server, certificates.client())
        expires_in_s = server.connections[-1].certificates_expire_in_s
        assert expires_in_s is not None and abs(expires_in_s - 30 * 86_400) < 60


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01"])
def test_a_peer_that_stops_in_the_handshake_is_closed(kind: str, certificates: Certificates, sent: bytes) -> None:
    with secure(kind, certificates.server(), hello_s=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
            silent.sendall(sent)
            wait_until(lambda: server.open_connections() == 1)
            assert silent.recv(100) == b""
        wait_until(lambda: server.open_connections() == 0)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def connections_in_memory() -> int:
    """Return the number of objects that connections of the server, open or closed, occupy."""
    return sum(type(found).__name__ in {"ServerConnection", "SSLProtocol"} for found in gc.get_objects())


@pytest.mark.usefixtures("no_collector")
def test_a_closed_connection_leaves_no_garbage(kind: str, certificates: Certificates) -> None:
    """Otherwise peers without a login could fill the memory: TLS has buffers of 256 KiB for each connection."""
    context = ClientTls(PemFiles(certificates.ca)).context()
    with secure(kind, certificates.server()) as server:
        Blocking(server, certificates.client()).close()
        for count, closes in ((2, False), (3, True)):
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
            ):
                wait_until(lambda count=count: len(server.connections) == count)  # type: ignore[misc]
                if closes:
                    server.loop.call_soon_threadsafe(server.connections[-1].close)
                    assert wrapped.recv(1) == b""
                else:
                    wrapped.sendall(b"\1")
        server.connections.clear()
        wait_until(lambda: connections_in_memory() == 0)


@pytest.mark.usefixtures("no_collector")
def test_a_failed_handshake_leaves_no_garbage(kind: str, certificates: Certificates) -> None:
    with secure(kind, certificates.server()) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
            plain.sendall(b"\x16\x03\x01\x00\xff" + bytes(50))
            wait_until(lambda: connections_in_memory() > 0)
        wait_until(lambda: server.open_connections() == 0)
        wait_until(lambda: connections_in_memory() == 0)


def test_a_peer_without_a_hello_is_closed_after_the_handshake(kind: str, certificates: Certificates) -> None:
    with secure(kind, certificates.server(), hello_s=0.3) as server:
        context = ClientTls(PemFiles(certificates.ca)).context()
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
        ):
            assert wrapped.recv(100) == b""


def test_handshakes_leave_their_slots_to_others(kind: str, client: Client, certificates: Certificates) -> None:
    with secure(kind, certificates.server(), max_connections=4) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(12)]
        wait_until(lambda: server.open_connections() == 4)
        users = [client(server, certificates.client()) for _ in range(4)]
        for user in users:
            assert isinstance(user.request(Metadata(0))[0], Ack)
        assert server.open_connections() == 4
        for user in users:
            user.close()
        for one in silent:
            one.close()


def test_a_handshake_in_progress_does_not_delay_the_end(kind: str, certificates: Certificates) -> None:
    with (
        secure(kind, certificates.server()) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent,
    ):
        silent.sendall(b"\x16\x03\x01\x02")
        wait_until(lambda: server.open_connections() == 1)
        began_s = time.monotonic()
        server.run(server.server.close())
        assert time.monotonic() - began_s < 2


def test_the_first_frames_of_a_client_may_come_with_its_handshake(kind: str, certificates: Certificates) -> None:
    """A client of TLS 1.3 may send its hello in the same segment as the end of its handshake."""
    with secure(kind, certificates.server()) as server:
        context = ClientTls(PemFiles(certificates.ca)).context()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    plain.sendall(outgoing.read())
                    incoming.write(plain.recv(65536))
            tls.write(b"".join(map(bytes, encode_frame(encode_message(hello("eager"))))))
            plain.sendall(outgoing.read())
            found = b""
            while b"hello_reply" not in found:
                received = plain.recv(65536)
                assert received
                incoming.write(received)
                found += tls.read(65536)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_peer_that_does_not_end_tls_is_aborted(
    kind: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a second close, as when a login fails while the connection is closing."""
    monkeypatch.setattr(server_connection, "_TLS_CLOSE_S", 0.1)
    failures: list[str] = []
    with secure(kind, certificates.server()) as server:
        server.loop.call_soon_threadsafe(
            server.loop.set_exception_handler, lambda loop, context: failures.append(repr(context))
        )
        context = ssl.create_default_context(cafile=certificates.ca)
        with (
            socket.create_connection(("127.0.0.1", server.port), 10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as client,
        ):
            wait_until(lambda: bool(server.connections), "the handshake is complete")
            [connection] = server.connections

            async def close_twice() -> None:
                connection.close()
                connection.close()

            server.run(close_twice())
            wait_until(lambda: connection.closed, "the connection is aborted")
            assert client.fileno() >= 0
    assert not failures
