"""The classic groups of one coordinator. They begin and end here, and share a limit on the bytes that they hold.

The module is pure. ``classic_group`` decides about the members of each group. A group without members may change
between the two protocols. When the protocol of a group changes, the new epoch or generation continues from the old
number.
"""

from __future__ import annotations

from sparklog.coordinator.classic_events import ClassicRequest, GroupEnded, JoinRequested
from sparklog.coordinator.classic_group import ENTRY_BYTES, ClassicGroup, Event
from sparklog.coordinator.effects import CoordinatorReport, Refused, Respond, StoreClassic
from sparklog.coordinator.group_records import FORMAT_VERSION, ClassicState, EpochKey, GroupEpoch, GroupValue
from sparklog.coordinator.group_state import Group, GroupDraft, GroupSettings
from sparklog.errors import ErrorCode


class ClassicGroups:
    """The classic groups of one coordinator. A part of ``Groups``.

    Most calls receive a group and its draft, which is the change of the group to append to the log.
    """

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        #: The number of bytes that all classic groups hold, in memory or in their records.
        self.held_bytes = 0

    def restore(self, group: Group, now_ms: int) -> None:
        """Restore the members of a classic group from its record. Do nothing if ``group`` is not a classic group."""
        record = group.state.get(EpochKey(FORMAT_VERSION, group.key))
        if isinstance(record, GroupEpoch) and record.classic is not None and not group.membership.members:
            group.classic = ClassicGroup.restored(
                group.key, self._settings.classic, record.classic, generation=record.epoch, now_ms=now_ms
            )
            self.on_stored(group, record)

    def request(self, group: Group, request: ClassicRequest, draft: GroupDraft, now_ms: int) -> list[CoordinatorReport]:
        """Handle a request of a member. A group without members becomes a classic group."""
        if group.membership.members:
            detail = f"group {group.key!r} has {len(group.membership.members)} members of the protocol of KIP-848"
            joins = isinstance(request, JoinRequested)
            code = ErrorCode.INCONSISTENT_GROUP_PROTOCOL if joins else ErrorCode.UNKNOWN_MEMBER_ID
            draft.answers.append(Respond(request.ticket, Refused(code, detail)))
            return []
        classic = group.classic
        if classic is None:
            classic = ClassicGroup(group.key, self._settings.classic, generation=group.membership.epoch)
        group.classic = classic
        reports = self.step(group, classic, request, draft, now_ms)
        record = draft.changes.get(key := EpochKey(FORMAT_VERSION, group.key), group.state.get(key))
        if classic.is_idle and not (isinstance(record, GroupEpoch) and record.classic is not None):
            group.classic = None
        return reports

    def step(
        self, group: Group, classic: ClassicGroup, event: Event, draft: GroupDraft, now_ms: int
    ) -> list[CoordinatorReport]:
        """Give the group's state machine one event, and write its effects to the draft. Return its reports."""
        limit = self._settings.max_classic_bytes - (self.held_bytes - group.counted_bytes)
        effects = classic.step(event, now_ms, limit_bytes=limit)
        self._count(group)
        reports = []
        for effect in effects:
            match effect:
                case Respond():
                    draft.answers.append(effect)
                case StoreClassic():
                    draft.changes[EpochKey(FORMAT_VERSION, group.key)] = GroupEpoch(
                        FORMAT_VERSION, effect.generation, now_ms, effect.state
                    )
                case CoordinatorReport():
                    reports.append(effect)
        return reports

    def end(self, group: Group, draft: GroupDraft, now_ms: int) -> None:
        """End the classic protocol of a group without members."""
        classic = group.classic
        if classic is not None:
            self.step(group, classic, GroupEnded(), draft, now_ms)
            group.classic = None
            group.membership.epoch = max(group.membership.epoch, classic.generation)

    def on_stored(self, group: Group, record: GroupValue | None) -> None:
        """Update the counted bytes, because the log now has this record of the group (None: no record)."""
        classic = record.classic if isinstance(record, GroupEpoch) else None
        group.record_bytes = _record_bytes(classic) if classic is not None else 0
        self._count(group)

    def _count(self, group: Group) -> None:
        """Count the bytes of the classic group again. Its members may have more or fewer than its record."""
        held = max(group.classic.held_bytes if group.classic is not None else 0, group.record_bytes)
        self.held_bytes += held - group.counted_bytes
        group.counted_bytes = held


def _record_bytes(state: ClassicState) -> int:
    """Return the number of bytes of the members and assignments in a classic group's record."""
    return sum(
        ENTRY_BYTES
        + len(state.protocol)
        + sum(map(len, (one.member_id, one.instance_id, one.client_id, one.host, one.metadata, one.assignment)))
        for one in state.members
    )
