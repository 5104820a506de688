"""Detection, from the registrations of brokers, that ZooKeeper was restored from an older copy.

The module does no I/O. A broker registers with the highest controller epoch and producer ids that its log directory has
seen. If this epoch is above the current one, or if another controller had the current epoch, then ZooKeeper once had
newer data than it has now. The controller then raises the epoch and the producer ids well above the values that brokers
have seen, and its term ends. The next controller starts above them. If an epoch is implausibly high, the controller
ignores the broker and reports what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sparklog.controller.effects import ControllerReport, RaiseCounters
from sparklog.model import BrokerRegistration

#: The number of controller epochs, and of producer ids, that are skipped, because other brokers may have seen higher
#: ones than this broker.
_EPOCH_STRIDE = 1000
_PRODUCER_ID_STRIDE = 1_000_000
#: The maximum plausible difference between an epoch in a broker's registration and the current epoch.
MOST_RAISED = 1_000_000


class Judged(NamedTuple):
    """The result of a check of registrations. ``believed`` has the registrations that the controller accepts.

    ``raise_counters`` is set if an accepted broker has seen a newer controller epoch than ZooKeeper has now.
    """

    believed: tuple[BrokerRegistration, ...]
    reports: tuple[ControllerReport, ...] = ()
    raise_counters: RaiseCounters | None = None


class ZookeeperRollback:
    """The check of broker registrations in one controller term.

    It detects that ZooKeeper was restored from an older copy. It reports each refused registration only once.
    """

    def __init__(self, *, controller_id: str, controller_epoch: int) -> None:
        self._controller_id = controller_id
        self._controller_epoch = controller_epoch
        self._reported: set[tuple[int, int]] = set()

    def judge(self, brokers: Iterable[BrokerRegistration]) -> Judged:
        believed: list[BrokerRegistration] = []
        reports: list[ControllerReport] = []
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
            f" {newest.seen.controller_epoch} of {newest.seen.controller_id}; the current one is"
            f" {self._controller_epoch} of {self._controller_id}: the controller raises the counters"
        )
        order = RaiseCounters(
            newest.seen.controller_epoch + _EPOCH_STRIDE,
            producer_ids + _PRODUCER_ID_STRIDE if producer_ids else 0,
            detail,
        )
        reports.append(ControllerReport("controller.zookeeper.older", detail, grave=True))
        return Judged(tuple(believed), tuple(reports), order)

    def _refused(self, found: BrokerRegistration) -> list[ControllerReport]:
        known = (found.broker_id, found.incarnation)
        if known in self._reported:
            return []
        self._reported.add(known)
        detail = (
            f"broker {found.broker_id} is left out: it has seen controller epoch {found.seen.controller_epoch}, more"
            f" than {MOST_RAISED} above {self._controller_epoch}: restore a newer copy of ZooKeeper's data, or run"
            " `sparklog zookeeper rebuild`"
        )
        return [ControllerReport("controller.brokers.refused", detail, grave=True)]
