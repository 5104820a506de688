"""Fuzzing of a listener with TLS on a socket."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.authentication import LoginPeer
from sparklog.net.blocking import BlockingConnection
from sparklog.net.client_security import ClientSecurity
from sparklog.protocol.connection import hello
from sparklog.protocol.messages import Ack, Metadata, SaslAuthenticate
from sparklog.protocol.sasl import SCRAM_SHA_256, SaslServer
from tests.broker.fuzz_logins.correct_logins import ANNA, SCRAM
from tests.broker.fuzz_logins.mutations import maybe, mutated, pieces
from tests.broker.fuzz_logins.server_ends import frame
from tests.net.certificates import Certificates
from tests.net.test_client_logins import ScramLogins
from tests.net.test_tls import secure
from tests.waiting import wait_until


class Logins(ScramLogins):
    """Logins that refuse another mechanism, as a broker's do."""

    def begin(self, mechanism: str, connection: LoginPeer) -> SaslServer:
        if mechanism not in SCRAM:
            raise BrokerError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, f"mechanism {mechanism!r} is not enabled")
        return super().begin(mechanism, connection)


class TlsTarget:
    """A listener with TLS. It continues to serve others, and gives every slot back."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._certificates = Certificates(directory)
        self._logins = Logins(0)
        self._server = secure(kind, self._certificates.server(), self._logins, max_connections=100)
        self._good = ClientSecurity.parse({**ANNA, "security.protocol": "SASL_SSL", "sasl.mechanism": SCRAM_SHA_256,
                                           "ssl.ca.location": self._certificates.ca})  # fmt: skip
        self._context = ssl.create_default_context(cafile=self._certificates.ca)
        self._failures: list[str] = []
        self._cases = 0

    @contextmanager
    def running(self) -> Iterator[TlsTarget]:
        with self._server as served:
            self.served = served
            failed = self._failures
            served.loop.call_soon_threadsafe(
                served.loop.set_exception_handler, lambda loop, context: failed.append(repr(context))
            )
            # A user that has logged in before does not wait for the failed logins of others at its address.
            self.check()
            yield self
            self.check()

    def check(self) -> None:
        """Check that another client is served, and that no slot remains taken."""
        one = BlockingConnection("127.0.0.1", self.served.port, client_id="good", timeout_s=20, security=self._good)
        reply, _ = one.request(Metadata(0))
        assert isinstance(reply, Ack)
        one.close()
        wait_until(lambda: self.served.open_connections() == 0, "the slots are given back")
        self.served.connections.clear()
        assert not self._failures, self._failures

    def _client_hello(self, dice: random.Random) -> bytes:
        outgoing = ssl.MemoryBIO()
        context = ssl.create_default_context()
        if dice.random() < 0.5:
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        one = context.wrap_bio(
            ssl.MemoryBIO(), outgoing, server_hostname=dice.choice(("localhost", f"{'x' * 60}.localhost"))
        )
        with contextlib.suppress(ssl.SSLWantReadError):
            one.do_handshake()
        return outgoing.read()

    def case(self, dice: random.Random) -> Iterator[str]:
        self._cases += 1
        if self._cases % 200 == 0:
            self.check()
            yield "checked"
        with contextlib.closing(socket.create_connection(("127.0.0.1", self.served.port), 10)) as plain:
            plain.settimeout(10)
            kind = dice.choice(("random", "truncated", "mutated", "mutated", "records", "frames"))
            try:
                if kind == "frames":
                    with self._context.wrap_socket(plain, server_hostname="127.0.0.1") as inner:
                        first = frame(SaslAuthenticate(1, SCRAM_SHA_256, b"n,,n=eve,r=aaaaaaaaa"))
                        inner.sendall(frame(hello("fuzz")) + maybe(first, dice, 0.9))
                        if dice.random() < 0.5:
                            inner.settimeout(0.05)
                            inner.recv(1000)
                else:
                    self._send(plain, kind, dice)
            except (OSError, TimeoutError):
                yield f"{kind} closed"
            if dice.random() < 0.3:
                with contextlib.suppress(OSError):
                    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        yield kind

    def _send(self, plain: socket.socket, kind: str, dice: random.Random) -> None:
        if kind == "random":
            data = dice.choice((b"", b"\x16", b"\x16\x03\x01")) + dice.randbytes(dice.choice((0, 1, 5, 100, 20_000)))
        elif kind == "records":
            data = b"".join(
                struct.pack(
                    ">BHH", dice.choice((0x14, 0x15, 0x16, 0x17)), 0x0301, dice.choice((0, 1, 2**14, 2**16 - 1))
                )
                + dice.randbytes(dice.choice((0, 1, 100)))
                for _ in range(dice.choice((1, 3, 500)))
            )
        else:
            data = self._client_hello(dice)
            data = data[: dice.randrange(len(data))] if kind == "truncated" else mutated(data, dice)
        for piece in pieces(data, dice) if len(data) < 500 else [data]:
            plain.sendall(piece)
        if dice.random() < 0.3:
            plain.settimeout(0.02)
            plain.recv(1000)
