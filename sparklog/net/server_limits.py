"""The limits of one server, which all its connections share.

While ``queued_max_bytes`` of requests are in progress (``Budget``), no connection handles further requests with a body.
"""

from __future__ import annotations

from typing import Protocol

from sparklog.net.authentication import LoginDelays
from sparklog.net.connection_slots import ConnectionSlots
from sparklog.net.receiving import Receiving
from sparklog.net.refusal_log import RefusalLog
from sparklog.net.tls import ServerTls
from sparklog.net.turn import Turn
from sparklog.net.unix_tokens import UnixTokens
from sparklog.protocol.proof import Authenticator
from sparklog.security.connection_limits import ConnectionLimits


class BudgetWaiter(Protocol):
    """The part of a connection that ``Budget`` uses while the connection waits for room."""

    def resume(self) -> None: ...


class Budget:
    """A limiter of the bytes of requests in progress in one server, with the connections that wait for room."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        #: The highest value of ``used`` so far.
        self.peak = 0
        self.exhausted = limit <= 0
        self.waiting: set[BudgetWaiter] = set()

    def take(self, size: int) -> None:
        used = self.used = self.used + size
        if used > self.peak:  # noqa: PLR1730 - hot
            self.peak = used
        self.exhausted = used >= self.limit

    def release(self, size: int) -> None:
        used = self.used = self.used - size
        self.exhausted = used >= self.limit
        if self.waiting and not self.exhausted:
            waiting, self.waiting = self.waiting, set()
            for connection in waiting:
                connection.resume()


class Limits:
    """The limits of one server, and the other state that its connections share, such as tokens and login delays."""

    def __init__(
        self,
        *,
        max_frame_bytes: int,
        max_in_flight: int,
        queued_max_bytes: int,
        places: ConnectionSlots,
        connection_limits: ConnectionLimits | None = None,
        authenticator: Authenticator | None = None,
    ) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.max_in_flight = max_in_flight
        self.places = places
        #: The bytes of requests in progress.
        self.budget = Budget(queued_max_bytes)
        #: The bytes of large frames that are being received.
        self.receiving = Receiving(queued_max_bytes)
        #: The time that requests have used in the current iteration of the event loop.
        self.turn = Turn()
        #: Whether the server is closing. If so, it closes each newly accepted connection at once.
        self.closing = False
        #: The name of the Unix socket, which is in the reply to each hello; empty if there is no Unix socket.
        self.unix_socket = ""
        #: The listener whose connections continue on the Unix socket; empty if there is no Unix socket.
        self.unix_listener = ""
        #: The limits of clients by address and user, or None.
        self.connection_limits = connection_limits
        #: The TLS settings of the listeners with TLS.
        self.tls: list[ServerTls] = []
        #: The tokens with which connections of listeners with TLS or logins continue on the Unix socket.
        self.unix_tokens = UnixTokens()
        #: The delays of the replies to failed logins.
        self.login_delays = LoginDelays()
        #: The log of refused connections that get no reply, because the protocol has none.
        self.refusals = RefusalLog()
        #: The addresses for Kafka clients; empty if there are none.
        self.kafka_addresses = ""
        #: Adds the broker's proof to the reply to a hello; None if the broker has no credentials.
        self.authenticator = authenticator

    @property
    def asks_for_proof(self) -> bool:
        """Return whether brokers and the controller must prove their identity on connections to this server."""
        return self.authenticator is not None and self.authenticator.required
