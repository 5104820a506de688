"""Tests of clients that continue on the broker's Unix socket after TLS or a login, and of processes that try to."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal
from sparklog.net.async_client import AsyncConnection
from sparklog.net.authentication import ListenerSecurity
from sparklog.net.client_security import ClientSecurity
from sparklog.net.greeting import Greeting
from sparklog.net.server_connection import ServerConnection
from sparklog.net.unix_tokens import UnixSession, UnixTokens
from sparklog.protocol.connection import ClientEnd, hello
from sparklog.protocol.messages import (
    Ack,
    ErrorReply,
    HelloReply,
    Metadata,
    Reply,
    Request,
    RequestUnixSocket,
    UnixSocketReply,
)
from sparklog.protocol.proof import SECRET_BYTES, Identity, Secret
from sparklog.protocol.senders import SenderKind
from sparklog.security.listeners import ClientAuth
from tests.net.certificates import Certificates
from tests.net.test_client_logins import PASSWORD, ScramLogins, anna, early
from tests.net.test_tls import Async, Blocking, Client, Secure, secure
from tests.waiting import wait_until

#: The fixture is used by its name.
__all__ = ["early"]

ANNA = Principal("User", "anna")
SESSION = UnixSession(ANNA, None, "127.0.0.1", ListenerSecurity("SECURE"), None)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["asyncio", "uvloop"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[Blocking, Async])
def client(request: pytest.FixtureRequest) -> Client:
    made: Client = request.param
    return made


@pytest.fixture
def server(kind: str) -> Iterator[Secure]:
    with secure(kind, None, ScramLogins(0), within_host=True) as made:
        yield made


def both(certificates: Certificates) -> ClientSecurity:
    login = {"sasl.mechanism": anna().mechanism, "sasl.username": "anna", "sasl.password": PASSWORD}
    return certificates.client(**{"security.protocol": "SASL_SSL", **login})


def only_connection(server: Secure) -> ServerConnection:
    """Return the last connection once it is the only one that is left."""
    wait_until(lambda: server.open_connections() == 1)
    return server.connections[-1]


# --- clients ----------------------------------------------------------------------------------------------------------


def test_a_client_continues_as_the_principal_of_its_login(
    kind: str, client: Client, certificates: Certificates
) -> None:
    with secure(kind, certificates.server(), ScramLogins(0), within_host=True) as server:
        connection = client(server, both(certificates))
        assert isinstance(connection.request(Metadata(0))[0], Ack)
        served = only_connection(server)
        assert (served.within_host, served.listener, served.peer_host) == (True, "SECURE", "127.0.0.1")
        assert served.principal == ANNA


def test_a_client_continues_as_the_principal_of_its_certificate(
    kind: str, client: Client, certificates: Certificates
) -> None:
    with secure(kind, certificates.server(ClientAuth.REQUIRED), within_host=True) as server:
        connection = client(server, certificates.client(certificates.issue("anna", common_name="anna")))
        assert isinstance(connection.request(Metadata(0))[0], Ack)
        served = only_connection(server)
        assert served.within_host and "CN=anna" in served.principal.name


def test_a_client_stays_with_tcp_if_there_is_no_unix_socket(client: Client, certificates: Certificates) -> None:
    with secure("asyncio", certificates.server(), ScramLogins(0)) as server:
        connection = client(server, both(certificates))
        assert isinstance(connection.request(Metadata(0))[0], Ack)
        assert not only_connection(server).within_host


@pytest.mark.usefixtures("early")
def test_a_client_logs_in_again_on_the_unix_socket(client: Client) -> None:
    logins = ScramLogins(1500)
    with secure("asyncio", None, logins, within_host=True) as server:
        connection = client(server, anna())
        while logins.successes < 2:
            assert isinstance(connection.request(Metadata(0))[0], Ack)
            time.sleep(0.01)
        assert isinstance(connection.request(Metadata(0))[0], Ack)
        assert only_connection(server).within_host


def test_a_session_ends_on_the_unix_socket(server: Secure) -> None:
    token = Token(server, expires_s=time.monotonic() + 0.2)
    stranger = Stranger(server)
    stranger.prove(token.secret)
    wait_until(lambda: isinstance(stranger.outcome(Metadata(0)), ErrorReply))


def test_the_role_of_a_broker_continues(server: Secure) -> None:
    token = Token(server, identity=Identity(SenderKind.BROKER, 4, 9))
    Stranger(server).prove(token.secret)
    assert server.connections[-1].identity == Identity(SenderKind.BROKER, 4, 9)


# --- strangers --------------------------------------------------------------------------------------------------------


class Token:
    """A token that the server has issued, as if a client had logged in."""

    def __init__(self, server: Secure, identity: Identity | None = None, expires_s: float | None = None) -> None:
        session = SESSION._replace(
            identity=identity, expires_s=expires_s, security=ListenerSecurity("SECURE", ScramLogins(0))
        )

        async def issue() -> Secret:
            return server.server._limits.unix_tokens.issue(session)

        self.secret = bytes.fromhex(server.run(issue()).hex())


class Stranger:
    """A process of this host that knows the name of the Unix socket. The server's fixture closes it."""

    def __init__(self, server: Secure) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(10)
        self._socket.connect(f"\0{server.server.unix_socket}")
        self._end = ClientEnd()
        server.clients.append(self)

    def close(self) -> None:
        self._socket.close()

    def ask(self, message: Request) -> Reply:
        _, buffers = self._end.encode(message)
        self._socket.sendall(b"".join(bytes(buffer) for buffer in buffers))
        while True:
            count = self._socket.recv_into(self._end.get_buffer())
            assert count, "closed by the broker"
            for received in self._end.buffer_updated(count):
                return received.reply

    def outcome(self, message: Request) -> Reply:
        """Return the reply, or an error if the connection is closed."""
        try:
            return self.ask(message)
        except (OSError, AssertionError) as error:
            return ErrorReply(0, ErrorCode.NETWORK_EXCEPTION, str(error))

    def prove(self, secret: bytes) -> None:
        """Prove a token, as a client does. Raises BrokerError if the broker does not prove the same."""
        greeting = Greeting.with_token("stranger", "", secret)
        said = greeting.hello()
        reply = self.ask(said)
        if isinstance(reply, ErrorReply):
            raise BrokerError(reply.code, reply.detail)
        assert isinstance(reply, HelloReply)
        prove = greeting.prove(said, reply)
        assert prove is not None
        assert isinstance(self.ask(prove), Ack)


