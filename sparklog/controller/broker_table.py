"""The table of brokers: live, stopping and held. A held broker has disappeared but does not count as failed yet.

The objects of this module are not thread-safe: they are parts of ``Controller``. A registration that disappears means a
dead broker, except if many disappear together or if this process had lost ZooKeeper itself. Then ZooKeeper, or the
network to it, is the more likely cause. Such brokers are *held* for one session timeout: no leadership moves away from
them or to them. Meanwhile they stay in the table of brokers and receive updates: most of them are live and about to
register again. A leader must not remove them from its ISRs, and clients must still find them. A new term takes the
addresses of held brokers from their last registrations. A held broker whose logs are untrusted is hidden from the other
brokers. A *retired* broker is one whose process was seen to end by its supervisor. It is certainly dead, so it is never
held, and it does not count among the brokers that disappear together.

If a term starts without any broker, the controller was probably started before the brokers. Until the first broker
registers, no broker counts as failed, because there is no broker to elect. After that the other brokers have one
session timeout to register and resume their leaderships; otherwise the first broker would lead every partition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from sparklog.controller.election import IsrLiveness
from sparklog.model import BrokerRegistration


class BrokerChanges(NamedTuple):
    """The changes found in one read of the registrations: new incarnations, failed brokers and newly held brokers.

    A held broker has disappeared, but does not count as failed yet.
    """

    arrived: tuple[BrokerRegistration, ...] = ()
    failed: tuple[int, ...] = ()
    held: tuple[int, ...] = ()


class BrokerTable:
    """The table of the live, held and stopping brokers of a controller term.

    ``registrations`` has the live brokers. A held broker has disappeared, but does not count as failed until its
    deadline has passed. ``held`` has the last registrations of held brokers.
    """

    def __init__(self, *, controller_epoch: int, session_timeout_ms: int) -> None:
        self._controller_epoch = controller_epoch
        self._session_timeout_ms = session_timeout_ms
        self.registrations: dict[int, BrokerRegistration] = {}
        self.stopping: frozenset[int] = frozenset()
        self._stopping_incarnations: Mapping[int, int] = {}
        self._held: dict[int, tuple[BrokerRegistration | None, int]] = {}
        self._vanished_at: dict[int, int] = {}
        #: Every broker that disappears before this time is held.
        self._cautious_until_ms = 0
        #: Whether the term started without brokers and no broker has registered yet.
        self._awaits_first = False

    @property
    def liveness(self) -> IsrLiveness:
        live = {broker_id: found.incarnation for broker_id, found in self.registrations.items()}
        return IsrLiveness(live, frozenset(self._held), self.stopping, self._controller_epoch)

    @property
    def deadline_ms(self) -> int | None:
        if self._awaits_first:
            return None
        return min((deadline for _, deadline in self._held.values()), default=None)

    def failed_among(self, brokers: Iterable[int]) -> list[int]:
        """Return the ``brokers`` that count as failed: they are not live, and have no time left to register again."""
        if self._awaits_first:
            return []
        return [i for i in brokers if i not in self.registrations and i not in self._held]

    def present(self) -> list[BrokerRegistration]:
        """Return the registrations of the live and held brokers, in order of id, for the metadata of clients.

        A held broker has disappeared, but does not count as failed yet.
        """
        return sorted([*self.registrations.values(), *self.held], key=lambda found: found.broker_id)

    @property
    def held(self) -> list[BrokerRegistration]:
        """Return the known last registrations of the held brokers, in order of id.

        A held broker has disappeared, but does not count as failed yet.
        """
        found = [registration for registration, _ in self._held.values() if registration is not None]
        return sorted(found, key=lambda registration: registration.broker_id)

    def be_cautious(self, now_ms: int) -> None:
        """Do not count a broker as failed at once if it disappears within one session timeout from now.

        Such a broker counts as failed only after it has been absent for one session timeout. A broker that has already
        disappeared, but does not count as failed yet, also gets one more session timeout to register again. Call this
        method after this process has lost its own connection to ZooKeeper.
        """
        self._cautious_until_ms = now_ms + self._session_timeout_ms
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
        """Start a controller term with these live brokers.

        ``expected`` are the members of all ISRs. ``absent`` are the last registrations of brokers that are not
        registered now.
        """
        changes = self.read(brokers, now_ms)
        last = {found.broker_id: found for found in absent}
        missing = {i: last.get(i) for i in sorted(set(expected) - set(self.registrations) - set(retired))}
        if not self.registrations:
            self._awaits_first = True
            self._hold(missing, now_ms)
            return changes  # They are not reported as held, because they have not disappeared but have yet to register.
        if now_ms < self._cautious_until_ms or self._many(len(missing), len(missing) + len(self.registrations)):
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
        if now_ms < self._cautious_until_ms or self._many(len(vanished) + recent, before + recent):
            self._hold(vanished, now_ms)
            return BrokerChanges(arrived, dead, tuple(vanished))
        return BrokerChanges(arrived, (*dead, *vanished), ())

    def read_stopping(self, stopping: Mapping[int, int]) -> set[int]:
        """Replace the set of stopping brokers. Return the brokers that were added or removed."""
        before = self.stopping
        self._stopping_incarnations = stopping
        self._set_stopping()
        return set(before ^ self.stopping)

    def fail_overdue(self, now_ms: int) -> tuple[int, ...]:
        """Remove and return the held brokers that have not registered again by their deadlines.

        From now on these brokers count as failed.
        """
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
        deadline = max(now_ms + self._session_timeout_ms, self._cautious_until_ms)
        for broker_id, registration in vanished.items():
            self._held[broker_id] = (registration, deadline)

    @staticmethod
    def _many(vanished: int, of: int) -> bool:
        """Return whether more than one broker, and most of the brokers, disappeared. A single one counts as failed."""
        return vanished >= 2 and 2 * vanished > of
