"""Detection that ZooKeeper was restored from an older copy, by the registrations of brokers.

The module does no I/O. A broker registers with the highest numbers that its log directory has seen in the cluster. A
controller epoch above the current one, or the current one of another controller, was assigned by a ZooKeeper with newer
data. The controller then raises every counter by more than the cluster can have used since the copy was made, and the
next controller starts above all numbers that any broker has seen. An implausibly high number is not believed: the
controller leaves its broker out, and the report says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sparklog.controller.effects import ControllerReport, RaiseCounters
from sparklog.model import BrokerRegistration

#: The controller epochs and producer ids that are skipped. Some brokers may have seen higher ones than this broker.
_EPOCH_STRIDE = 1000
_PRODUCER_ID_STRIDE = 1_000_000
#: A number that is more than this above the current controller epoch is not believed.
MOST_RAISED = 1_000_000


class Judged(NamedTuple):
    """The accepted registrations; ``raise_counters`` is set if ZooKeeper is older than one of their brokers."""

    believed: tuple[BrokerRegistration, ...]
    reports: tuple[ControllerReport, ...] = ()
    raise_counters: RaiseCounters | None = None


class ZookeeperRollback:
    """The check of registrations for one controller term. Mutable: it reports a refused registration once."""

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
