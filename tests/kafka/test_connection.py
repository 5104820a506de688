"""Tests of the broker's end of a Kafka connection: frames, versions, logins, and bytes that are no request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.connection import KafkaRequest, KafkaServerEnd
from sparklog.kafka.frames import KafkaFrameDecoder
from sparklog.kafka.wire import ApiKey, RequestHeader, decode_response, decode_response_header, request_frame
from sparklog.kafka.wire.data import ProduceRequest
from sparklog.kafka.wire.metadata import ApiVersion, ApiVersionsRequest, ApiVersionsResponse, MetadataRequest
from sparklog.kafka.wire.security import SaslAuthenticateRequest, SaslHandshakeRequest
from sparklog.protocol.connection import ImmediateAnswer
from sparklog.protocol.frames import OWN_MEMORY_BYTES
from sparklog.protocol.login import ServerLogin
from sparklog.protocol.messages import ErrorReply
from sparklog.protocol.received import ReceivedRequest
from sparklog.protocol.sasl import SaslServer
from tests.net.two_step_login import MECHANISM, TwoStepServer

LIMIT = 1 << 20
SERVED = frozenset({ApiKey.PRODUCE, ApiKey.METADATA})
Event = ReceivedRequest | ImmediateAnswer


class Scene:
    """An end, and a client that sends it bytes in pieces and decodes its answers."""

    def __init__(self, *, logs_in: bool = False, lifetime_ms: int = 0) -> None:
        def begin(mechanism: str) -> SaslServer:
            return TwoStepServer({b"anna": b"a-secret"})

        login = ServerLogin((MECHANISM,), begin, lambda step: lifetime_ms) if logs_in else None
        self.end = KafkaServerEnd(_versions, LIMIT, login, served=SERVED)
        self._correlation_id = 0
        self._headers: list[RequestHeader] = []

    def send_bytes(self, left: bytes, pieces: int = 1 << 20) -> list[Event]:
        found: list[Event] = []
        while left:
            buffer = self.end.get_buffer()
            count = min(len(buffer), len(left), pieces)
            buffer[:count], left = left[:count], left[count:]
            event = self.end.decode_single(count)
            found += self.end.buffer_updated(count) if event is None else [event]
            if any(isinstance(one, ImmediateAnswer) and one.close for one in found):
                break
        return found

    def frame(self, key: ApiKey, version: int, request: Any, client_id: str | None = "test") -> bytes:
        self._correlation_id += 1
        header = RequestHeader(key, version, self._correlation_id, client_id)
        self._headers.append(header)
        return b"".join(map(bytes, request_frame(header, request)))

    def send(self, key: ApiKey, version: int, request: Any) -> list[Event]:
        return self.send_bytes(self.frame(key, version, request))

    def answer(self, key: ApiKey, version: int, request: Any) -> Any:
        """Send a request that the end answers itself. Return the decoded response."""
        *_, event = self.send(key, version, request)
        assert isinstance(event, ImmediateAnswer)
        return self.decoded(event)

    def decoded(self, event: ImmediateAnswer) -> Any:
        whole = memoryview(b"".join(map(bytes, self.end.encode_answer(event.reply))))
        assert int.from_bytes(whole[:4], "big") == len(whole) - 4
        header = self._headers[-1]
        found, message = decode_response_header(header.api_key, header.api_version, whole[4:])
        assert found == header.correlation_id
        return decode_response(header.api_key, header.api_version, message)

    def log_in(self, password: bytes = b"a-secret") -> Any:
        assert self.answer(ApiKey.SASL_HANDSHAKE, 1, SaslHandshakeRequest(mechanism=MECHANISM)).error_code == 0
        asked = self.answer(ApiKey.SASL_AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=b"anna"))
        assert asked.auth_bytes == b"password?"
        return self.answer(ApiKey.SASL_AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=password))

    def metadata(self) -> bytes:
        return self.frame(ApiKey.METADATA, 12, MetadataRequest(topics=None))


def _versions(header: RequestHeader) -> ApiVersionsResponse:
    return ApiVersionsResponse(api_keys=[ApiVersion(api_key=ApiKey.METADATA, min_version=0, max_version=13)])


def requests(events: Sequence[Event]) -> list[KafkaRequest]:
    """Return the requests for the handler among the events."""
    found = [event.request for event in events if isinstance(event, ReceivedRequest)]
    assert all(isinstance(request, KafkaRequest) for request in found)
    return found  # type: ignore[return-value]


def closes(events: Sequence[Event]) -> ErrorReply:
    """Return the reason of the last event, which closes the connection without a response."""
    last = events[-1]
    assert isinstance(last, ImmediateAnswer) and last.close and isinstance(last.reply, ErrorReply)
    return last.reply


# --- requests ---------------------------------------------------------------------------------------------------------


def test_the_first_request_admits_a_client() -> None:
    scene = Scene()
    assert not scene.end.admitted
    greeting, request = scene.send_bytes(scene.metadata())
    assert isinstance(greeting, ImmediateAnswer) and scene.end.encode_answer(greeting.reply) == []
    assert isinstance(request, ReceivedRequest) and scene.end.admitted
    assert scene.end.client_id == "test"
    (event,) = scene.send_bytes(scene.metadata())
    assert isinstance(event, ReceivedRequest)


def test_equal_correlation_ids_are_different_requests() -> None:
    scene = Scene()
    frame = scene.metadata()
    found = requests(scene.send_bytes(frame + frame))
    assert [request.cid for request in found] == [0, 1]
    assert found[0].header == found[1].header


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_requests_arrive_in_pieces_of_any_size(piece: int) -> None:
    scene = Scene()
    large = scene.frame(ApiKey.METADATA, 12, MetadataRequest(topics=None), client_id="x" * 200)
    found = requests(scene.send_bytes((large + scene.metadata()) * 3, piece))
    assert len(found) == 6
    assert bytes(found[0].message) == bytes(found[2].message)


def test_a_large_frame_has_its_own_memory() -> None:
    decoder = KafkaFrameDecoder(LIMIT)
    content = random.Random(1).randbytes(OWN_MEMORY_BYTES * 2)
    left = len(content).to_bytes(4, "big") + content
    buffer = decoder.get_buffer()
    buffer[:1000], left = left[:1000], left[1000:]
    assert decoder.buffer_updated(1000) == []
    assert decoder.receiving == (len(content), 996)
    while left:
        buffer = decoder.get_buffer()
        count = min(len(buffer), len(left))
        buffer[:count], left = left[:count], left[count:]
        frames = decoder.buffer_updated(count)
    assert [bytes(frame) for frame in frames] == [content]
    assert decoder.receiving == (0, 0)


def test_only_a_produce_has_a_body() -> None:
    scene = Scene()
    produce = scene.frame(ApiKey.PRODUCE, 9, ProduceRequest(acks=1, timeout_ms=1, topic_data=[]))
    events = scene.send_bytes(scene.metadata() + produce)
    bodies = [len(event.body) for event in events if isinstance(event, ReceivedRequest)]
    assert bodies[0] == 0 and bodies[1] > 0


def test_an_unknown_version_of_api_versions_gets_the_known_ones() -> None:
    scene = Scene()
    frame = bytearray(scene.frame(ApiKey.API_VERSIONS, 4, ApiVersionsRequest()))
    frame[6:8] = (99).to_bytes(2, "big")
    *_, event = scene.send_bytes(bytes(frame))
    assert isinstance(event, ImmediateAnswer) and not event.close
    scene._headers[-1] = scene._headers[-1]._replace(api_version=0)
    assert scene.decoded(event).api_keys[0].api_key == ApiKey.METADATA


@pytest.mark.parametrize("key, version", [(ApiKey.FETCH, 12), (99, 0), (ApiKey.METADATA, 99), (ApiKey.PRODUCE, 0)])
def test_an_api_that_is_not_served_closes_the_connection(key: int, version: int) -> None:
    scene = Scene()
    header = key.to_bytes(2, "big") + version.to_bytes(2, "big") + bytes(4) + (0).to_bytes(2, "big") + b"\x00"
    assert closes(scene.send_bytes(len(header).to_bytes(4, "big") + header)).code == ErrorCode.UNSUPPORTED_VERSION


@pytest.mark.parametrize("first", [b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_senseless_length_closes_the_connection(first: bytes) -> None:
    scene = Scene()
    assert closes(scene.send_bytes(first)).code in {ErrorCode.FRAME_TOO_LARGE, ErrorCode.MALFORMED_FRAME}


def test_requests_before_a_senseless_length_are_served() -> None:
    scene = Scene()
    events = scene.send_bytes(scene.metadata() + b"\xff\xff\xff\xff")
    assert len(requests(events)) == 1
    closes(events)


@given(st.binary(max_size=400), st.integers(0, 75), st.integers(0, 20))
def test_random_bytes_never_raise(content: bytes, key: int, version: int) -> None:
    for scene in (Scene(), Scene(logs_in=True)):
        header = key.to_bytes(2, "big") + version.to_bytes(2, "big") + bytes(4)
        for frame in (content, header + content):
            for event in scene.send_bytes(len(frame).to_bytes(4, "big") + frame):
                if isinstance(event, ImmediateAnswer):
                    scene.end.encode_answer(event.reply)
                else:
                    assert scene.end.login is None, "a request is served before the login"


def test_a_long_name_of_the_library_is_cut() -> None:
    scene = Scene()
    request = ApiVersionsRequest(client_software_name="n" * 1000, client_software_version="v" * 1000)
    assert scene.answer(ApiKey.API_VERSIONS, 3, request).error_code == 0
    assert scene.end.software == f"{'n' * 255} {'v' * 255}"


# --- logins -----------------------------------------------------------------------------------------------------------


def test_a_login_admits_the_client() -> None:
    scene = Scene(logs_in=True, lifetime_ms=5000)
    assert scene.answer(ApiKey.API_VERSIONS, 3, ApiVersionsRequest(client_software_name="x")).error_code == 0
    assert not scene.end.admitted
    last = scene.log_in()
    assert (last.error_code, last.auth_bytes, last.session_lifetime_ms) == (0, b"welcome", 5000)
    assert scene.end.admitted
    assert len(requests(scene.send_bytes(scene.metadata()))) == 1


def test_a_request_before_the_login_closes_the_connection() -> None:
    scene = Scene(logs_in=True)
    assert closes(scene.send_bytes(scene.metadata())).code == ErrorCode.ILLEGAL_SASL_STATE


def test_a_large_frame_before_the_login_is_refused() -> None:
    scene = Scene(logs_in=True)
    assert closes(scene.send_bytes((100_000).to_bytes(4, "big"))).code == ErrorCode.FRAME_TOO_LARGE
    scene = Scene(logs_in=True)
    scene.log_in()
    assert scene.send_bytes((100_000).to_bytes(4, "big")) == []


def test_a_wrong_password_fails_the_login() -> None:
    scene = Scene(logs_in=True)
    refused = scene.log_in(b"b-secret")
    assert refused.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert refused.error_message == "wrong user or password"
    assert not scene.end.admitted


def test_an_unknown_mechanism_gets_the_known_ones() -> None:
    scene = Scene(logs_in=True)
    refused = scene.answer(ApiKey.SASL_HANDSHAKE, 1, SaslHandshakeRequest(mechanism="PLAIN"))
    assert (refused.error_code, refused.mechanisms) == (ErrorCode.UNSUPPORTED_SASL_MECHANISM, [MECHANISM])


def test_a_handshake_without_headed_messages_is_refused() -> None:
    scene = Scene(logs_in=True)
    *_, event = scene.send(ApiKey.SASL_HANDSHAKE, 0, SaslHandshakeRequest(mechanism=MECHANISM))
    assert isinstance(event, ImmediateAnswer) and event.close
    assert scene.decoded(event).error_code == ErrorCode.UNSUPPORTED_VERSION


def test_a_message_without_a_handshake_is_refused() -> None:
    scene = Scene(logs_in=True)
    refused = scene.answer(ApiKey.SASL_AUTHENTICATE, 0, SaslAuthenticateRequest(auth_bytes=b"anna"))
    assert refused.error_code == ErrorCode.ILLEGAL_SASL_STATE


def test_a_listener_without_logins_says_so() -> None:
    refused = Scene().answer(ApiKey.SASL_HANDSHAKE, 1, SaslHandshakeRequest(mechanism=MECHANISM))
    assert refused.error_code == ErrorCode.ILLEGAL_SASL_STATE


def test_a_client_logs_in_again_before_and_after_the_session_ends() -> None:
    scene = Scene(logs_in=True)
    scene.log_in()
    assert scene.log_in().error_code == 0
    scene.end.session_expired()
    assert scene.log_in().error_code == 0
    assert len(requests(scene.send_bytes(scene.metadata()))) == 1
    scene.end.session_expired()
    assert closes(scene.send_bytes(scene.metadata())).code == ErrorCode.NETWORK_EXCEPTION


def test_a_login_that_cannot_begin_is_an_error() -> None:
    def begin(mechanism: str) -> SaslServer:
        raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, "no users yet")

    scene = Scene()
    scene.end = KafkaServerEnd(_versions, LIMIT, ServerLogin((MECHANISM,), begin, lambda step: 0), served=SERVED)
    scene.answer(ApiKey.SASL_HANDSHAKE, 1, SaslHandshakeRequest(mechanism=MECHANISM))
    refused = scene.answer(ApiKey.SASL_AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=b"anna"))
    assert refused.error_code == ErrorCode.BROKER_NOT_AVAILABLE
