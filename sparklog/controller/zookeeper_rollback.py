"""Whether a broker's registration proves that ZooKeeper was put back from an older copy, and what follows. Pure.

A broker registers with the highest numbers that its log directory has seen the cluster count to. A controller epoch
above the present one, or the present one under another controller, was given by a ZooKeeper that knew more than this
one. Then every counter is raised by more than can have been used since the copy was made, and the next controller
begins above all that any broker has seen. A number that is out of all reason is not believed: its broker is left out,
and one sentence says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sparklog.controller.effects import RaiseCounters, Report
from sparklog.model import BrokerRegistration

#: Controller epochs and producer ids that are left out: some brokers may have seen more than the one that proves it.
_EPOCH_STRIDE = 1000
_PRODUCER_ID_STRIDE = 1_000_000
#: Above the present controller epoch by more than this nothing is believed.
MOST_RAISED = 1_000_000


class Judged(NamedTuple):
    """``believed``: registrations that count. ``raise_counters``: ZooKeeper is older than one of their brokers."""

    believed: tuple[BrokerRegistration, ...]
    reports: tuple[Report, ...] = ()
    raise_counters: RaiseCounters | None = None


class ZookeeperRollback:
    """Judges registrations for one controller term. Mutable: it reports what it does not believe once."""

    def __init__(self, *, controller_id: str, controller_epoch: int) -> None:
        self._controller_id = controller_id
        self._controller_epoch = controller_epoch
        self._reported: set[tuple[int, int]] = set()

    def judge(self, brokers: Iterable[BrokerRegistration]) -> Judged:
        believed: list[BrokerRegistration] = []
        reports: list[Report] = []
        newest: BrokerRegistration | None = None
        for found in brokers:
            seen = found.seen
            if seen.controller_epoch - self._controller_epoch > MOST_RAISED:
                reports.extend(self._refused(found))
                continue
            believed.append(found)
            is_newer = seen.controller_epoch > self._controller_epoch or (
                seen.controller_epoch == self._controller_epoch and seen.controller_id != self._controller_id
            )
            if is_newer and (newest is None or newest.seen.controller_epoch < seen.controller_epoch):
                newest = found
        if newest is None:
            return Judged(tuple(believed), tuple(reports))
        producer_ids = max(found.seen.producer_ids for found in believed)
        detail = (
            f"ZooKeeper is older than broker {newest.broker_id}, which has seen controller epoch"
            f" {newest.seen.controller_epoch} of {newest.seen.controller_id}; this is {self._controller_epoch} of"
            f" {self._controller_id}: counters are raised"
        )
        order = RaiseCounters(
            newest.seen.controller_epoch + _EPOCH_STRIDE,
            producer_ids + _PRODUCER_ID_STRIDE if producer_ids else 0,
            detail,
        )
        reports.append(Report("controller.zookeeper.older", detail, grave=True))
        return Judged(tuple(believed), tuple(reports), order)

    def _refused(self, found: BrokerRegistration) -> list[Report]:
        known = (found.broker_id, found.incarnation)
        if known in self._reported:
            return []
        self._reported.add(known)
        detail = (
            f"broker {found.broker_id} is left out: it has seen controller epoch {found.seen.controller_epoch}, more"
            f" than {MOST_RAISED} above {self._controller_epoch}: put a newer copy of ZooKeeper's data back, or run"
            " `sparklog zookeeper rebuild`"
        )
        return [Report("controller.brokers.refused", detail, grave=True)]
