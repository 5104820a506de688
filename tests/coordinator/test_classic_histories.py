"""Random histories of a classic group: no client is assigned what the leader gave to another one, each request gets one
response, and the group becomes stable once the clients behave."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparklog.coordinator.classic_events import (
    BeatRequested,
    Joined,
    JoinRequested,
    LeaveRequested,
    LeavingMember,
    MemberIdGiven,
    StoreRefused,
    Synced,
    SyncRequested,
)
from sparklog.coordinator.classic_group import ClassicGroup, ClassicSettings, GroupPhase
from sparklog.coordinator.effects import CoordinatorReport, Outcome, Refused, Respond, StoreClassic
from sparklog.coordinator.events import CoordinatorTicked
from sparklog.errors import ErrorCode

SETTINGS = ClassicSettings(initial_delay_ms=50, max_size=5)
PROTOCOLS = (("range", b"r"), ("sticky", b"s"))


class Client:
    """A client of the group, which acts on the responses as Kafka's clients do."""

    def __init__(self, instance_id: str, *, old: bool, rebalance_ms: int = 2000) -> None:
        self.rebalance_ms = rebalance_ms
        self.instance_id = instance_id
        self.old = old
        self.member_id = ""
        self.generation = -1
        self.joined: Joined | None = None
        self.assigned: bytes | None = None
        #: The ticket of the request that waits, or None.
        self.ticket: int | None = None
        self.fenced = False


