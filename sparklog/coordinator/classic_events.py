"""Events and outcomes of classic groups: the groups of Kafka's protocol with JoinGroup, SyncGroup and Heartbeat.

A request has a ``ticket``. Exactly one ``Respond`` with this ticket follows, at once or later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sparklog.errors import ErrorCode

#: The member's supported assignment protocols, the preferred one first, each with the member's metadata for it.
Protocols = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class JoinRequested:
    """Kafka's JoinGroup request.

    ``member_id`` is empty if the member is new, and ``new_member_id`` is the id that such a member gets.
    ``instance_id`` is empty unless the member is static. ``needs_member_id`` means that a new member first gets its id
    and joins with it (version 4 and later). ``can_skip`` means that the member understands the flag that tells a leader
    to skip the assignment (version 9 and later).
    """

    ticket: int
    group: str
    member_id: str
    new_member_id: str
    protocol_type: str
    protocols: Protocols
    instance_id: str = ""
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 300_000
    client_id: str = ""
    host: str = ""
    needs_member_id: bool = False
    can_skip: bool = False


@dataclass(frozen=True, slots=True)
class SyncRequested:
    """Kafka's SyncGroup request. Only the leader's request has ``assignments``, by member id.

    ``protocol_type`` and ``protocol`` are empty in versions that do not have them.
    """

    ticket: int
    group: str
    member_id: str
    generation: int
    instance_id: str = ""
    protocol_type: str = ""
    protocol: str = ""
    assignments: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class BeatRequested:
    """Kafka's Heartbeat request."""

    ticket: int
    group: str
    member_id: str
    generation: int
    instance_id: str = ""


class LeavingMember(NamedTuple):
    """A member that leaves. An administrator may name a static member by its ``instance_id`` alone."""

    member_id: str
    instance_id: str = ""


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """Kafka's LeaveGroup request, for one or several members."""

    ticket: int
    group: str
    members: tuple[LeavingMember, ...]


@dataclass(frozen=True, slots=True)
class OffsetsAccepted:
    """The event that the coordinator accepted offsets that a member commits.

    A commit extends the member's session, as a heartbeat does. The member id is empty or unknown if the sender is not a
    member.
    """

    member_id: str


@dataclass(frozen=True, slots=True)
class StoreRefused:
    """The event that the state of an earlier ``StoreClassic`` is not in the log and never will be."""


@dataclass(frozen=True, slots=True)
class Delayed:
    """The event that the coordinator could not receive requests for ``by_ms``. All deadlines move by this time."""

    by_ms: int


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """The event that a group without members was deleted, or became a group of the protocol of KIP-848."""


ClassicRequest = JoinRequested | SyncRequested | BeatRequested | LeaveRequested


class JoinedMember(NamedTuple):
    member_id: str
    instance_id: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Joined:
    """The outcome of a JoinGroup request. ``members`` is empty unless the member is the leader."""

    generation: int
    protocol_type: str
    protocol: str
    leader: str
    member_id: str
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


@dataclass(frozen=True, slots=True)
class MemberIdGiven:
    """The outcome of a new member's JoinGroup request: the member must join again with this id."""

    member_id: str


@dataclass(frozen=True, slots=True)
class Synced:
    """The outcome of a SyncGroup request."""

    protocol_type: str
    protocol: str
    assignment: bytes


@dataclass(frozen=True, slots=True)
class Left:
    """The outcome of a LeaveGroup request: one error code for each member."""

    codes: tuple[ErrorCode, ...]