def test_nothing_is_served_without_a_token(server: Secure) -> None:
    stranger = Stranger(server)
    greeted = stranger.ask(hello("stranger"))
    assert isinstance(greeted, HelloReply)
    assert (greeted.boot_id, greeted.local_socket, greeted.unix_socket) == ("", "", "")
    refused = stranger.ask(Metadata(0))
    assert isinstance(refused, ErrorReply) and refused.code == ErrorCode.ILLEGAL_SASL_STATE


def test_a_token_is_used_once(server: Secure) -> None:
    token = Token(server)
    first = Stranger(server)
    first.prove(token.secret)
    assert isinstance(first.ask(Metadata(0)), Ack)
    with pytest.raises(BrokerError, match="has not proved"):
        Stranger(server).prove(token.secret)


def test_a_wrong_token_is_refused(server: Secure) -> None:
    token = Token(server)
    with pytest.raises(BrokerError, match="has not proved"):
        Stranger(server).prove(os.urandom(SECRET_BYTES))
    Stranger(server).prove(token.secret)


def test_a_hello_that_does_not_know_the_secret_is_not_served(server: Secure) -> None:
    """The id of a token is in the hello. A process that has seen it cannot prove the secret, and ends the token."""
    token = Token(server)
    stranger = Stranger(server)
    greeting = Greeting.with_token("stranger", "", token.secret)
    stranger.ask(greeting.hello())
    refused = stranger.ask(Metadata(0))
    assert isinstance(refused, ErrorReply) and refused.code == ErrorCode.ILLEGAL_SASL_STATE
    with pytest.raises(BrokerError, match="has not proved"):
        Stranger(server).prove(token.secret)


