"""One member of a classic group: its protocols, its assignment, its waiting requests and its deadline."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparklog.coordinator.classic_events import Protocols
from sparklog.coordinator.group_member import NEVER
from sparklog.coordinator.group_records import ClassicMemberState


@dataclass(slots=True)
class ClassicMember:
    """A member of a classic group. Only ``ClassicGroup`` uses it."""

    member_id: str
    #: The id that the member keeps when it restarts; empty unless the member is static.
    instance_id: str
    client_id: str
    host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    assignment: bytes = b""
    #: The tickets of the JoinGroup and the SyncGroup request that wait for a response.
    joining: int | None = None
    syncing: int | None = None
    #: Whether the member has not been in any generation yet.
    is_new: bool = True
    #: The time at which the member is removed if it sends no request.
    session_ms: int = NEVER
    #: The number of bytes of ``protocols`` and of the member's names.
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.size = member_size(self.protocols, self.member_id, self.instance_id, self.client_id, self.host)

    def metadata(self, protocol: str) -> bytes:
        """Return the member's metadata for ``protocol``, or empty bytes if the member does not support it."""
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")

    def state(self, protocol: str) -> ClassicMemberState:
        """Return the record of the member in a generation with ``protocol``."""
        return ClassicMemberState(
            self.member_id,
            self.instance_id,
            self.client_id,
            self.host,
            self.session_timeout_ms,
            self.rebalance_timeout_ms,
            self.metadata(protocol),
            self.assignment,
        )


def member_size(protocols: Protocols, *names: str) -> int:
    return sum(len(name) + len(metadata) for name, metadata in protocols) + sum(map(len, names))


def restored_member(state: ClassicMemberState, protocol: str) -> ClassicMember:
    """Return the member that a record describes. The record has only the protocol of its generation."""
    return ClassicMember(
        state.member_id,
        state.instance_id,
        state.client_id,
        state.host,
        state.session_timeout_ms,
        state.rebalance_timeout_ms,
        ((protocol, state.metadata),),
        assignment=state.assignment,
        is_new=False,
    )
