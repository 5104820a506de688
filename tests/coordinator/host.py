"""A host for the coordinator core with its log in a list: appends are committed when the test commits them."""

from __future__ import annotations

from typing import Any

from sparklog.coordinator.effects import (
    Append,
    CoordinatorReport,
    Outcome,
    Respond,
    Rewritten,
    SendMarkers,
    SendOffsets,
)
from sparklog.coordinator.events import (
    AbortRequested,
    AddRequested,
    Appended,
    AppendRefused,
    BeginRequested,
    CoordinatorTicked,
    EndRequested,
    Event,
    MarkersWritten,
    OffsetsWritten,
    RewriteRequested,
    SettleRequested,
    TouchRequested,
    VerifyRequested,
)
from sparklog.coordinator.log_records import Record
from sparklog.coordinator.records import PartitionPlace
from sparklog.coordinator.transactions import Transactions, TransactionSettings
from sparklog.protocol.messages import TransactionMarker


class Host:
    """A coordinator and its log. ``crash`` loses the coordinator and its appends in flight, and keeps ``log``."""

    def __init__(self, settings: TransactionSettings | None = None) -> None:
        self.settings = settings
        self.now_ms = 1_000_000
        self.log: list[Record] = []
        self.log_start = 0
        self.rewrite_from = 0
        self.tickets = 0
        self.producer_ids = 100
        self.answers: dict[int, Outcome] = {}
        self.appends: list[Append] = []
        self.markers: list[SendMarkers] = []
        self.offsets: list[SendOffsets] = []
        self.reports: list[str] = []
        #: The transaction of its run that each producer is in, by key and run.
        self.turns: dict[tuple[str, str], int] = {}
        self.core = self._fresh()

    def _fresh(self) -> Transactions:
        core = Transactions(self.settings)
        core.load(self.log[self.log_start :])
        return core

    def crash(self, *, keep: int = 0) -> None:
        """Elect a new leader: its log has the first ``keep`` appends in flight, and not the others."""
        for append in self.appends[:keep]:
            self.log += append.records
        self.appends, self.markers, self.offsets = [], [], []
        self.core = self._fresh()
        self.perform(self.core.start(self.now_ms))

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Append():
                    self.appends.append(effect)
                case Respond():
                    assert effect.ticket not in self.answers, "a second response to one request"
                    self.answers[effect.ticket] = effect.outcome
                case SendMarkers():
                    self.markers.append(effect)
                case SendOffsets():
                    self.offsets.append(effect)
                case Rewritten():
                    self.log_start = self.rewrite_from
                case CoordinatorReport():
                    self.reports.append(effect.kind)

    def step(self, event: Event) -> None:
        self.perform(self.core.step(event, self.now_ms))

    def commit_one(self) -> None:
        append = self.appends.pop(0)
        self.log += append.records
        self.step(Appended(append.append))

    def refuse_one(self) -> None:
        self.step(AppendRefused(self.appends.pop(0).append, "too few in-sync replicas"))

    def settle(self, *, markers: bool = True) -> None:
        """Complete everything that is in flight."""
        while self.appends or (markers and (self.markers or self.offsets)):
            while self.appends:
                self.commit_one()
            if markers:
                for sent in self._take(self.markers):
                    written = tuple(
                        PartitionPlace(marker.topic, marker.partition, marker.topic_id) for marker in sent.markers
                    )
                    self.step(MarkersWritten(sent.key, sent.decision, written, sent.part))
                for handed in self._take(self.offsets):
                    self.step(OffsetsWritten(handed.key, handed.decision, handed.group))

    @staticmethod
    def _take(queue: list[Any]) -> list[Any]:
        taken = list(queue)
        queue.clear()
        return taken

    def sent_markers(self) -> list[TransactionMarker]:
        return [marker for sent in self.markers for marker in sent.markers]

    def tick(self, ms: int) -> None:
        self.now_ms += ms
        self.step(CoordinatorTicked())

    # --- requests: each returns its ticket ---

    def _ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def begin(
        self,
        key: str,
        run_id: str,
        version: int = -1,
        *,
        turn: int | None = None,
        timeout_ms: int = 60_000,
        by_topic: bool = False,
    ) -> int:
        """Begin a transaction. ``turn`` None means the producer's next one."""
        self.producer_ids += 1
        if turn is None:
            turn = self.turns.get((key, run_id), -1) + 1 if version == -1 else 0
        self.turns[key, run_id] = turn
        ticket = self._ticket()
        self.step(BeginRequested(ticket, key, run_id, version, timeout_ms, self.producer_ids, turn, by_topic))
        return ticket

    def settle_version(self, key: str, run_id: str, topic_id: str = "") -> int:
        self.step(SettleRequested(self._ticket(), key, run_id, topic_id))
        return self.tickets

    def add(self, key: str, run_id: str, producer_id: int, *places: Any, **more: Any) -> int:
        """Decide the transaction begun last, or the one that ``version`` and ``turn`` name."""
        named = {**self._present(key, run_id), **more}
        self.step(
            AddRequested(
                self._ticket(), key, run_id, producer_id, 0, tuple(PartitionPlace(*p) for p in places), **named
            )
        )
        return self.tickets

    def end(self, key: str, run_id: str, version: int, *winners: int, commit: bool = True, turn: int | None = None,
            ) -> int:  # fmt: skip
        turn = self.turns.get((key, run_id), 0) if turn is None else turn
        self.step(EndRequested(self._ticket(), key, run_id, version, commit, winners, self.now_ms + 5_000, turn))
        return self.tickets

    def verify(self, key: str, producer_id: int, *place: Any) -> int:
        self.step(VerifyRequested(self._ticket(), key, producer_id, 0, PartitionPlace(*place)))
        return self.tickets

    def touch(self, key: str, run_id: str, **named: int) -> int:
        self.step(TouchRequested(self._ticket(), key, run_id, **{**self._present(key, run_id), **named}))
        return self.tickets

    def _present(self, key: str, run_id: str) -> dict[str, int]:
        version = next((now.version for found, now, *_ in self.core.entries() if found == key), -1)
        return {"version": version, "turn": self.turns.get((key, run_id), 0)}

    def abort(self, key: str) -> int:
        self.step(AbortRequested(self._ticket(), key))
        return self.tickets

    def rewrite(self) -> None:
        """Begin a rewrite, unless one is in progress."""
        if self.core._rewrite is None:
            self.rewrite_from = len(self.log)
            self.step(RewriteRequested())

    # --- responses ---

    def producer(self, ticket: int) -> int:
        return int(self.answers[ticket].producer_id)  # type: ignore[union-attr]

    def code(self, ticket: int) -> str:
        outcome = self.answers[ticket]
        return outcome.code.name if hasattr(outcome, "code") else type(outcome).__name__
