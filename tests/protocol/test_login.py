"""Tests of the server end on a listener that requires a login: what it serves before, and how sessions end."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import msgspec.inspect as inspection
import pytest

from sparklog.errors import ErrorCode
from sparklog.model import Principal
from sparklog.net.greeting import Credentials, Greeting
from sparklog.protocol.connection import MAX_HELLO_BYTES, MAX_LOGIN_BYTES, ImmediateAnswer, ServerEnd, hello
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.login import ServerLogin
from sparklog.protocol.messages import (
    Ack,
    ErrorReply,
    Hello,
    HelloReply,
    Metadata,
    Produce,
    Prove,
    Request,
    SaslAuthenticate,
    SaslAuthenticateReply,
    decode_request,
    encode_message,
)
from sparklog.protocol.proof import SECRET_BYTES, Identity, KeyRing, Secret
from sparklog.protocol.received import ReceivedRequest
from sparklog.protocol.sasl import ServerStep
from sparklog.protocol.senders import SenderKind
from tests.net.two_step_login import MECHANISM, TwoStepServer

MIB = 1024 * 1024
USERS = {b"anna": b"a-secret", b"bert": b"b-secret"}


class Peer:
    """A server end that requires a login, and the bytes that its peer sends."""

    def __init__(self, *, lifetime_ms: int = 0, credentials: Credentials | None = None, login: bool = True) -> None:
        def describe(cid: int, version: int) -> HelloReply:
            return HelloReply(cid, version, 1, 1, "c", MIB, "boot", "/local", "unix", ("127.0.0.1", 1))

        def lifetime(step: ServerStep) -> int:
            return lifetime_ms

        logins = ServerLogin((MECHANISM,), lambda mechanism: TwoStepServer(USERS), lifetime) if login else None
        self.end = ServerEnd(describe, 64 * MIB, credentials, logins)

    def sends(self, *messages: Request, body: bytes = b"") -> list[ReceivedRequest | ImmediateAnswer]:
        return self.sends_bytes(
            b"".join(
                bytes(part) for one in messages for part in encode_frame(encode_message(one), [body] if body else [])
            )
        )

    def sends_bytes(self, left: bytes) -> list[ReceivedRequest | ImmediateAnswer]:
        found: list[ReceivedRequest | ImmediateAnswer] = []
        while left:
            buffer = self.end.get_buffer()
            count = min(len(buffer), len(left))
            buffer[:count] = left[:count]
            left = left[count:]
            event = self.end.decode_single(count)
            found += self.end.buffer_updated(count) if event is None else [event]
            if any(isinstance(one, ImmediateAnswer) and one.close for one in found):
                break
        return found

    def greets(self) -> HelloReply:
        (answer,) = self.sends(hello("test"))
        assert isinstance(answer, ImmediateAnswer) and isinstance(answer.reply, HelloReply) and not answer.close
        return answer.reply

    def logs_in(self, user: bytes = b"anna") -> SaslAuthenticateReply:
        first, last = self.sends(SaslAuthenticate(1, MECHANISM, user), SaslAuthenticate(2, MECHANISM, USERS[user]))
        assert isinstance(first, ImmediateAnswer) and first.reply == SaslAuthenticateReply(1, b"password?", False)
        assert isinstance(last, ImmediateAnswer) and isinstance(last.reply, SaslAuthenticateReply)
        assert last.reply.complete and not last.close
        return last.reply

    def is_served(self) -> bool:
        (event,) = self.sends(Metadata(9))
        return isinstance(event, ReceivedRequest)


def refusal(events: list[ReceivedRequest | ImmediateAnswer]) -> ErrorCode:
    """Return the code of the error that closes the connection."""
    last = events[-1]
    assert isinstance(last, ImmediateAnswer) and isinstance(last.reply, ErrorReply) and last.close
    return ErrorCode(last.reply.code)


def sample(kind: type) -> Request:
    """Return a request of this kind with the smallest valid value of each field."""
    return decode_request(msgspec.msgpack.encode([kind.__struct_config__.tag, *map(_smallest, _fields(kind))]))  # type: ignore[attr-defined]


def _fields(kind: type) -> list[Any]:
    described = inspection.type_info(kind)
    assert isinstance(described, inspection.StructType)
    return [field.type for field in described.fields if field.required]


def _smallest(found: Any) -> object:
    match found:
        case inspection.Metadata(type=inner):
            return _smallest(inner)
        case inspection.UnionType(types=types):
            return _smallest(types[0])
        case inspection.StructType(cls=cls):
            return [_smallest(one) for one in _fields(cls)]
        case inspection.TupleType(item_types=types):
            return [_smallest(one) for one in types]
        case inspection.DictType():
            return {}
        case inspection.IntType():
            return 1
        case inspection.BoolType():
            return False
        case inspection.StrType():
            return ""
        case inspection.BytesType():
            return b""
        case _:
            return None if isinstance(found, inspection.NoneType) else []


def test_the_hello_names_mechanisms_and_no_sockets() -> None:
    reply = Peer().greets()
    assert reply.sasl_mechanisms == (MECHANISM,)
    assert (reply.boot_id, reply.local_socket, reply.unix_socket, reply.reached_at) == ("", "", "", ("", 0))
    plain = Peer(login=False).greets()
    assert (plain.sasl_mechanisms, plain.local_socket, plain.unix_socket) == ((), "/local", "unix")


def test_a_request_is_served_after_the_login() -> None:
    peer = Peer()
    peer.greets()
    reply = peer.logs_in()
    assert (reply.data, reply.session_lifetime_ms) == (b"welcome", 0)
    assert peer.is_served()
    assert peer.end.login is not None and peer.end.login.principal == Principal("User", "anna")


@pytest.mark.parametrize("kind", get_args(Request), ids=lambda kind: kind.__name__)
def test_no_request_is_served_before_the_login(kind: type) -> None:
    if kind in {Hello, SaslAuthenticate}:
        return
    peer = Peer()
    peer.greets()
    code = refusal(peer.sends(sample(kind)))
    # A Prove is for brokers, and this peer's hello has offered no proof.
    assert code is (ErrorCode.INVALID_REQUEST if kind is Prove else ErrorCode.ILLEGAL_SASL_STATE)


def test_no_request_is_served_during_the_login() -> None:
    peer = Peer()
    peer.greets()
    assert refusal(peer.sends(SaslAuthenticate(1, MECHANISM, b"anna"), Metadata(2))) is ErrorCode.ILLEGAL_SASL_STATE


def test_a_login_before_hello_is_refused() -> None:
    assert refusal(Peer().sends(SaslAuthenticate(1, MECHANISM, b"anna"))) is ErrorCode.ILLEGAL_SASL_STATE


def test_a_login_on_a_listener_without_logins_is_refused() -> None:
    peer = Peer(login=False)
    peer.greets()
    assert refusal(peer.sends(SaslAuthenticate(1, MECHANISM, b"anna"))) is ErrorCode.ILLEGAL_SASL_STATE


def test_a_wrong_password_ends_the_connection() -> None:
    peer = Peer()
    peer.greets()
    wrong = peer.sends(SaslAuthenticate(1, MECHANISM, b"anna"), SaslAuthenticate(2, MECHANISM, b"b-secret"))
    assert refusal(wrong) is ErrorCode.SASL_AUTHENTICATION_FAILED


def test_another_mechanism_in_the_middle_of_a_login_is_refused() -> None:
    peer = Peer()
    peer.greets()
    changed = peer.sends(SaslAuthenticate(1, MECHANISM, b"anna"), SaslAuthenticate(2, "OTHER", b"a-secret"))
    assert refusal(changed) is ErrorCode.ILLEGAL_SASL_STATE


def test_a_login_has_a_bounded_number_of_messages() -> None:
    class Endless:
        mechanism = MECHANISM
        username = ""

        def step(self, data: bytes) -> ServerStep:
            return ServerStep(b"more")

    login = ServerLogin((MECHANISM,), lambda mechanism: Endless(), lambda step: 0)
    end = Peer()
    end.end.login = login
    end.greets()
    assert refusal([one for number in range(20) for one in end.sends(SaslAuthenticate(number, MECHANISM, b""))][:9])


@pytest.mark.parametrize("single", [False, True])
def test_frames_stay_small_until_the_login_is_complete(single: bool) -> None:
    peer = Peer()
    assert refusal(Peer().sends(hello("x"), body=bytes(MAX_HELLO_BYTES))) is ErrorCode.FRAME_TOO_LARGE
    peer.greets()
    # A frame of this size fits into the receive buffer.
    frame = b"".join(map(bytes, encode_frame(encode_message(Metadata(1)), [bytes(MAX_LOGIN_BYTES)])))
    sent = frame if single else frame[:8]
    assert refusal(peer.sends_bytes(sent)) is ErrorCode.FRAME_TOO_LARGE
    other = Peer()
    other.greets()
    other.logs_in()
    (event,) = other.sends(Produce(3, 1, 1, ()), body=bytes(10 * MIB))
    assert isinstance(event, ReceivedRequest) and len(event.body) == 10 * MIB
    assert other.is_served()


def test_hello_and_login_may_arrive_together() -> None:
    peer = Peer()
    events = peer.sends(
        hello("eager"),
        SaslAuthenticate(1, MECHANISM, b"anna"),
        SaslAuthenticate(2, MECHANISM, b"a-secret"),
        Metadata(3),
    )
    assert [type(event).__name__ for event in events] == ["ImmediateAnswer"] * 3 + ["ReceivedRequest"]


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_that_expires_ends_at_the_next_request() -> None:
    peer = Peer(lifetime_ms=1000)
    peer.greets()
    assert peer.logs_in().session_lifetime_ms == 1000
    peer.end.session_expired()
    assert refusal(peer.sends(Metadata(3))) is ErrorCode.NETWORK_EXCEPTION


def test_a_second_login_continues_the_session() -> None:
    peer = Peer(lifetime_ms=1000)
    peer.greets()
    peer.logs_in()
    assert peer.is_served()
    peer.sends(SaslAuthenticate(3, MECHANISM, b"anna"))
    assert peer.is_served(), "the session continues while another login is in progress"
    peer.end.session_expired()
    (last,) = peer.sends(SaslAuthenticate(4, MECHANISM, b"a-secret"))
    assert isinstance(last, ImmediateAnswer) and not last.close
    assert peer.is_served()


def test_a_second_login_as_another_principal_is_refused() -> None:
    peer = Peer()
    peer.greets()
    peer.logs_in()
    other = peer.sends(SaslAuthenticate(3, MECHANISM, b"bert"), SaslAuthenticate(4, MECHANISM, b"b-secret"))
    assert refusal(other) is ErrorCode.SASL_AUTHENTICATION_FAILED


# --- brokers ----------------------------------------------------------------------------------------------------------


def test_a_proved_broker_needs_no_login() -> None:
    keys = KeyRing((Secret(b"s" * SECRET_BYTES),))
    peer = Peer(credentials=Credentials(keys, lambda: Identity(SenderKind.BROKER, 1, 1)))
    other = Credentials(keys, lambda: Identity(SenderKind.BROKER, 2, 1))
    greeting = Greeting("broker 2", "c", credentials=other, broker_id=1, proof_required=True)
    opened = greeting.hello()
    (answer,) = peer.sends(opened)
    assert isinstance(answer, ImmediateAnswer) and isinstance(answer.reply, HelloReply)
    prove = greeting.prove(opened, answer.reply)
    assert prove is not None
    (proved,) = peer.sends(prove)
    assert isinstance(proved, ImmediateAnswer) and isinstance(proved.reply, Ack)
    assert peer.is_served()
