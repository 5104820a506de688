"""The broker's end of a Kafka connection without I/O: it decodes requests, and performs the logins.

The end answers ApiVersions, SaslHandshake and SaslAuthenticate itself, and passes all other requests to its owner. The
owner sends the responses in the order of the requests. On a listener that requires a login, the end accepts only these
three requests before the login. If a client sends anything else, the owner must close the connection without a
response, as Kafka does.

SaslHandshake 0, after which a client sends messages of the login without Kafka's headers, is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, NamedTuple

from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.frames import KafkaFrameDecoder
from sparklog.kafka.wire import (
    ApiKey,
    MalformedMessage,
    RequestHeader,
    decode_header,
    decode_request,
    is_supported,
    response_frame,
)
from sparklog.kafka.wire.metadata import ApiVersionsResponse
from sparklog.kafka.wire.security import SaslAuthenticateResponse, SaslHandshakeResponse
from sparklog.protocol.connection import MAX_LOGIN_BYTES, EncodedReply, ImmediateAnswer, ImmediateReply
from sparklog.protocol.frames import Buffer
from sparklog.protocol.login import ServerLogin
from sparklog.protocol.messages import ErrorReply, SaslAuthenticate, SaslAuthenticateReply
from sparklog.protocol.proof import Identity
from sparklog.protocol.received import ReceivedRequest
from sparklog.protocol.sasl import MAX_SASL_BYTES

#: The maximum length of a client id, and of the name and version of a client's library. Longer texts are cut.
_MAX_CLIENT_ID = 255
_MAX_SOFTWARE = 255
_NOTHING = memoryview(b"")
_SASL = frozenset({ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE})
#: The versions of SaslHandshake after which the messages of the login have Kafka's headers.
_HEADED_HANDSHAKE = 1


class KafkaRequest(NamedTuple):
    """A request that a Kafka client has sent: its header, and the bytes of its message.

    ``cid`` is the number of the request on its connection. It replaces the client's correlation id, because a client
    may use one correlation id for several requests.
    """

    cid: int
    header: RequestHeader
    message: memoryview


class KafkaServerEnd:
    """The broker's end of one Kafka connection, without I/O.

    ``api_versions`` returns the response to ApiVersions. ``served`` has the keys of the APIs that the owner handles.
    ``login`` is the state of the logins on a listener that requires them, otherwise None.
    """

    def __init__(
        self,
        api_versions: Callable[[RequestHeader], ApiVersionsResponse],
        max_frame_bytes: int,
        login: ServerLogin | None = None,
        *,
        served: Container[int],
    ) -> None:
        self._decoder = KafkaFrameDecoder(max_frame_bytes, MAX_LOGIN_BYTES if login is not None else 0)
        self._api_versions = api_versions
        self._served = served
        self.login = login
        #: None, because Kafka clients do not prove a broker's identity, and do not continue the session of another
        #: connection.
        self.identity: Identity | None = None
        self.session: object = None
        self.may_prove = False
        self.claimed_session: object = None
        #: Whether requests are served: a first valid request has arrived and, if the listener requires one, the login
        #: is complete.
        self.admitted = False
        #: The client id in the last request; empty if the request has none.
        self.client_id = ""
        #: The name and version of the client's library; empty if it has not named them.
        self.software = ""
        self._next_cid = 0
        self._expired = False
        #: The mechanism that the last SaslHandshake has chosen; empty before it and after a complete login.
        self._mechanism = ""
        #: The headers of the SaslAuthenticate requests whose responses are not encoded yet.
        self._logins: dict[int, RequestHeader] = {}
        #: The headers of requests whose login has failed, and the responses to them, by number of the request.
        self._failures: dict[int, tuple[RequestHeader | None, Any]] = {}
        self.get_buffer = self._decoder.get_buffer

    @property
    def is_body_in_progress(self) -> bool:
        """Return whether a large request is being received."""
        return self._decoder.receiving[0] > 0

    @property
    def receiving(self) -> tuple[int, int]:
        """Return the size and the received bytes of the large request in progress; (0, 0) if there is none."""
        return self._decoder.receiving

    def decode_single(self, count: int) -> ReceivedRequest | ImmediateAnswer | None:
        """Decode the ``count`` received bytes if they are exactly one frame. This is a fast path for that case.

        Return the request, or an ``ImmediateAnswer`` if this ``KafkaServerEnd`` itself responds to the request. Return
        None for other bytes, and while no requests are accepted (``admitted``). Then the caller must call
        ``buffer_updated``.
        """
        if not self.admitted:  # The first request may give two events, so ``buffer_updated`` decodes it.
            return None
        frame = self._decoder.decode_single(count)
        return None if frame is None else self._understand(frame)

    def buffer_updated(self, count: int) -> list[ReceivedRequest | ImmediateAnswer]:
        """Return the requests that are complete after ``count`` more received bytes, in order.

        Return an ``ImmediateAnswer`` for each request to which this ``KafkaServerEnd`` responds itself. An answer with
        ``close`` is the last item.
        """
        events: list[ReceivedRequest | ImmediateAnswer] = []
        for frame in self._decoder.buffer_updated(count):
            event = self._understand(frame)
            closes = isinstance(event, ImmediateAnswer) and event.close
            if not self.admitted and self.login is None and not closes:
                # The client has shown that it speaks Kafka's protocol, so the connection counts as a client's.
                self.admitted = True
                events.append(ImmediateAnswer(EncodedReply(-1, []), close=False))
            events.append(event)
            if closes:
                return events
        if self._decoder.error is not None:
            events.append(_closing(self._decoder.error.code, self._decoder.error.detail))
        return events

    def session_expired(self) -> None:
        """Record that the session has expired.

        The next request closes the connection, unless the client logs in again before it.
        """
        self.admitted, self._expired = False, True

    def encode_answer(self, reply: ImmediateReply) -> list[Buffer]:
        """Return the bytes of a response that this ``KafkaServerEnd`` made itself.

        An error outside any request has no bytes.
        """
        match reply:
            case EncodedReply():
                return reply.buffers
            case SaslAuthenticateReply():
                response = SaslAuthenticateResponse(
                    auth_bytes=reply.data, session_lifetime_ms=reply.session_lifetime_ms
                )
                return response_frame(self._logins.pop(reply.cid), response)
            case ErrorReply():
                return self._encode_failure(reply)
            case _:
                return []

    def _encode_failure(self, reply: ErrorReply) -> list[Buffer]:
        """Return the response to a failed login with the error of ``reply``; no bytes if no login has failed.

        The owner may have changed the error, and may refuse a complete login. After many failures of an address, the
        response must not say whether the password was right.
        """
        header, response = self._failures.pop(reply.cid, (self._logins.pop(reply.cid, None), None))
        if header is None:
            return []
        if isinstance(response, SaslHandshakeResponse):
            response = SaslHandshakeResponse(error_code=reply.code, mechanisms=response.mechanisms)
        else:
            response = SaslAuthenticateResponse(error_code=reply.code, error_message=reply.detail)
        return response_frame(header, response)

    def _understand(self, frame: memoryview) -> ReceivedRequest | ImmediateAnswer:
        try:
            header, message = decode_header(frame)
            api_key, version = header.api_key, header.api_version
            if api_key == ApiKey.API_VERSIONS:
                self._note_client(header)
                return self._answer_versions(header, message)
            if not is_supported(api_key, version) or not (api_key in self._served or api_key in _SASL):
                return _closing(ErrorCode.UNSUPPORTED_VERSION, f"version {version} of API {api_key} is not served")
            if api_key in _SASL:
                self._note_client(header)
                return self._log_in(header, decode_request(api_key, version, message))
        except MalformedMessage as error:
            return _closing(ErrorCode.INVALID_REQUEST, str(error))
        if not self.admitted and self.login is not None:
            code = ErrorCode.NETWORK_EXCEPTION if self._expired else ErrorCode.ILLEGAL_SASL_STATE
            reason = "the session has expired" if self._expired else "this listener requires a login first"
            return _closing(code, f"API {api_key} found, {reason}")
        if header.client_id != self.client_id:
            self._note_client(header)
        body = message if api_key == ApiKey.PRODUCE else _NOTHING
        return ReceivedRequest(KafkaRequest(self._cid(), header, message), body, len(frame))

    def _note_client(self, header: RequestHeader) -> None:
        self.client_id = (header.client_id or "")[:_MAX_CLIENT_ID]

    def _cid(self) -> int:
        cid = self._next_cid
        self._next_cid = cid + 1
        return cid

    def _answer_versions(self, header: RequestHeader, message: memoryview) -> ImmediateAnswer:
        if is_supported(header.api_key, header.api_version):
            request = decode_request(header.api_key, header.api_version, message)
            name, version = request.client_software_name, request.client_software_version
            self.software = f"{name[:_MAX_SOFTWARE]} {version[:_MAX_SOFTWARE]}".strip()
        return self._answer(header, self._api_versions(header))

    def _answer(self, header: RequestHeader, response: Any, *, close: bool = False) -> ImmediateAnswer:
        return ImmediateAnswer(EncodedReply(self._cid(), response_frame(header, response)), close)

    # --- logins ---

    def _log_in(self, header: RequestHeader, request: Any) -> ImmediateAnswer:
        if header.api_key == ApiKey.SASL_HANDSHAKE:
            return self._choose_mechanism(header, request.mechanism)
        login = self.login
        if login is None or not self._mechanism:
            expected = "SaslHandshake expected first" if login is not None else "this listener has no logins"
            detail = f"SaslAuthenticate found, {expected}"
            response = SaslAuthenticateResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, error_message=detail)
            return self._answer(header, response, close=True)
        cid = self._cid()
        try:
            if len(request.auth_bytes) > MAX_SASL_BYTES:
                detail = f"message of {len(request.auth_bytes)} bytes, at most {MAX_SASL_BYTES} accepted"
                raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, detail)
            reply = login.step(SaslAuthenticate(cid, self._mechanism, bytes(request.auth_bytes)))
        except BrokerError as error:
            return self._fail(
                cid, header, error, SaslAuthenticateResponse(error_code=error.code, error_message=error.detail)
            )
        if reply.complete:
            self._mechanism = ""
            self.admitted, self._expired = True, False
            self._decoder.end_login()
        self._logins[cid] = header
        return ImmediateAnswer(reply, close=False)

    def _choose_mechanism(self, header: RequestHeader, mechanism: str) -> ImmediateAnswer:
        login = self.login
        mechanisms = list(login.mechanisms) if login is not None else []
        if login is None:
            return self._answer(header, SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE))
        if header.api_version < _HEADED_HANDSHAKE or login.in_progress:
            code = ErrorCode.ILLEGAL_SASL_STATE if login.in_progress else ErrorCode.UNSUPPORTED_VERSION
            return self._answer(header, SaslHandshakeResponse(error_code=code, mechanisms=mechanisms), close=True)
        if mechanism not in mechanisms:
            login.mechanism = mechanism[:64]
            detail = f"mechanism {mechanism[:64]!r}: this listener has {', '.join(mechanisms)}"
            error = BrokerError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, detail)
            response = SaslHandshakeResponse(error_code=error.code, mechanisms=mechanisms)
            return self._fail(self._cid(), header, error, response)
        self._mechanism = mechanism
        return self._answer(header, SaslHandshakeResponse(mechanisms=mechanisms))

    def _fail(self, cid: int, header: RequestHeader, error: BrokerError, response: Any) -> ImmediateAnswer:
        """Return the answer to a failed login. The owner sends ``response``, perhaps after a delay."""
        self._failures[cid] = header, response
        return ImmediateAnswer(ErrorReply(cid, error.code, error.detail), close=True)


def _closing(code: ErrorCode, detail: str) -> ImmediateAnswer:
    """Return an answer that makes the owner close the connection without a response."""
    return ImmediateAnswer(ErrorReply(-1, code, detail), close=True)
