"""Tests of the members of a classic group, as reviewed text traces: each line has an event and its effects."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from sparklog.coordinator.classic_events import (
    BeatRequested,
    Delayed,
    GroupEnded,
    Joined,
    JoinRequested,
    LeaveRequested,
    LeavingMember,
    Left,
    MemberIdGiven,
    OffsetsAccepted,
    StoreRefused,
    Synced,
    SyncRequested,
)
from sparklog.coordinator.classic_group import NEW_MEMBER_MS, ClassicGroup, ClassicSettings
from sparklog.coordinator.effects import CoordinatorReport, Done, Outcome, Refused, Respond, StoreClassic
from sparklog.coordinator.events import CoordinatorTicked

SETTINGS = ClassicSettings(initial_delay_ms=100, max_size=4, max_member_bytes=1000, max_group_bytes=2500)


class Trace:
    """A group that plays lines of text: ``join a`` or ``sync a 1 a=x b=y``.

    Each request's ticket is its line's name, such as ``join a``. The effects of a line follow its arrow.
    """

    def __init__(self, settings: ClassicSettings = SETTINGS) -> None:
        self.settings = settings
        self.now_ms = 1000
        self.group = ClassicGroup("g", settings)
        self.tickets: dict[int, str] = {}
        self.stored: StoreClassic | None = None

    def play(self, text: str) -> None:
        """Play the lines, and compare their effects with the text after the arrows. An indented line continues one."""
        played = []
        lines = re.sub(r"\n +", " ", textwrap.dedent(text).strip()).splitlines()
        for line in lines:
            command = line.partition("->")[0].strip()
            played.append(f"{command} -> {self.run(command)}".removesuffix(" -> "))
        assert played == lines

    def run(self, command: str) -> str:
        words = command.split()
        named = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        if plain[0] == "wait":
            self.now_ms += int(plain[1])
            effects = self.step(CoordinatorTicked())
        elif plain[0] == "failover":
            assert self.stored is not None
            self.group = ClassicGroup.restored(
                "g", self.settings, self.stored.state, generation=self.stored.generation, now_ms=self.now_ms
            )
            effects = []
        else:
            ticket = len(self.tickets) + 1
            self.tickets[ticket] = " ".join(plain[:2])
            effects = self.step(getattr(self, "_" + plain[0])(ticket, plain[1:], named))
        return " ".join(filter(None, (*effects, self.group.phase.value if effects or plain[0] == "wait" else "")))

    def step(self, event: Any) -> list[str]:
        found = self.group.step(event, self.now_ms)
        self.group.check_invariants()
        return [self._named(effect) for effect in found]

    def _join(self, ticket: int, names: list[str], named: dict[str, str]) -> JoinRequested:
        """Return the request of ``join a``: the new member a. ``id=a`` is a known one, ``static=s`` a static one."""
        protocols = tuple((name, names[0].encode()) for name in named.get("by", "range").split(","))
        return JoinRequested(
            ticket,
            "g",
            member_id=named.get("id", ""),
            new_member_id=names[0],
            protocol_type=named.get("type", "consumer"),
            protocols=protocols,
            instance_id=named.get("static", ""),
            session_timeout_ms=int(named.get("session", 1000)),
            rebalance_timeout_ms=int(named.get("rebalance", 5000)),
            needs_member_id="v4" in names,
            can_skip="v9" in names,
        )

    def _sync(self, ticket: int, names: list[str], named: dict[str, str]) -> SyncRequested:
        kind, protocol, static = named.pop("type", ""), named.pop("by", ""), named.pop("static", "")
        assigned = tuple((name, value.encode()) for name, value in named.items())
        return SyncRequested(
            ticket,
            "g",
            names[0],
            int(names[1]),
            instance_id=static,
            protocol_type=kind,
            protocol=protocol,
            assignments=assigned,
        )

    def _beat(self, ticket: int, names: list[str], named: dict[str, str]) -> BeatRequested:
        return BeatRequested(ticket, "g", names[0], int(names[1]), named.get("static", ""))

    def _accept(self, ticket: int, names: list[str], named: dict[str, str]) -> OffsetsAccepted:
        return OffsetsAccepted(names[0])

    def _leave(self, ticket: int, names: list[str], named: dict[str, str]) -> LeaveRequested:
        members = [LeavingMember(name) for name in names if name != "-"]
        members += [LeavingMember("", name) for name in named.get("static", "").split(",") if name]
        return LeaveRequested(ticket, "g", tuple(members))

    def _refuse(self, ticket: int, names: list[str], named: dict[str, str]) -> StoreRefused:
        return StoreRefused()

    def _delay(self, ticket: int, names: list[str], named: dict[str, str]) -> Delayed:
        self.now_ms += int(names[0])
        return Delayed(int(names[0]))

    def _end(self, ticket: int, names: list[str], named: dict[str, str]) -> GroupEnded:
        return GroupEnded()

    def _named(self, effect: Respond | StoreClassic | CoordinatorReport) -> str:
        match effect:
            case Respond():
                return f"[{self.tickets[effect.ticket]}: {self._outcome(effect.outcome)}]"
            case StoreClassic():
                self.stored = effect
                members = ",".join(f"{one.member_id}={one.assignment.decode()}" for one in effect.state.members)
                return f"[store {effect.generation} {effect.state.protocol} {members}]".replace("  ]", "]")
            case CoordinatorReport():
                return "[removed " + effect.detail.split("member ")[1].split()[0] + "]"

    def _outcome(self, outcome: Outcome) -> str:
        match outcome:
            case Joined():
                members = " ".join(one.member_id for one in outcome.members)
                skip = " skip" if outcome.skip_assignment else ""
                led = f" leads {members}" if members else f" after {outcome.leader}"
                return f"{outcome.member_id} in {outcome.generation} by {outcome.protocol}{led}{skip}"
            case MemberIdGiven():
                return f"given {outcome.member_id}"
            case Synced():
                return f"gets {outcome.assignment.decode() or 'nothing'}"
            case Left():
                return "left " + " ".join(code.name for code in outcome.codes)
            case Refused():
                return outcome.code.name
            case Done():
                return "ok"
        raise AssertionError(outcome)


def test_two_members_join_and_sync() -> None:
    Trace().play("""
        join a
        wait 50 -> PreparingRebalance
        join b
        wait 50 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync b 1
        beat a 1 -> [beat a: ok] CompletingRebalance
        sync a 1 a=x b=y -> [store 1 range a=x,b=y] [sync a: gets x] [sync b: gets y] Stable
        beat b 1 -> [beat b: ok] Stable
        sync b 1 -> [sync b: gets y] Stable
    """)


def test_a_member_that_joins_again_unchanged_needs_no_rebalance() -> None:
    """A follower that changes its protocols, and a leader that joins again, do need one."""
    Trace().play("""
        join a
        join b
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync a 1 a=x b=y -> [store 1 range a=x,b=y] [sync a: gets x] Stable
        sync b 1 -> [sync b: gets y] Stable
        join b id=b -> [join b: b in 1 by range after a] Stable
        join b id=b by=range,rr
        beat a 1 -> [beat a: REBALANCE_IN_PROGRESS] PreparingRebalance
        join a id=a -> [join a: a in 2 by range leads a b] [join b: b in 2 by range after a] CompletingRebalance
        sync b 2
        beat a 2 -> [beat a: ok] CompletingRebalance
        join b id=b by=range,rr -> [sync b: REBALANCE_IN_PROGRESS] [join b: b in 2 by range after a] CompletingRebalance
        sync a 2 a=1 b=2 -> [store 2 range a=1,b=2] [sync a: gets 1] Stable
    """)


def test_a_new_member_first_gets_its_id() -> None:
    Trace().play("""
        join a v4 -> [join a: given a] Empty
        wait 900 -> Empty
        join a id=a
        wait 100 -> [join a: a in 1 by range leads a] CompletingRebalance
        sync a 1 -> [store 1 range a=] [sync a: gets nothing] Stable
        join b v4 -> [join b: given b] Stable
        wait 500 -> Stable
        beat a 1 -> [beat a: ok] Stable
        wait 500 -> Stable
        join b id=b -> [join b: UNKNOWN_MEMBER_ID] Stable
        join c v4 -> [join c: given c] Stable
        join c id=c static=s -> [join c: UNKNOWN_MEMBER_ID] Stable
    """)


def test_a_rebalance_waits_for_members_with_a_new_id() -> None:
    Trace().play("""
        join a
        wait 100 -> [join a: a in 1 by range leads a] CompletingRebalance
        sync a 1 a=x -> [store 1 range a=x] [sync a: gets x] Stable
        join b v4 -> [join b: given b] Stable
        join a id=a
        join b id=b -> [join a: a in 2 by range leads a b] [join b: b in 2 by range after a] CompletingRebalance
        sync a 2 a=x b=y -> [store 2 range a=x,b=y] [sync a: gets x] Stable
        sync b 2 -> [sync b: gets y] Stable
    """)


def test_a_silent_member_is_removed() -> None:
    Trace().play("""
        join a
        join b
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync a 1 a=x b=y -> [store 1 range a=x,b=y] [sync a: gets x] Stable
        sync b 1 -> [sync b: gets y] Stable
        wait 600 -> Stable
        beat a 1 -> [beat a: ok] Stable
        wait 400 -> [removed b] PreparingRebalance
        beat a 1 -> [beat a: REBALANCE_IN_PROGRESS] PreparingRebalance
        join a id=a -> [join a: a in 2 by range leads a] CompletingRebalance
        wait 500 -> CompletingRebalance
        sync a 2 a=x -> [store 2 range a=x] [sync a: gets x] Stable
        wait 1000 -> [removed a] [store 3] Empty
    """)


def test_commits_keep_the_session_of_a_member() -> None:
    Trace().play("""
        join a
        join b
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync a 1 a=x b=y -> [store 1 range a=x,b=y] [sync a: gets x] Stable
        sync b 1 -> [sync b: gets y] Stable
        wait 900 -> Stable
        accept a
        accept z
        wait 900 -> [removed b] PreparingRebalance
        accept a
        wait 900 -> PreparingRebalance
        join a id=a -> [join a: a in 2 by range leads a] CompletingRebalance
    """)


def test_a_member_that_does_not_join_in_time_is_removed() -> None:
    Trace().play("""
        join a rebalance=2000 session=9000
        join b rebalance=2000 session=9000
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync a 1 -> [store 1 range a=,b=] [sync a: gets nothing] Stable
        sync b 1 -> [sync b: gets nothing] Stable
        join c rebalance=2000
        beat a 1 -> [beat a: REBALANCE_IN_PROGRESS] PreparingRebalance
        join a id=a rebalance=2000 session=9000
        wait 2000 -> [removed b] [join a: a in 2 by range leads a c]
            [join c: c in 2 by range after a] CompletingRebalance
        beat b 1 -> [beat b: UNKNOWN_MEMBER_ID] CompletingRebalance
        sync a 2 -> [store 2 range a=,c=] [sync a: gets nothing] Stable
        sync c 2 -> [sync c: gets nothing] Stable
        join b id=b -> [join b: UNKNOWN_MEMBER_ID] Stable
    """)


def test_a_member_that_sends_no_sync_is_removed() -> None:
    """Heartbeats alone do not keep it."""
    Trace().play("""
        join a session=9000
        join b session=9000
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync a 1 a=x b=y -> [store 1 range a=x,b=y] [sync a: gets x] Stable
        wait 4999 -> Stable
        beat b 1 -> [beat b: ok] Stable
        wait 1 -> [removed b] PreparingRebalance
        beat a 1 -> [beat a: REBALANCE_IN_PROGRESS] PreparingRebalance
        join a id=a -> [join a: a in 2 by range leads a] CompletingRebalance
        wait 10 -> CompletingRebalance
    """)


def test_a_static_member_restarts_without_a_rebalance() -> None:
    """The leader's restart must not look like a leader's join, unless the client can skip the assignment."""
    Trace().play("""
        join a static=s
        join b
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync a 1 a=x b=y -> [store 1 range a=x,b=y] [sync a: gets x] Stable
        sync b 1 -> [sync b: gets y] Stable
        join a2 static=s -> [store 1 range b=y,a2=x] [join a2: a2 in 1 by range after a] Stable
        beat a 1 static=s -> [beat a: FENCED_INSTANCE_ID] Stable
        beat a2 1 static=s -> [beat a2: ok] Stable
        sync a2 1 static=s -> [sync a2: gets x] Stable
        join a3 static=s v9 -> [store 1 range b=y,a3=x] [join a3: a3 in 1 by range leads b a3 skip] Stable
        beat b 1 -> [beat b: ok] Stable
        sync a3 1 static=s -> [sync a3: gets x] Stable
        join a id=a static=s -> [join a: FENCED_INSTANCE_ID] Stable
        sync a3 1 static=t -> [sync a3: UNKNOWN_MEMBER_ID] Stable
    """)


def test_a_static_member_keeps_its_place_through_a_rebalance() -> None:
    Trace().play("""
        join a static=s rebalance=500 session=2000
        join b rebalance=500
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync a 1 -> [store 1 range a=,b=] [sync a: gets nothing] Stable
        sync b 1 -> [sync b: gets nothing] Stable
        join c rebalance=500
        join b id=b rebalance=500
        wait 500 -> [join b: b in 2 by range leads a b c] [join c: c in 2 by range after b] CompletingRebalance
        sync b 2 -> [store 2 range a=,b=,c=] [sync b: gets nothing] Stable
        sync c 2 -> [sync c: gets nothing] Stable
        wait 500 -> [removed a] PreparingRebalance
        beat b 2 -> [beat b: REBALANCE_IN_PROGRESS] PreparingRebalance
        beat c 2 -> [beat c: REBALANCE_IN_PROGRESS] PreparingRebalance
    """)


def test_a_static_member_that_restarts_before_the_assignment_begins_a_rebalance() -> None:
    Trace().play("""
        join a static=s
        join b
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync b 1
        join a2 static=s -> [sync b: REBALANCE_IN_PROGRESS] PreparingRebalance
        join b id=b -> [join b: b in 2 by range after a2] [join a2: a2 in 2 by range leads b a2] CompletingRebalance
        beat b 2 -> [beat b: ok] CompletingRebalance
    """)


def test_members_leave_together_by_their_instance_ids() -> None:
    Trace().play("""
        join a static=s
        join b static=t
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync a 1 -> [store 1 range a=,b=] [sync a: gets nothing] Stable
        sync b 1 -> [sync b: gets nothing] Stable
        leave - static=s,x -> [leave -: left NONE UNKNOWN_MEMBER_ID] PreparingRebalance
        leave b -> [leave b: left NONE] [store 2] Empty
        join c
    """)


def test_a_member_without_a_common_protocol_is_refused() -> None:
    Trace().play("""
        join a by=range,rr
        join b by= -> [join b: INCONSISTENT_GROUP_PROTOCOL] PreparingRebalance
        join b by=zz -> [join b: INCONSISTENT_GROUP_PROTOCOL] PreparingRebalance
        join b type=connect -> [join b: INCONSISTENT_GROUP_PROTOCOL] PreparingRebalance
        join b by=rr
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by rr leads a b] [join b: b in 1 by rr after a] CompletingRebalance
        sync a 1 by=range -> [sync a: INCONSISTENT_GROUP_PROTOCOL] CompletingRebalance
        sync a 1 type=connect -> [sync a: INCONSISTENT_GROUP_PROTOCOL] CompletingRebalance
        sync b 1 by=rr type=consumer
    """)


def test_members_vote_for_the_protocol() -> None:
    Trace().play("""
        join a by=x,y
        join b by=y,x
        join c by=y,x,z
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by y leads a b c] [join b: b in 1 by y after a]
            [join c: c in 1 by y after a] CompletingRebalance
    """)


def test_a_full_group_refuses_further_members() -> None:
    Trace().play("""
        join a
        join b
        join c
        join d
        join e -> [join e: GROUP_MAX_SIZE_REACHED] PreparingRebalance
        join f v4 -> [join f: GROUP_MAX_SIZE_REACHED] PreparingRebalance
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b c d] [join b: b in 1 by range after a]
            [join c: c in 1 by range after a] [join d: d in 1 by range after a] CompletingRebalance
        join a id=zz -> [join a: UNKNOWN_MEMBER_ID] CompletingRebalance
    """)


def test_a_group_whose_members_have_left_is_written_as_empty() -> None:
    Trace().play("""
        join a
        wait 100 -> [join a: a in 1 by range leads a] CompletingRebalance
        sync a 1 a=x -> [store 1 range a=x] [sync a: gets x] Stable
        leave a q -> [leave a: left NONE UNKNOWN_MEMBER_ID] [store 2] Empty
        join a id=a -> [join a: UNKNOWN_MEMBER_ID] Empty
        join b
        wait 100 -> [join b: b in 3 by range leads b] CompletingRebalance
    """)


def test_a_refused_append_begins_another_rebalance() -> None:
    Trace().play("""
        join a
        join b
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync b 1
        sync a 1 a=x b=y -> [store 1 range a=x,b=y] [sync a: gets x] [sync b: gets y] Stable
        refuse
        beat a 1 -> [beat a: REBALANCE_IN_PROGRESS] PreparingRebalance
        join a id=a
        join b id=b -> [join a: a in 2 by range leads a b] [join b: b in 2 by range after a] CompletingRebalance
        sync a 2 a=p b=q -> [store 2 range a=p,b=q] [sync a: gets p] Stable
    """)


def test_members_continue_at_a_new_coordinator_without_a_rebalance() -> None:
    Trace().play("""
        join a static=s
        join b
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync a 1 a=x b=y -> [store 1 range a=x,b=y] [sync a: gets x] Stable
        sync b 1 -> [sync b: gets y] Stable
        failover
        beat a 1 -> [beat a: ok] Stable
        beat b 1 -> [beat b: ok] Stable
        sync b 1 -> [sync b: gets y] Stable
        join a2 static=s -> [store 1 range b=y,a2=x] [join a2: a2 in 1 by range after a] Stable
        wait 1000 -> [removed b] [removed a2] [store 2] Empty
    """)


def test_requests_of_other_generations_and_members_are_refused() -> None:
    Trace().play("""
        join a
        wait 100 -> [join a: a in 1 by range leads a] CompletingRebalance
        sync a 7 -> [sync a: ILLEGAL_GENERATION] CompletingRebalance
        beat a 7 -> [beat a: ILLEGAL_GENERATION] CompletingRebalance
        beat z 1 -> [beat z: UNKNOWN_MEMBER_ID] CompletingRebalance
        sync z 1 -> [sync z: UNKNOWN_MEMBER_ID] CompletingRebalance
        join a id=a -> [join a: a in 1 by range leads a] CompletingRebalance
        join b id=b -> [join b: UNKNOWN_MEMBER_ID] CompletingRebalance
    """)


def test_a_pause_of_the_coordinator_ends_no_members_session() -> None:
    Trace().play("""
        join a
        wait 100 -> [join a: a in 1 by range leads a] CompletingRebalance
        sync a 1 a=x -> [store 1 range a=x] [sync a: gets x] Stable
        delay 5000
        wait 900 -> Stable
        wait 100 -> [removed a] [store 2] Empty
    """)


def test_members_that_join_extend_the_initial_delay() -> None:
    """At most for the rebalance timeout."""
    Trace().play("""
        join a rebalance=250
        wait 90 -> PreparingRebalance
        join b rebalance=250
        wait 10 -> PreparingRebalance
        join c rebalance=250
        wait 100 -> PreparingRebalance
        join d rebalance=250
        wait 50 -> [join a: a in 1 by range leads a b c d] [join b: b in 1 by range after a]
            [join c: c in 1 by range after a] [join d: d in 1 by range after a] CompletingRebalance
    """)


def test_requests_to_a_deleted_group_get_an_error() -> None:
    Trace().play("""
        join a v4 -> [join a: given a] Empty
        end
        join a id=a -> [join a: COORDINATOR_NOT_AVAILABLE] Dead
        beat a 1 -> [beat a: COORDINATOR_NOT_AVAILABLE] Dead
        leave a -> [leave a: left COORDINATOR_NOT_AVAILABLE] Dead
        sync a 1 -> [sync a: COORDINATOR_NOT_AVAILABLE] Dead
    """)


def test_a_repeated_request_ends_the_wait_of_the_first() -> None:
    Trace().play("""
        join a v4 -> [join a: given a] Empty
        join a id=a
        join a id=a -> [join a: REBALANCE_IN_PROGRESS] PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a] CompletingRebalance
        sync a 1 -> [store 1 range a=] [sync a: gets nothing] Stable
        join b
        join b id=b -> [join b: REBALANCE_IN_PROGRESS] PreparingRebalance
        join a id=a -> [join a: a in 2 by range leads a b] [join b: b in 2 by range after a] CompletingRebalance
        join b id=b -> [join b: b in 2 by range after a] CompletingRebalance
        sync b 2
        sync b 2 -> [sync b: REBALANCE_IN_PROGRESS] CompletingRebalance
        join b id=b -> [sync b: REBALANCE_IN_PROGRESS] [join b: b in 2 by range after a] CompletingRebalance
        sync b 2
        sync a 2 -> [store 2 range a=,b=] [sync a: gets nothing] [sync b: gets nothing] Stable
    """)


def test_a_rebalance_waits_while_all_members_are_silent_static_ones() -> None:
    Trace().play("""
        join a static=s rebalance=300 session=900
        join b static=t rebalance=300 session=900
        wait 100 -> PreparingRebalance
        wait 100 -> [join a: a in 1 by range leads a b] [join b: b in 1 by range after a] CompletingRebalance
        sync a 1 -> [store 1 range a=,b=] [sync a: gets nothing] Stable
        sync b 1 -> [sync b: gets nothing] Stable
        leave - static=t -> [leave -: left NONE] PreparingRebalance
        wait 300 -> PreparingRebalance
        wait 300 -> PreparingRebalance
        wait 300 -> [removed a] [store 2] Empty
    """)


def test_a_new_member_that_waits_too_long_is_removed() -> None:
    trace = Trace()
    for line in ("join a session=900000", "wait 100", "sync a 1", "join b rebalance=900000"):
        trace.run(line)
    trace.play(f"""
        wait {NEW_MEMBER_MS - 1} -> PreparingRebalance
        wait 1 -> [join b: UNKNOWN_MEMBER_ID] [removed b] PreparingRebalance
    """)


def test_only_members_of_the_generation_commit() -> None:
    trace = Trace()

    def code(*args: Any, **named: Any) -> str:
        refused = trace.group.refuses_commit(*args, **named)
        return refused.code.name if refused is not None else "ok"

    assert code("", -1) == "ok", "an empty group accepts other clients"
    assert code("a", 1) == "UNKNOWN_MEMBER_ID"
    for line in ("join a static=s", "wait 100"):
        trace.run(line)
    assert code("a", 1) == "REBALANCE_IN_PROGRESS"
    assert code("a", 1, transactional=True) == "ok"
    trace.run("sync a 1")
    assert code("a", 1) == code("a", 1, "s") == "ok"
    assert code("a", 0) == code("a", 2) == "ILLEGAL_GENERATION"
    assert code("b", 1) == "UNKNOWN_MEMBER_ID"
    assert code("b", 1, "s") == "FENCED_INSTANCE_ID"
    assert code("", -1) == "NON_EMPTY_GROUP", "other clients must not commit beside members"
    assert code("", -1, transactional=True) == "ok"
    trace.run("join b")
    assert code("a", 1) == "ok", "members commit before they join again"


def test_members_and_assignments_are_bounded() -> None:
    trace = Trace()
    trace.play("""
        join a
        wait 100 -> [join a: a in 1 by range leads a] CompletingRebalance
    """)
    large = trace.run(f"join b by={'x' * 1000}")
    assert large == "[join b: INVALID_REQUEST] CompletingRebalance"
    assert trace.run("join b by=" + ",".join(map(str, range(101)))).startswith("[join b: INVALID_REQUEST]")
    for name in ("b", "c"):
        trace.run(f"join {name} by=range,{'x' * 980}")
    assert trace.run(f"join d by=range,{'x' * 980}") == "[join d: GROUP_MAX_SIZE_REACHED] PreparingRebalance"
    trace.run("join a id=a")
    assert trace.run(f"sync a 2 a={'x' * 2501}") == "[sync a: INVALID_REQUEST] CompletingRebalance"
    assert trace.run("sync a 2 a=x").endswith("[sync a: gets x] Stable")
    many = Trace()
    for name in "abcd":
        many.run(f"join {name} v4")
    assert many.run("join e v4") == "[join e: GROUP_MAX_SIZE_REACHED] Empty"
