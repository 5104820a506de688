"""Which brokers live, stop, or have vanished without being given up yet. Mutable, owned by one ``Controller``.

A registration that disappears means a dead broker, except where many disappear together or this process had lost
ZooKeeper itself: then ZooKeeper, or the way to it, is the likelier cause. Such brokers are *held* for one session
timeout: nothing is elected away from them, nor to them. Meanwhile they are among the brokers that all are told of, and
are told themselves what there is to tell: most of them are at work and about to register again, and whoever leads must
neither take them out of its ISRs nor be lost to its clients. A new term knows where they are by their last
registrations, but for those whose logs nobody vouches for: these are hidden, as suspects are. Brokers whose end was
seen by their supervisors (*retired*) are dead for certain: they are never held, and say nothing about the others.

A term that begins without any broker is a cluster that starts again, its controller first. Nobody is given up before
the first broker is there, for there is nobody to elect; from then on the others have one session timeout to come back
to what they led, else whoever is first would lead everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from sparklog.controller.election import IsrLiveness
from sparklog.model import BrokerRegistration


class BrokerChanges(NamedTuple):
    """``arrived`` are new incarnations; ``failed`` brokers are given up; ``held`` ones have just vanished."""

    arrived: tuple[BrokerRegistration, ...] = ()
    failed: tuple[int, ...] = ()
    held: tuple[int, ...] = ()


class BrokerTable:
    """``registrations`` are of live brokers; a held one's stays in ``held``, with the time it is given up."""

    def __init__(self, *, controller_epoch: int, session_timeout_ms: int) -> None:
        self._controller_epoch = controller_epoch
        self._session_timeout_ms = session_timeout_ms
        self.registrations: dict[int, BrokerRegistration] = {}
        self.stopping: frozenset[int] = frozenset()
        self._stopping_incarnations: Mapping[int, int] = {}
        self._held: dict[int, tuple[BrokerRegistration | None, int]] = {}
        self._vanished_at: dict[int, int] = {}
        #: Until then every broker that is missed is held.
        self._wary_until_ms = 0
        #: The term began without brokers, and none has come yet.
        self._awaits_first = False

    @property
    def standing(self) -> IsrLiveness:
        live = {broker_id: found.incarnation for broker_id, found in self.registrations.items()}
        return IsrLiveness(live, frozenset(self._held), self.stopping, self._controller_epoch)

    @property
    def deadline_ms(self) -> int | None:
        if self._awaits_first:
            return None
        return min((deadline for _, deadline in self._held.values()), default=None)

    def given_up(self, brokers: Iterable[int]) -> list[int]:
        """Which of these are neither live nor held."""
        if self._awaits_first:
            return []
        return [i for i in brokers if i not in self.registrations and i not in self._held]

    def present(self) -> list[BrokerRegistration]:
        """Registrations of live brokers and of held ones, by id: where clients may try."""
        return sorted([*self.registrations.values(), *self.held], key=lambda found: found.broker_id)

    @property
    def held(self) -> list[BrokerRegistration]:
        """Held brokers that can be found if they live, by id."""
        found = [registration for registration, _ in self._held.values() if registration is not None]
        return sorted(found, key=lambda registration: registration.broker_id)

    def be_wary(self, now_ms: int) -> None:
        """Hold brokers that disappear within the next session timeout: this process was cut off from ZooKeeper."""
        self._wary_until_ms = now_ms + self._session_timeout_ms
        self._hold({broker_id: registration for broker_id, (registration, _) in self._held.items()}, now_ms)

    def load(
        self,
        brokers: Iterable[BrokerRegistration],
        expected: Iterable[int],
        now_ms: int,
        *,
        retired: Collection[int] = (),
        absent: Iterable[BrokerRegistration] = (),
    ) -> BrokerChanges:
        """Start a term with these live brokers; ``expected`` are those that partition states count on, ``absent`` the
        last registrations of others."""
        changes = self.read(brokers, now_ms)
        last = {found.broker_id: found for found in absent}
        missing = {i: last.get(i) for i in sorted(set(expected) - set(self.registrations) - set(retired))}
        if not self.registrations:
            self._awaits_first = True
            self._hold(missing, now_ms)
            return changes  # not called held: none has vanished, they are yet to come
        if now_ms < self._wary_until_ms or self._many(len(missing), len(missing) + len(self.registrations)):
            self._hold(missing, now_ms)
            return changes._replace(held=tuple(missing))
        return changes

    def read(
        self, brokers: Iterable[BrokerRegistration], now_ms: int, *, retired: Collection[int] = ()
    ) -> BrokerChanges:
        found = {broker.broker_id: broker for broker in brokers}
        missed = {i: known for i, known in self.registrations.items() if i not in found}
        dead = tuple(i for i in (*missed, *self._held) if i in retired)
        vanished = {i: known for i, known in missed.items() if i not in dead}
        arrived = tuple(
            broker
            for broker_id, broker in found.items()
            if broker_id not in self.registrations or self.registrations[broker_id].incarnation != broker.incarnation
        )
        before = len(self.registrations) - len(missed) + len(vanished)
        self.registrations = found
        for broker_id in (*found, *dead):
            self._held.pop(broker_id, None)
            self._vanished_at.pop(broker_id, None)
        if self._awaits_first and found:
            self._awaits_first = False
            self._hold({i: known for i, (known, _) in self._held.items()}, now_ms)
        self._vanished_at = {i: at for i, at in self._vanished_at.items() if now_ms - at < self._session_timeout_ms}
        recent = len(self._vanished_at)
        self._vanished_at.update(dict.fromkeys(vanished, now_ms))
        self._set_stopping()
        if now_ms < self._wary_until_ms or self._many(len(vanished) + recent, before + recent):
            self._hold(vanished, now_ms)
            return BrokerChanges(arrived, dead, tuple(vanished))
        return BrokerChanges(arrived, (*dead, *vanished), ())

    def read_stopping(self, stopping: Mapping[int, int]) -> set[int]:
        """Brokers whose stopping began or ended."""
        before = self.stopping
        self._stopping_incarnations = stopping
        self._set_stopping()
        return set(before ^ self.stopping)

    def give_up(self, now_ms: int) -> tuple[int, ...]:
        """Held brokers whose time is over: they have failed."""
        if self._awaits_first:
            return ()
        over = tuple(broker_id for broker_id, (_, deadline) in self._held.items() if deadline <= now_ms)
        for broker_id in over:
            del self._held[broker_id]
        return over

    def _set_stopping(self) -> None:
        self.stopping = frozenset(
            broker_id
            for broker_id, incarnation in self._stopping_incarnations.items()
            if broker_id in self.registrations and self.registrations[broker_id].incarnation == incarnation
        )

    def _hold(self, vanished: Mapping[int, BrokerRegistration | None], now_ms: int) -> None:
        deadline = max(now_ms + self._session_timeout_ms, self._wary_until_ms)
        for broker_id, registration in vanished.items():
            self._held[broker_id] = (registration, deadline)

    @staticmethod
    def _many(vanished: int, of: int) -> bool:
        """Most of the brokers, and more than one: a lone broker's death is a death."""
        return vanished >= 2 and 2 * vanished > of
