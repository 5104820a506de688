"""The committed offsets of one group: what its members may fetch, and how requests change them.

The functions are pure. The functions for requests read a group, and write changes and responses to its draft. The
functions for queries read the ``state`` that is committed in the log. ``Groups`` appends the draft, and sends the
responses after the commit.

Before a member sends offsets with a transaction, it requests a *hold* on their partitions. The hold is refused if a
commit of these offsets would be refused. Until the transaction ends, no other member can fetch the committed offsets of
these partitions; otherwise two members could process the same records (KIP-447). A hold ends when the transaction's
offsets are handed over, or when a member that waits for it finds that the transaction is over.

In a *handover* a transaction coordinator sends the offsets of a committed transaction, with the transaction's key and
decision number. It repeats the handover until it gets a response. The group coordinator therefore keeps the last
decision number of each key, so that a repetition changes nothing. The decision numbers of a key rise, but start again
after the key has expired. So the last number is kept for a shorter time than the key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set

from sparklog.coordinator.classic_description import classic_topics
from sparklog.coordinator.effects import Done, OffsetsDeleted, Refused, Respond
from sparklog.coordinator.group_events import (
    CommitRequested,
    HoldEnded,
    HoldRequested,
    OffsetsDeleteRequested,
    TopicsGone,
)
from sparklog.coordinator.group_records import (
    FORMAT_VERSION,
    CommittedOffset,
    EpochKey,
    GroupEpoch,
    GroupKey,
    GroupValue,
    Handover,
    HandoverKey,
    Hold,
    HoldKey,
    MemberKey,
    MemberState,
    OffsetKey,
)
from sparklog.coordinator.group_state import Group, GroupDraft
from sparklog.coordinator.group_topics import Topics
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import GroupOffset

#: The values of a group's current records in the log.
State = Mapping[GroupKey, GroupValue]


# --- requests ---------------------------------------------------------------------------------------------------------


def commit(group: Group, request: CommitRequested, draft: GroupDraft, now_ms: int, *, handover_ms: int) -> bool:
    """Commit offsets that a member has sent, or that a transaction coordinator has sent for a committed transaction.

    Return False if nothing changes. A transaction coordinator may repeat its request. For ``handover_ms`` after the
    offsets were committed, a repetition changes nothing.
    """
    if request.transaction is not None:
        key, decision = request.transaction
        handover = HandoverKey(FORMAT_VERSION, group.key, key)
        known = draft.changes.get(handover) or group.state.get(handover)
        if isinstance(known, Handover) and decision <= known.decision and now_ms < known.commit_ms + handover_ms:
            draft.answers.append(Respond(request.ticket, Done()))
            return False
        draft.changes[handover] = Handover(FORMAT_VERSION, decision, now_ms)
        held_by = HoldKey(FORMAT_VERSION, group.key, key)
        if held_by in group.state or held_by in draft.changes:
            draft.changes[held_by] = None
    else:
        refusal = group.refuses_commit(request)
        if refusal is not None:
            draft.answers.append(Respond(request.ticket, refusal))
            return False
    for offset in request.offsets:
        place = OffsetKey(FORMAT_VERSION, group.key, offset.topic, offset.partition)
        draft.changes[place] = CommittedOffset(FORMAT_VERSION, offset, now_ms)
    draft.answers.append(Respond(request.ticket, Done()))
    return True


def hold(group: Group, request: HoldRequested, draft: GroupDraft, now_ms: int) -> None:
    """Prevent other members from fetching the offsets of partitions until a transaction ends.

    A further request of the same producer adds partitions.
    """
    refusal = group.refuses_commit(request)
    if refusal is not None:
        draft.answers.append(Respond(request.ticket, refusal))
        return
    key = HoldKey(FORMAT_VERSION, group.key, request.key)
    known = draft.changes.get(key, group.state.get(key))
    partitions = {(offset.topic, offset.partition) for offset in request.offsets}
    epoch = request.member_epoch
    if isinstance(known, Hold) and known.producer_id == request.producer_id:
        partitions.update(known.partitions)
        epoch = min(epoch, known.member_epoch)
    draft.changes[key] = Hold(
        FORMAT_VERSION,
        request.member_id,
        epoch,
        request.producer_id,
        request.coordinator_epoch,
        tuple(sorted(partitions)),
        now_ms,
    )
    draft.answers.append(Respond(request.ticket, Done()))


def end_hold(group: Group, event: HoldEnded, draft: GroupDraft) -> None:
    """Let other members fetch the offsets that were held for a transaction, because the transaction is over.

    Do nothing if the hold of this transactional key now belongs to another producer.
    """
    key = HoldKey(FORMAT_VERSION, group.key, event.key)
    known = draft.changes.get(key, group.state.get(key))
    if isinstance(known, Hold) and known.producer_id == event.producer_id:
        draft.changes[key] = None


def delete_offsets(group: Group, request: OffsetsDeleteRequested, draft: GroupDraft, topics: Topics) -> None:
    """Delete the offsets of partitions, except those of topics to which members of the group subscribe."""
    if not (group.state or draft.changes or group.has_members):
        detail = f"there is no group {group.key!r}"
        draft.answers.append(Respond(request.ticket, Refused(ErrorCode.GROUP_ID_NOT_FOUND, detail)))
        return
    wanted = {topic for topic, _ in request.partitions}
    kept = frozenset(group.membership.subscribed(wanted, topics))
    if group.classic is not None and group.classic.members:
        subscribed = classic_topics(group.classic)
        if subscribed is None:
            detail = f"group {group.key!r} has {len(group.classic.members)} members, which are not consumers"
            draft.answers.append(Respond(request.ticket, Refused(ErrorCode.NON_EMPTY_GROUP, detail)))
            return
        kept = subscribed & wanted
    for topic, number in request.partitions:
        key = OffsetKey(FORMAT_VERSION, group.key, topic, number)
        if topic not in kept and (key in group.state or key in draft.changes):
            draft.changes[key] = None
    draft.answers.append(Respond(request.ticket, OffsetsDeleted(kept)))


def drop_topics(group: Group, event: TopicsGone, draft: GroupDraft) -> None:
    """Delete the offsets of deleted topics."""
    draft.gone.append(event)
    gone = set(event.topics)
    for key, value in {**group.state, **draft.changes}.items():
        if isinstance(value, CommittedOffset):
            topic = value.offset.topic
            if (topic, value.offset.topic_id) in gone or (topic, "") in gone:
                draft.changes[key] = None


# --- queries ----------------------------------------------------------------------------------------------------------


def committed_offsets(
    group: str, state: State, partitions: Iterable[tuple[str, int]] | None = None
) -> Mapping[tuple[str, int], GroupOffset]:
    """Return the group's committed offsets, by topic and partition. ``partitions`` limits them; None means all."""
    if partitions is None:
        found = [value.offset for value in state.values() if isinstance(value, CommittedOffset)]
    else:
        places = (state.get(OffsetKey(FORMAT_VERSION, group, *place)) for place in partitions)
        found = [value.offset for value in places if isinstance(value, CommittedOffset)]
    return {(offset.topic, offset.partition): offset for offset in found}