class Histories(RuleBasedStateMachine):
    """Clients that join, sync, send heartbeats, leave, die and lose responses, and a log that may refuse.

    Some clients have a rebalance timeout of zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1000
        self.group = ClassicGroup("g", SETTINGS)
        self.clients: list[Client] = []
        self.made = 0
        self.tickets = 0
        self.open: set[int] = set()
        self.answers: dict[int, Outcome] = {}
        self.committed: StoreClassic | None = None
        #: What the leader of each generation assigned, by member id, and the leader that was named.
        self.given: dict[int, dict[str, bytes]] = {}
        self.led: dict[int, set[str]] = {}

    def step(self, event: Any, *, refuse: bool = False) -> None:
        effects = self.group.step(event, self.now_ms)
        self.group.check_invariants()
        stored = [effect for effect in effects if isinstance(effect, StoreClassic)]
        for effect in effects:
            assert isinstance(effect, Respond | StoreClassic | CoordinatorReport)
            if isinstance(effect, Respond):
                self.open.remove(effect.ticket)
                lost = Refused(ErrorCode.COORDINATOR_NOT_AVAILABLE, "refused")
                self.answers[effect.ticket] = lost if stored and refuse else effect.outcome
        if stored and refuse:
            self.step(StoreRefused(), refuse=True)  # It may store again: members without a time-out are removed.
        elif stored:
            self.committed = stored[-1]

    def ask(self, client: Client, event_of: Any, *, refuse: bool = False) -> None:
        self.tickets += 1
        client.ticket = self.tickets
        self.open.add(self.tickets)
        self.step(event_of(self.tickets), refuse=refuse)

    def join(self, client: Client, *, refuse: bool = False) -> None:
        client.joined, client.assigned = None, None
        new_id = f"{client.instance_id or 'm'}-{self.tickets + 1}"
        self.ask(
            client,
            lambda ticket: JoinRequested(
                ticket,
                "g",
                member_id=client.member_id,
                new_member_id=new_id,
                protocol_type="consumer",
                protocols=PROTOCOLS,
                instance_id=client.instance_id,
                session_timeout_ms=1000,
                rebalance_timeout_ms=client.rebalance_ms,
                needs_member_id=not client.old,
                can_skip=not client.old,
            ),
            refuse=refuse,
        )

    def receive(self, client: Client) -> bool:
        """Act on the response to the client's request. Return whether there was one."""
        outcome = self.answers.get(client.ticket) if client.ticket is not None else None
        if outcome is None:
            return False
        client.ticket = None
        match outcome:
            case MemberIdGiven():
                client.member_id = outcome.member_id
            case Joined():
                client.member_id, client.generation, client.joined = outcome.member_id, outcome.generation, outcome
                if outcome.members and not outcome.skip_assignment:
                    self.led.setdefault(outcome.generation, set()).add(outcome.member_id)
                    assert len(self.led[outcome.generation]) == 1, "two leaders of one generation"
            case Synced():
                client.assigned = outcome.assignment
                expected = self.given.get(client.generation, {})
                assert outcome.assignment == expected.get(client.instance_id or client.member_id, b"")
            case Refused():
                if outcome.code in {ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION}:
                    client.member_id, client.generation = "", -1
                client.fenced |= outcome.code is ErrorCode.FENCED_INSTANCE_ID
                client.joined = client.assigned = None
        return True

    def act(self, client: Client, *, refuse: bool = False) -> None:
        """Let the client do what follows from its state."""
        if client.ticket is not None:
            self.receive(client)
        elif client.joined is None:
            self.join(client, refuse=refuse)
        elif client.assigned is None:
            self.sync(client, client.joined, refuse=refuse)
        else:
            self.beat(client)

    def sync(self, client: Client, joined: Joined, *, refuse: bool = False) -> None:
        assignments: tuple[tuple[str, bytes], ...] = ()
        if joined.members and not joined.skip_assignment:
            number = b"%d-%d-" % (joined.generation, self.tickets)
            assignments = tuple((one.member_id, number + one.member_id.encode()) for one in joined.members)
            if self.group.generation == joined.generation and self.group.phase is GroupPhase.COMPLETING:
                names = {one.member_id: one.instance_id or one.member_id for one in joined.members}
                self.given[joined.generation] = {names[name]: assignment for name, assignment in assignments}
        self.ask(
            client,
            lambda ticket: SyncRequested(
                ticket,
                "g",
                client.member_id,
                joined.generation,
                instance_id=client.instance_id,
                protocol_type="consumer",
                protocol=joined.protocol,
                assignments=assignments,
            ),
            refuse=refuse,
        )

    def beat(self, client: Client) -> None:
        self.ask(
            client,
            lambda ticket: BeatRequested(ticket, "g", client.member_id, client.generation, client.instance_id),
        )

    # --- the random rules ---

    @precondition(lambda self: len(self.clients) < 6)
    @rule(static=st.booleans(), old=st.booleans(), rebalance_ms=st.sampled_from([2000, 2000, 0]))
    def arrive(self, static: bool, old: bool, rebalance_ms: int) -> None:
        self.made += 1
        self.clients.append(Client(f"s{self.made}" if static else "", old=old, rebalance_ms=rebalance_ms))

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 5), refuse=st.sampled_from([False] * 9 + [True]))
    def go_on(self, which: int, refuse: bool) -> None:
        self.act(self.clients[which % len(self.clients)], refuse=refuse)

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 5))
    def lose_the_response(self, which: int) -> None:
        self.clients[which % len(self.clients)].ticket = None

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 5))
    def restart(self, which: int) -> None:
        """Let a client die; another one with its instance id, if any, takes its place."""
        before = self.clients[which % len(self.clients)]
        self.clients[which % len(self.clients)] = Client(
            before.instance_id, old=before.old, rebalance_ms=before.rebalance_ms
        )

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 5))
    def leave(self, which: int) -> None:
        client = self.clients.pop(which % len(self.clients))
        self.ask(client, lambda ticket: LeaveRequested(ticket, "g", (LeavingMember(client.member_id),)))

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 5))
    def join_again(self, which: int) -> None:
        client = self.clients[which % len(self.clients)]
        if client.member_id or not client.old:
            self.join(client)

    @rule(ms=st.sampled_from([10, 60, 500, 1100, 2100]))
    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.step(CoordinatorTicked())

    @precondition(lambda self: self.committed is not None)
    @rule()
    def fail_over(self) -> None:
        assert self.committed is not None
        for ticket in {*self.open, *(client.ticket for client in self.clients if client.ticket is not None)}:
            self.answers[ticket] = Refused(ErrorCode.NOT_COORDINATOR, "the connection has ended")
        self.open.clear()
        self.group = ClassicGroup.restored(
            "g", SETTINGS, self.committed.state, generation=self.committed.generation, now_ms=self.now_ms
        )
        # The generations after the committed one did not get an assignment. Their numbers are used again.
        self.given = {number: given for number, given in self.given.items() if number <= self.group.generation}
        self.led = {number: led for number, led in self.led.items() if number <= self.group.generation}
        for client in self.clients:
            if client.generation > self.group.generation:
                client.joined = client.assigned = None
                client.generation, client.member_id, client.ticket = -1, "", None
        self.group.check_invariants()

    @invariant()
    def few_requests_wait(self) -> None:
        assert len(self.open) <= 2 * SETTINGS.max_size

    def teardown(self) -> None:
        """Let all clients behave: the group becomes stable with exactly these clients, and all have an assignment."""
        for client in self.clients:
            client.rebalance_ms = 2000
        for _ in range(200):
            for client in self.clients[: SETTINGS.max_size]:
                if client.fenced:
                    client.fenced, client.member_id, client.joined = False, "", None
                self.act(client)
                self.receive(client)
            self.now_ms += 100
            self.step(CoordinatorTicked())
        live = self.clients[: SETTINGS.max_size]
        if live:
            assert self.group.phase is GroupPhase.STABLE
            assert {client.member_id for client in live} == self.group.members.keys()
            assert all(client.assigned for client in live)
        else:
            assert self.group.phase is GroupPhase.EMPTY
        assert not self.open


Histories.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase
