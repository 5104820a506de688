"""Tickets with which a client may get open segment files of a broker on its host.

A broker that has authenticated a client signs a ticket for it. The ticket names the client's principal, the ids of the
topics that the client may read, the broker's incarnation and an expiry. The socket for local reads does not
authenticate clients, so the broker gives files there only for a valid ticket.

A signed ticket is the HMAC-SHA-256 of the ticket, and then the ticket in MessagePack. The key is random and never
leaves the broker's process, so only this process can sign and check its tickets. This module is pure.
"""

from __future__ import annotations

import hmac

import msgspec

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.fields import MAX_TICKET_BYTES

#: The number of bytes of the key, and of the signature before a ticket.
KEY_BYTES = 32
_SIGNATURE_BYTES = 32
#: The longest time in milliseconds for which a ticket is valid.
LIFETIME_MS = 60_000


class LocalReadTicket(msgspec.Struct, frozen=True, array_like=True):
    """The permission of one client to get open segment files. The times are of the broker's monotonic clock."""

    principal: tuple[str, str]
    #: The address of the client, for ACLs that name hosts.
    host: str
    #: The delegation token with which the client has logged in, or an empty string.
    token_id: str
    topic_ids: tuple[str, ...]
    incarnation: int
    issued_ms: int
    expires_ms: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LocalReadTicket).decode


def sign(key: bytes, ticket: LocalReadTicket) -> bytes:
    """Return the signed ticket.

    Raises:
        BrokerError: INVALID_REQUEST, the ticket has more than ``MAX_TICKET_BYTES``.
    """
    content = _encode(ticket)
    if _SIGNATURE_BYTES + len(content) > MAX_TICKET_BYTES:
        detail = f"ticket of {len(content)} bytes, expected at most {MAX_TICKET_BYTES - _SIGNATURE_BYTES}"
        raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
    return _signature(key, content) + content


def verify(key: bytes, signed: bytes, *, incarnation: int, now_ms: int) -> LocalReadTicket:
    """Return the ticket, if this broker has signed it for its current incarnation and it has not expired.

    The function does not decode a ticket with a wrong signature.

    Raises:
        BrokerError: CLUSTER_AUTHORIZATION_FAILED, the ticket is missing, forged, expired or of another incarnation.
    """
    if not signed:
        raise _refused("no ticket found: this broker gives files only for a ticket")
    content = signed[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(_signature(key, content), signed[:_SIGNATURE_BYTES]):
        raise _refused("the ticket was not signed by this broker process")
    ticket = _decode(content)
    if ticket.incarnation != incarnation:
        raise _refused(f"ticket of incarnation {ticket.incarnation} found, {incarnation} expected")
    if not ticket.issued_ms <= now_ms < ticket.expires_ms:
        raise _refused(f"the ticket expired {now_ms - ticket.expires_ms} ms ago")
    return ticket


def _signature(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")


def _refused(detail: str) -> BrokerError:
    return BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, detail)