def holds(group: str, state: State, member_id: str, partitions: Iterable[tuple[str, int]]) -> list[tuple[str, Hold]]:
    """Return the holds that prevent ``member_id`` from fetching offsets, each with the key of its transaction.

    While a transaction has a hold on the offsets of a partition, the transaction may still commit newer offsets. A hold
    of the member's own transaction counts only if the member has since lost the partition and got it again. Without the
    hold, the member would start at the old offset and process the records twice.
    """
    return [(key, value) for key, value, _ in _holds(group, state, member_id, partitions)]


def held(group: str, state: State, member_id: str, partitions: Iterable[tuple[str, int]]) -> Set[tuple[str, int]]:
    """Return the ``partitions`` whose offsets ``member_id`` may not fetch now.

    An open transaction may still commit newer offsets of these partitions (see ``holds``).
    """
    return frozenset[tuple[str, int]]().union(*(found for *_, found in _holds(group, state, member_id, partitions)))


def _holds(
    group: str, state: State, member_id: str, partitions: Iterable[tuple[str, int]]
) -> Iterator[tuple[str, Hold, Set[tuple[str, int]]]]:
    known = [(key, value) for key, value in state.items() if isinstance(value, Hold)]
    if not known:
        return
    wanted = set(partitions)
    given = _given(state.get(MemberKey(FORMAT_VERSION, group, member_id)), {topic for topic, _ in wanted})
    for key, value in known:
        if isinstance(key, HoldKey):
            # An empty member id is that of any Kafka client.
            others = value.member_id != member_id or not member_id
            found = wanted.intersection(value.partitions)
            found = {at for at in found if others or given.get(at, value.member_epoch) > value.member_epoch}
            if found:
                yield key.key, value, found


def refuses_fetch(group: str, state: State, member_id: str, epoch: int, partitions: Collection[tuple[str, int]]) -> str:
    """Return why a member may not fetch the offsets of these partitions from this coordinator, or an empty string.

    The answer follows from the changes that are committed in the log. A pending change does not count, because it may
    never be committed: another coordinator may have replaced this one without its knowledge.
    """
    member = state.get(MemberKey(FORMAT_VERSION, group, member_id))
    now = state.get(EpochKey(FORMAT_VERSION, group))
    if not isinstance(member, MemberState) or not isinstance(now, GroupEpoch) or epoch > now.epoch:
        return f"group {group!r} has no member {member_id} in epoch {epoch}, as far as this coordinator knows"
    own = {place for place, given in _given(member, {topic for topic, _ in partitions}).items() if given <= epoch}
    missing = [place for place in partitions if tuple(place) not in own]
    return f"{missing[0][0]}-{missing[0][1]} is not member {member_id}'s in epoch {epoch}" if missing else ""


def _given(member: GroupValue | None, topics: Set[str]) -> dict[tuple[str, int], int]:
    """Return the partitions of these topics that a member owns, with the epochs of their assignment."""
    return {
        (found.topic, number): given
        for found in (member.owned if isinstance(member, MemberState) else ())
        if found.topic in topics
        for number, given in zip(found.partitions, found.epochs, strict=True)
    }
