"""The two ends of a connection without I/O: correlation, version agreement, and error replies to invalid input.

The client end gives each request a correlation id. The server end replies to Hello, Prove and SaslAuthenticate itself,
and passes all other requests to its owner. It replies with an ``ErrorReply`` to bytes that it cannot decode. Neither
end owns a socket.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from sparklog.errors import BrokerError, ErrorCode, ProtocolError
from sparklog.protocol.frames import Buffer, FrameDecoder, before_body, encode_frame
from sparklog.protocol.header_limits import MAX_HEADER_BYTES, beginning_of, header_limit
from sparklog.protocol.kafka_clients import is_kafka_request
from sparklog.protocol.login import ServerLogin
from sparklog.protocol.messages import (
    PROTOCOL_MAX_VERSION,
    PROTOCOL_MIN_VERSION,
    UNDECODABLE,
    Ack,
    ErrorReply,
    Hello,
    HelloReply,
    Prove,
    Reply,
    Request,
    RequestUnixSocket,
    SaslAuthenticate,
    SaslAuthenticateReply,
    UnixSocketReply,
    decode_reply,
    encode_message,
    request_decoder,
)
from sparklog.protocol.proof import Authenticator, Identity, IdentityClaim, certified
from sparklog.protocol.received import Frame, OversizeFrame, ReceivedReply, ReceivedRequest, cid_of
from sparklog.protocol.sasl import MAX_SASL_BYTES
from sparklog.protocol.senders import SenderKind

DEFAULT_MAX_FRAME_BYTES = 128 * 1024 * 1024
#: The largest frame of a hello.
MAX_HELLO_BYTES = 4096
#: The largest frame between a hello and the end of the login, if the listener requires one.
MAX_LOGIN_BYTES = MAX_SASL_BYTES + 1024
#: The largest reply to a client before its hello and its login are complete, that is, before the broker has proved
#: everything that the client requires.
MAX_GREETING_REPLY_BYTES = 64 * 1024
#: The maximum length of an error's detail. A detail may quote the peer's bytes, which may be a megabyte.
_MAX_DETAIL = 1000
#: A placeholder for the correlation id in a prepared frame. A search for its bytes finds only the placeholder, because
#: the frame's bytes before it (lengths and the message's tag) never contain them.
_ANY_CID = 2**64 - 1

#: The types of requests that a server end replies to itself. ``isinstance`` would take ten times as long per request.
_HANDSHAKE: frozenset[type] = frozenset({Hello, Prove, SaslAuthenticate, RequestUnixSocket})


class EncodedReply(NamedTuple):
    """A reply of another protocol, such as Kafka's, that is already encoded.

    The connection only sends it, because the reply neither completes nor fails a login. ``buffers`` may be empty.
    """

    cid: int
    buffers: list[Buffer]


ImmediateReply: TypeAlias = "HelloReply | Ack | SaslAuthenticateReply | UnixSocketReply | ErrorReply | EncodedReply"


class ImmediateAnswer(NamedTuple):
    """A reply that the server's end creates itself, without the broker.

    ``close`` means that the connection must be closed after this reply.
    """

    reply: ImmediateReply
    close: bool


class PreparedRequest:
    """An encoded frame of a request that is sent repeatedly, each time with another correlation id and body.

    All bodies have the same length. ``ClientEnd`` adds only the correlation id and the body for each request. The
    correlation id always takes eight bytes in this frame, while ``encode_message`` uses as few bytes as possible.
    """

    def __init__(self, message: Request, body_bytes: int) -> None:
        """Encode the frame for bodies of ``body_bytes`` bytes, which must not be 0."""
        frame = before_body(encode_message(msgspec.structs.replace(message, cid=_ANY_CID)), body_bytes)
        self.before_cid, _, self.after_cid = frame.partition(_ANY_CID.to_bytes(8, "big"))


class ClientEnd:
    """The client side of one connection, without I/O: it encodes requests and decodes replies.

    Until ``end_greeting``, it accepts only replies of at most ``greeting_max_bytes``; 0 means no such limit. Not
    thread-safe: only the thread of the connection uses it.
    """

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES, greeting_max_bytes: int = 0) -> None:
        self._decoder = FrameDecoder(max_frame_bytes, greeting_max_bytes, greeting_max_bytes)
        self._next_cid = 1
        self.get_buffer = self._decoder.get_buffer
        #: Accepts larger replies from now on, because the hello and the login are complete.
        self.end_greeting = self._decoder.end_login

    def encode(self, message: Request, body: Sequence[Buffer] = ()) -> tuple[int, list[Buffer]]:
        """Encode a request with the next correlation id. Return this id and the buffers to send.

        The caller builds the message with ``cid`` 0. This method sets ``cid``, because each connection counts its own
        correlation ids.
        """
        cid = self._next_cid
        self._next_cid = cid + 1
        return cid, encode_frame(encode_message(msgspec.structs.replace(message, cid=cid)), body)

    def encode_prepared(self, request: PreparedRequest, first: bytes, second: bytes) -> tuple[int, bytes]:
        """Encode a prepared request into one buffer. Return its correlation id and the buffer.

        The body is ``first`` followed by ``second``. Together they must have the length for which the request was
        prepared.
        """
        cid = self._next_cid
        self._next_cid = cid + 1
        return cid, b"".join((request.before_cid, cid.to_bytes(8, "big"), request.after_cid, first, second))

    def decode_single(self, count: int) -> ReceivedReply | None:
        """Return the reply if the ``count`` received bytes are exactly one reply. This is a fast path for that case.

        Return None otherwise. Then the caller must call ``buffer_updated``.
        """
        frame = self._decoder.decode_single(count)
        return None if frame is None else ReceivedReply(_decoded(frame.header), frame.body)

    def buffer_updated(self, count: int) -> list[ReceivedReply]:
        """Return the replies that are complete after ``count`` more received bytes.

        Raises a fatal ProtocolError if the received bytes are invalid.
        """
        received = []
        for frame in self._decoder.buffer_updated(count):
            if isinstance(frame, OversizeFrame):
                raise ProtocolError(
                    ErrorCode.FRAME_TOO_LARGE,
                    f"reply of {frame.frame_bytes} bytes, at most {frame.limit} expected",
                    fatal=True,
                )
            received.append(ReceivedReply(_decoded(frame.header), frame.body))
        return received


def _decoded(header: memoryview) -> Reply:
    try:
        return decode_reply(header)
    except UNDECODABLE as error:
        raise ProtocolError(ErrorCode.MALFORMED_FRAME, f"reply cannot be decoded: {error}", fatal=True) from None


def hello(client_id: str, cluster_id: str = "") -> Hello:
    return Hello(0, PROTOCOL_MIN_VERSION, PROTOCOL_MAX_VERSION, client_id, cluster_id)


def raise_for_error(reply: Reply) -> None:
    """Raise BrokerError if ``reply`` is an ErrorReply."""
    if isinstance(reply, ErrorReply):
        raise error_of_reply(reply)


def error_of_reply(reply: ErrorReply) -> BrokerError:
    """Return the error in the reply as an exception. An unknown error code becomes UNKNOWN_SERVER_ERROR."""
    try:
        code = ErrorCode(reply.code)
    except ValueError:
        return BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, f"error code {reply.code}: {reply.detail}")
    return BrokerError(code, reply.detail)


class ServerEnd:
    """The server side of one connection, without I/O: it decodes requests and performs the handshake and the login.

    ``describe`` returns the HelloReply for a correlation id and an agreed version. ``authenticator`` creates the
    broker's proof that it knows the cluster's secret. If it is None, the broker sends no proof. ``login`` is the state
    of the logins on a listener that requires them, otherwise None. A connection that has proved its identity need not
    log in. With ``only_proved``, requests are accepted only after the peer has sent a valid proof.
    """

    def __init__(
        self,
        describe: Callable[[int, int], HelloReply],
        max_frame_bytes: int,
        authenticator: Authenticator | None = None,
        login: ServerLogin | None = None,
        *,
        only_proved: bool = False,
    ) -> None:
        waits = login is not None or only_proved
        self._decoder = FrameDecoder(max_frame_bytes, MAX_HELLO_BYTES, MAX_LOGIN_BYTES if waits else 0)
        self._decode = request_decoder()
        self._only_proved = only_proved
        self._max_frame_bytes = max_frame_bytes
        self.describe = describe
        self._authenticator = authenticator
        self._claim: IdentityClaim | None = None
        #: The roles that the peer's TLS certificate gives; None if certificates give no roles in this cluster.
        self.roles: frozenset[SenderKind] | None = None
        self.login = login
        #: The session of the peer's TCP connection, which this connection must continue, because a token has proved it.
        self.session: object = None
        #: Whether requests are served: the hello and, if the listener requires one, the login are complete.
        self.admitted = False
        #: Whether the session has expired and the peer has not logged in again.
        self._expired = False
        #: The identity that the peer has proved. None for a client, and before the proof.
        self.identity: Identity | None = None
        self.client_id = ""
        self.version = 0
        #: The addresses for Kafka clients, which the refusal of such a client names; empty if there are none.
        self.kafka_addresses = ""
        #: Whether the peer is a Kafka client. It cannot decode a reply of sparklog's own protocol.
        self._is_kafka_client = False
        self.get_buffer = self._decoder.get_buffer

    @property
    def is_body_in_progress(self) -> bool:
        """Return whether a large request with a body is being received."""
        return self._decoder.is_body_in_progress

    @property
    def receiving(self) -> tuple[int, int]:
        """Return the size and the received bytes of the large request in progress; (0, 0) if there is none."""
        return self._decoder.receiving

    @property
    def may_prove(self) -> bool:
        """Return whether the peer has offered to prove its identity and has not sent the proof yet."""
        return self._claim is not None

    @property
    def claimed_session(self) -> object:
        """Return the login session that this connection on the Unix socket continues, or None.

        The session began on the peer's TCP connection, for which the peer got a token. The peer has named that token,
        but may not have proved yet that it knows the token.
        """
        return self._claim.session if self._claim is not None else self.session

    def decode_single(self, count: int) -> ReceivedRequest | ImmediateAnswer | None:
        """Decode the ``count`` received bytes if they are exactly one frame. This is a fast path for that case.

        Return the request, or an ``ImmediateAnswer`` if this ``ServerEnd`` itself replies to the request. Return None
        for other bytes. Then the caller must call ``buffer_updated``.
        """
        frame = self._decoder.decode_single(count)
        return None if frame is None else self._understand(frame)

    def buffer_updated(self, count: int) -> list[ReceivedRequest | ImmediateAnswer]:
        """Return the requests that are complete after ``count`` more received bytes, in order.

        Return an ``ImmediateAnswer`` for each request to which this ``ServerEnd`` replies itself. An answer with
        ``close`` is the last item.
        """
        try:
            frames = self._decoder.buffer_updated(count)
        except ProtocolError as error:
            return [self._no_frame(error)]
        events: list[ReceivedRequest | ImmediateAnswer] = []
        for frame in frames:
            event = self._understand(frame) if isinstance(frame, Frame) else self._oversize(frame)
            events.append(event)
            if isinstance(event, ImmediateAnswer) and event.close:
                break
        return events

    def encode_answer(self, reply: ImmediateReply) -> list[Buffer]:
        """Return the frame of a reply that this ``ServerEnd`` made itself.

        Return an empty list if the peer is a Kafka client, which could not read the frame.
        """
        assert not isinstance(reply, EncodedReply), "only other protocols have encoded replies"
        return [] if self._is_kafka_client else encode_reply(reply)

    def _no_frame(self, error: ProtocolError) -> ImmediateAnswer:
        """Return the error for bytes that are not a frame."""
        code, detail = error.code, error.detail
        if not self.version and is_kafka_request(self._decoder.beginning):
            self._is_kafka_client = True
            there = f"connect to {self.kafka_addresses}" if self.kafka_addresses else "need the setting kafka.listeners"
            detail = f"a Kafka client has connected to a port of sparklog's own protocol; Kafka clients {there}"
            code = ErrorCode.INVALID_REQUEST
        return ImmediateAnswer(ErrorReply(-1, code, detail), close=True)

    def _oversize(self, frame: OversizeFrame) -> ImmediateAnswer:
        detail = f"frame of {frame.frame_bytes} bytes, at most {frame.limit} accepted"
        reply = ErrorReply(cid_of(frame.header), ErrorCode.FRAME_TOO_LARGE, detail)
        return ImmediateAnswer(reply, close=not self.admitted)

    def _oversize_header(self, header: memoryview) -> ImmediateAnswer | None:
        """Return an error reply if the header is too large to be decoded, or None if it is not."""
        beginning = beginning_of(header)
        proved = self.identity is not None or not self._asks_for_proof
        limit = header_limit(beginning, self._max_frame_bytes, proved=proved)
        if len(header) <= limit:
            return None
        detail = f"{beginning.tag[:50] or 'request'} with a header of {len(header)} bytes, at most {limit} accepted"
        return ImmediateAnswer(ErrorReply(beginning.cid, ErrorCode.FRAME_TOO_LARGE, detail), close=False)

    @property
    def _asks_for_proof(self) -> bool:
        return self.roles is not None or (self._authenticator is not None and bool(self._authenticator.keys))

    def _understand(self, frame: Frame) -> ReceivedRequest | ImmediateAnswer:
        header = frame.header
        if len(header) > MAX_HEADER_BYTES and (refusal := self._oversize_header(header)) is not None:
            return refusal
        try:
            request = self._decode(header)
        except msgspec.ValidationError as error:
            code = ErrorCode.UNKNOWN_API if "Invalid value" in str(error) else ErrorCode.INVALID_REQUEST
            return ImmediateAnswer(ErrorReply(cid_of(header), code, str(error)), close=not self.admitted)
        except UNDECODABLE as error:
            detail = f"header is not a message: {error}"
            reply = ErrorReply(cid_of(header), ErrorCode.MALFORMED_FRAME, detail)
            return ImmediateAnswer(reply, close=not self.admitted)
        if type(request) in _HANDSHAKE:
            return self._handshake(request)
        if not self.admitted:
            return self._not_admitted(request)
        body = frame.body
        return ReceivedRequest(request, body, len(header) + len(body))

    def _handshake(self, request: Request) -> ImmediateAnswer:
        if isinstance(request, Hello):
            return self._greet(request)
        if isinstance(request, Prove):
            return self._prove(request)
        if isinstance(request, SaslAuthenticate):
            return self._log_in(request)
        if not self.admitted:
            return self._not_admitted(request)
        # The owner adds the token after it has taken over the logins that were received before this request.
        return ImmediateAnswer(UnixSocketReply(request.cid), close=False)

    def _not_admitted(self, request: Request) -> ImmediateAnswer:
        name = type(request).__name__
        if not self.version:
            code, detail = ErrorCode.INVALID_REQUEST, f"{name} found, Hello expected first"
        elif self._expired:
            # The error is retriable: the client may send the same request on another connection.
            code, detail = ErrorCode.NETWORK_EXCEPTION, "the session has expired, and the client did not log in again"
        else:
            code, detail = ErrorCode.ILLEGAL_SASL_STATE, f"{name} found, this listener requires a login first"
        return ImmediateAnswer(ErrorReply(request.cid, code, detail), close=True)

    def session_expired(self) -> None:
        """Record that the session has expired.

        The next request gets an error reply that closes the connection, unless the peer logs in again before it.
        """
        self.admitted, self._expired = False, True

    def _admit(self) -> None:
        self.admitted, self._expired = True, False
        self._decoder.end_login()

    def _log_in(self, request: SaslAuthenticate) -> ImmediateAnswer:
        login = self.login
        if login is None or not self.version:
            found = "this listener has no logins" if self.version else "Hello expected first"
            detail = f"SaslAuthenticate found, {found}"
            return ImmediateAnswer(ErrorReply(request.cid, ErrorCode.ILLEGAL_SASL_STATE, detail), close=True)
        try:
            reply = login.step(request)
        except BrokerError as error:
            return ImmediateAnswer(ErrorReply(request.cid, error.code, error.detail), close=True)
        if reply.complete:
            self._admit()
        return ImmediateAnswer(reply, close=False)

    def _greet(self, request: Hello) -> ImmediateAnswer:
        if self.version:
            detail = f"Hello found, this connection has agreed on version {self.version} before"
            return ImmediateAnswer(ErrorReply(request.cid, ErrorCode.INVALID_REQUEST, detail), close=False)
        version = min(request.max_version, PROTOCOL_MAX_VERSION)
        if version < max(request.min_version, PROTOCOL_MIN_VERSION):
            detail = (
                f"client speaks versions {request.min_version} to {request.max_version}, "
                f"this broker {PROTOCOL_MIN_VERSION} to {PROTOCOL_MAX_VERSION}"
            )
            return ImmediateAnswer(ErrorReply(request.cid, ErrorCode.UNSUPPORTED_VERSION, detail), close=True)
        reply = self.describe(request.cid, version)
        if request.cluster_id and request.cluster_id != reply.cluster_id:
            detail = f"cluster {request.cluster_id!r} expected, this broker is of {reply.cluster_id!r}"
            return ImmediateAnswer(ErrorReply(request.cid, ErrorCode.INVALID_REQUEST, detail), close=True)
        if self.login is not None:
            reply = _before_login(reply, self.login.mechanisms)
        if self._authenticator is not None:
            try:
                if self.roles is not None:
                    self.identity = certified(request, self.roles)
                reply, self._claim = self._authenticator.answer(request, reply)
            except BrokerError as error:
                return ImmediateAnswer(ErrorReply(request.cid, error.code, error.detail), close=True)
        self.version = version
        self.client_id = request.client_id
        # A peer with a token is served only as the principal of its session.
        has_token = self._claim is not None and self._claim.session is not None
        self.admitted = self.login is None and not self._only_proved and not has_token
        return ImmediateAnswer(reply, close=False)

    def _prove(self, request: Prove) -> ImmediateAnswer:
        claim, self._claim = self._claim, None
        if claim is None:
            detail = "Prove found, and hello has agreed on no proof, or it was given before"
            return ImmediateAnswer(ErrorReply(request.cid, ErrorCode.INVALID_REQUEST, detail), close=True)
        if not hmac.compare_digest(claim.proof, request.proof):
            who = f"{claim.identity.role.value} {claim.identity.number}" if claim.identity is not None else "client"
            detail = f"{who}: its proof of the cluster's secret is wrong"
            return ImmediateAnswer(ErrorReply(request.cid, ErrorCode.CLUSTER_AUTHORIZATION_FAILED, detail), close=True)
        self.identity, self.session = claim.identity, claim.session
        if not self.admitted:
            self._admit()
        return ImmediateAnswer(Ack(request.cid), close=False)


def _before_login(reply: HelloReply, mechanisms: tuple[str, ...]) -> HelloReply:
    """Add the SASL mechanisms to the reply, and remove the names of the Unix sockets, for a peer that must log in."""
    return msgspec.structs.replace(
        reply, boot_id="", local_socket="", unix_socket="", reached_at=("", 0), sasl_mechanisms=mechanisms
    )


def with_throttle_time(reply: Reply, throttle_time_ms: int) -> Reply:
    """Return the reply with a throttle time of at least ``throttle_time_ms``.

    Return the reply unchanged if replies of its kind have no throttle time.
    """
    if throttle_time_ms > getattr(reply, "throttle_time_ms", throttle_time_ms):
        return msgspec.structs.replace(reply, throttle_time_ms=throttle_time_ms)
    return reply


def encode_reply(reply: Reply, body: Sequence[Buffer] = (), body_bytes: int = -1) -> list[Buffer]:
    """Return the buffers of a frame with a reply and its body. A long error text is shortened.

    ``body_bytes`` has the same meaning as in ``encode_frame``.
    """
    if type(reply) is ErrorReply and len(reply.detail) > _MAX_DETAIL:
        reply = msgspec.structs.replace(reply, detail=f"{reply.detail[:_MAX_DETAIL]}...")
    return encode_frame(encode_message(reply), body, body_bytes)