def test_the_tokens_of_a_principal_end_with_its_connections(server: Secure) -> None:
    token = Token(server)

    async def close() -> None:
        server.server.close_connections(ANNA)

    server.run(close())
    with pytest.raises(BrokerError, match="has not proved"):
        Stranger(server).prove(token.secret)


def test_a_token_in_use_ends_with_the_connections_of_its_principal(server: Secure) -> None:
    token, stranger = Token(server), Stranger(server)
    greeting = Greeting.with_token("stranger", "", token.secret)
    said = greeting.hello()
    reply = stranger.ask(said)
    assert isinstance(reply, HelloReply)

    async def close() -> int:
        return server.server.close_connections(ANNA)

    assert server.run(close()) == 1
    proof = greeting.prove(said, reply)
    assert proof is not None
    outcome = stranger.outcome(proof)
    assert isinstance(outcome, ErrorReply) and outcome.code == ErrorCode.NETWORK_EXCEPTION


def test_a_hello_with_a_token_is_served_after_its_proof_also_without_logins() -> None:
    """Quotas and limits are those of the first request's principal, so it must be that of the token."""
    with secure("asyncio", None, None, within_host=True) as server:
        greeting = Greeting.with_token("stranger", "", Token(server).secret)
        early = Stranger(server)
        early.ask(greeting.hello())
        refused = early.outcome(Metadata(0))
        assert isinstance(refused, ErrorReply) and refused.code == ErrorCode.ILLEGAL_SASL_STATE
        proved, plain = Stranger(server), Stranger(server)
        proved.prove(Token(server).secret)
        assert isinstance(proved.ask(Metadata(0)), Ack)
        assert isinstance(plain.ask(hello("stranger")), HelloReply)
        assert isinstance(plain.ask(Metadata(0)), Ack)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
def test_another_user_of_the_host_gets_nothing(server: Secure, tmp_path: Path) -> None:
    program = tmp_path / "stranger.py"
    program.write_text(
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "with socket.socket(socket.AF_UNIX) as one:\n"
        "    one.connect('\\0' + sys.argv[1])\n"
        "    one.sendall(bytes.fromhex(sys.argv[2]))\n"
        "    one.settimeout(10)\n"
        "    said = b''\n"
        "    while part := one.recv(65536):\n"
        "        said += part\n"
        "    print(said.hex())\n"
    )
    end = ClientEnd()
    frames = b"".join(bytes(part) for message in (hello("stranger"), Metadata(0)) for part in end.encode(message)[1])
    command = [sys.executable, str(program), server.server.unix_socket, frames.hex()]
    said = bytes.fromhex(subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout)
    end.get_buffer()[: len(said)] = said
    replies = [received.reply for received in end.buffer_updated(len(said))]
    assert [type(reply) for reply in replies] == [HelloReply, ErrorReply], "the broker closes after the refusal"


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_token_ends_after_its_lifetime() -> None:
    tokens = UnixTokens(lifetime_s=0)
    token = tokens.issue(SESSION)
    assert tokens.take((token.key_id,)) is None
    assert not len(tokens)


def test_the_number_of_tokens_is_bounded() -> None:
    tokens = UnixTokens(most=3)
    issued = [tokens.issue(SESSION) for _ in range(5)]
    assert len(tokens) == 3
    assert [tokens.take((token.key_id,)) is not None for token in issued] == [False, False, True, True, True]


def test_a_connection_has_one_unused_token(server: Secure) -> None:
    async def ask_twice() -> int:
        connection = await AsyncConnection.open("127.0.0.1", server.port, client_id="test", security=anna())
        plain = server.connections[-2]
        assert not plain.within_host
        assert plain._tokens is not None
        first: Any = plain._tokens.issue(1, SESSION)
        second: Any = plain._tokens.issue(2, SESSION)
        assert isinstance(first, UnixSocketReply) and first.secret != second.secret
        unused = len(server.server._limits.unix_tokens)
        assert isinstance((await connection.request(RequestUnixSocket(0)))[0], UnixSocketReply)
        connection.close()
        await asyncio.sleep(0)
        return unused

    assert server.run(ask_twice()) == 1
