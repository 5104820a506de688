"""A replica core with a modelled log: the world sends events, performs the log's orders, and returns each effect's
result."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

from sparklog.model import LeaderAndIsr
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.replica import Replica, ReplicaSettings
from sparklog.testing.sim_log import SimLog

REPLICAS = (1, 2, 3)
LIVE = {1: 11, 2: 12, 3: 13}
SETTINGS = ReplicaSettings(lag_time_max_ms=1000, connection_grace_ms=100, isr_retry_ms=200)

_E = TypeVar("_E")


def log_of(*epochs: int, start: int = 0) -> SimLog:
    """Return a log with one record of each given leader epoch, in order, from ``start`` on. Equal epochs have equal
    records."""
    log = SimLog(start)
    for epoch in epochs:
        log.append(f"e{epoch}", 1, leader_epoch=epoch, now_ms=0)
    return log


def decided(leader: int, epoch: int, version: int, isr: tuple[int, ...] = REPLICAS, **changes: object) -> ev.Decided:
    fields: dict[str, object] = {"replicas": REPLICAS, "incarnations": LIVE, "min_isr": 2, **changes}
    return ev.Decided(LeaderAndIsr(leader, epoch, isr, 1), version, **fields)  # type: ignore[arg-type]


def only(effects: list[fx.Effect], kind: type[_E]) -> list[_E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def one(effects: list[fx.Effect], kind: type[_E]) -> _E:
    (effect,) = only(effects, kind)
    return effect


class Stage:
    """One replica of broker 1 and its log. ``send`` returns the effects of the event and of all events that follow."""

    def __init__(
        self, log: SimLog | None = None, *, high_watermark: int = 0, settings: ReplicaSettings = SETTINGS
    ) -> None:
        self.log = log or SimLog()
        self.replica = Replica(1, self.log, high_watermark=high_watermark, settings=settings)
        self.now_ms = 10_000
        self._tickets = 0

    def send(self, event: ev.Event, *, copies: SimLog | None = None) -> list[fx.Effect]:
        """Create the replica. ``copies`` is the leader's log, for responses with batches."""
        seen: list[fx.Effect] = []
        queue = deque([event])
        while queue:
            effects = self.replica.step(queue.popleft(), self.now_ms)
            seen += effects
            for effect in effects:
                queue.extend(self._perform(effect, copies))
        self.replica.check_invariants()
        return seen

    def _perform(self, effect: fx.Effect, copies: SimLog | None) -> list[ev.Event]:
        match effect:
            case fx.AppendAsLeader(ticket, epoch):
                batch = self.log.append(f"e{epoch}", 1, leader_epoch=epoch, now_ms=self.now_ms)
                return [ev.LeaderAppended(ticket, batch.header.base_offset, batch.header.next_offset)]
            case fx.AppendAsFollower():
                assert copies is not None
                return [ev.FollowerAppended(self.log.append_copies(copies.read(self.log.log_end_offset, 100)))]
            case fx.TruncateLog(offset):
                return [ev.Truncated(self.log.truncate(offset))]
            case fx.RestartLog(offset):
                self.log.restart_at(offset)
                return [ev.Truncated(offset)]
        return []

    def wait(self, ms: int) -> list[fx.Effect]:
        """Advance the time, with a tick where the core has requested one."""
        end_ms = self.now_ms + ms
        seen: list[fx.Effect] = []
        while (deadline_ms := self.replica.deadline_ms()) <= end_ms:
            self.now_ms = max(self.now_ms, deadline_ms)
            before = len(seen)
            seen += self.send(ev.ReplicaTicked())
            assert self.replica.deadline_ms() != deadline_ms or len(seen) > before, "a tick must change something"
        self.now_ms = end_ms
        return seen

    def lead(
        self, epoch: int = 1, version: int = 1, isr: tuple[int, ...] = REPLICAS, **changes: object
    ) -> list[fx.Effect]:
        return self.send(decided(1, epoch, version, isr, **changes))

    def produce(self, acks: int = -1, *, timeout_ms: int = 30_000) -> tuple[int, list[fx.Effect]]:
        """Return the ticket and its outcome."""
        self._tickets += 1
        return self._tickets, self.send(ev.ProduceArrived(self._tickets, acks, self.now_ms + timeout_ms))

    def fetch(
        self,
        follower: int,
        offset: int,
        *,
        last_epoch: int | None = None,
        epoch: int | None = None,
        incarnation: int = 0,
    ) -> list[fx.Effect]:
        """Send a follower's fetch. By default the follower's log equals this one, except in length."""
        if last_epoch is None:
            batches = self.log.read(0, 10**6)
            below = [b.header.leader_epoch for b in batches if b.header.next_offset <= offset]
            last_epoch = below[-1] if below else -1
        leader_epoch = self.replica.leader_epoch if epoch is None else epoch
        return self.send(ev.FollowerFetched(follower, incarnation or LIVE[follower], leader_epoch, offset, last_epoch))

    def written(self, order: fx.WriteIsr) -> list[fx.Effect]:
        """Report that ZooKeeper performed the write."""
        return self.send(ev.IsrWritten(order.isr, order.expected_version + 1))

    def answer(self, leader: SimLog, *, epoch: int | None = None, **changes: Any) -> list[fx.Effect]:
        """Send the leader's response to a fetch from this log's present end."""
        batches = leader.read(self.log.log_end_offset, 100)
        fields: dict[str, Any] = {
            "leader_epoch": self.replica.leader_epoch if epoch is None else epoch,
            "fetch_offset": self.log.log_end_offset,
            "code": 0,
            "high_watermark": 0,
            "log_start_offset": leader.log_start_offset,
            "log_end_offset": leader.log_end_offset,
            "diverging": None,
            "batch_count": len(batches),
            "end_offset": batches[-1].header.next_offset if batches else -1,
            **changes,
        }
        return self.send(ev.LeaderResponded(**fields), copies=leader)
