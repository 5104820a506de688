"""The tickets for local reads of one broker: which clients get one, and which tickets the broker accepts.

If the broker has ACLs, or if all its listeners authenticate clients, it gives segment files only to clients with a
ticket. A client requests the ticket over its authenticated connection, and presents it on the socket for local reads,
which authenticates no client.

A ticket alone is not enough. The broker checks the ACLs again for each segment, so a change of ACLs applies to the
next segment. A ticket ends when the broker ends the connections of its principal.
"""

from __future__ import annotations

import secrets
import time
from typing import NamedTuple, cast

from sparklog.broker.context import BrokerContext
from sparklog.broker.security.authorizer import Authorizer
from sparklog.broker.security.forwarding_connections import client_of
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import Principal
from sparklog.net.descriptors import boot_id
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.local_reads import OpenSegment
from sparklog.protocol.messages import LocalReadsReply, RequestLocalReads
from sparklog.security.acls import Operation, ResourceType
from sparklog.security.local_read_tickets import KEY_BYTES, LIFETIME_MS, LocalReadTicket, sign, verify
from sparklog.security.request_rules import REFUSALS, Need

#: The listener that the audit log names for a refused local read.
_LISTENER = "local reads"


class _TicketHolder(NamedTuple):
    """The client that a ticket names, as the authorizer and the audit log see it."""

    principal: Principal
    peer_host: str
    token_id: str
    listener: str = _LISTENER
    identity: None = None


class LocalReadTickets:
    """The tickets of one broker, which it signs with a random key of this process.

    ``authorizer`` decides what principals may read. Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, context: BrokerContext, authorizer: Authorizer) -> None:
        self._context = context
        self._authorizer = authorizer
        self._key = secrets.token_bytes(KEY_BYTES)
        #: The monotonic time of the last call of ``end``, by principal and delegation token (None for all tickets of
        #: the principal). Tickets that were issued up to this time are invalid.
        self._ended_ms: dict[tuple[Principal, str | None], int] = {}
        #: Whether the broker gives segment files only to clients with a ticket.
        self.required = False
        #: The path of the socket for local reads; empty if there is none.
        self.socket = ""

    def handle(self, connection: ServerConnection, request: RequestLocalReads, body: memoryview) -> None:
        """Reply with a ticket for the topics of the request, which the authorizer has already allowed."""
        if not self.socket:
            connection.reply(LocalReadsReply(request.cid))
            return
        if not request.topics:
            raise BrokerError(ErrorCode.INVALID_REQUEST, "no topics found, expected those that the client reads")
        now_ms = self._context.now_ms()
        lifetime_ms = _lifetime_ms(connection)
        ticket = LocalReadTicket(
            principal=(connection.principal.kind, connection.principal.name),
            host=connection.peer_host,
            token_id=connection.token_id,
            topic_ids=tuple(self._topic_id(name) for name in dict.fromkeys(request.topics)),
            incarnation=self._context.incarnation,
            issued_ms=now_ms,
            expires_ms=now_ms + lifetime_ms,
        )
        reply = LocalReadsReply(request.cid, boot_id(), self.socket, sign(self._key, ticket), lifetime_ms)
        self._context.counters["local.tickets"] += 1
        connection.reply(reply)

    def _topic_id(self, name: str) -> str:
        topic = self._context.cache.topic(name)
        if topic is None:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name[:255]!r} is unknown to this broker")
        return topic.change.topic_id

    def check(self, request: OpenSegment) -> frozenset[str]:
        """Check the ticket of a request for a segment. Return the topic ids that the ticket names.

        Raises:
            BrokerError: CLUSTER_AUTHORIZATION_FAILED, the ticket is not valid; TOPIC_AUTHORIZATION_FAILED, its
                principal may not read the topic any more.
        """
        ticket = verify(self._key, request.ticket, incarnation=self._context.incarnation, now_ms=self._context.now_ms())
        holder = _TicketHolder(Principal(*ticket.principal), ticket.host, ticket.token_id)
        for ended in ((holder.principal, None), (holder.principal, holder.token_id)):
            if ticket.issued_ms <= self._ended_ms.get(ended, -1):
                detail = f"the connections of {holder.principal} were ended after it got the ticket"
                raise BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, detail)
        authorizer, need = self._authorizer, Need(Operation.READ, ResourceType.TOPIC, request.topic)
        if not (authorizer.skips(holder) or authorizer.allows(holder, *need)):
            raise BrokerError(REFUSALS[ResourceType.TOPIC], authorizer.deny(holder, "OpenSegment", need))
        return frozenset(ticket.topic_ids)

    def end(self, principal: Principal, token_id: str | None = None) -> None:
        """Invalidate all tickets of ``principal``; with ``token_id`` only the tickets of logins with this token."""
        now_ms = self._context.now_ms()
        self._ended_ms = {key: at_ms for key, at_ms in self._ended_ms.items() if at_ms > now_ms - LIFETIME_MS}
        self._ended_ms[principal, token_id] = now_ms


def _lifetime_ms(connection: ServerConnection) -> int:
    """Return the lifetime of a ticket, which ends with the session of the client's login."""
    expires_s = cast(ServerConnection, client_of(connection)).session.expires_s
    if expires_s is None:
        return LIFETIME_MS
    return max(0, min(LIFETIME_MS, int((expires_s - time.monotonic()) * 1000)))
