"""The writes and reads of partition states in ZooKeeper that a term's core (its ``Controller``) requests.

A new topic may have thousands of partitions. Therefore the writes of one step are spread over several iterations of the
event loop, and all outcomes that arrive in one iteration are passed to the core together.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from sparklog.cluster.core_runner import CoreRunner
from sparklog.cluster.retry_pauses import growing_pauses
from sparklog.controller.effects import StateWrite, WriteStates
from sparklog.controller.events import Fenced, StatesRead, StatesRefused, StatesUnknown, StatesWritten
from sparklog.model import TopicPartition, VersionedState
from sparklog.zk.controller_store import ControllerStore, EpochLost, FateUnknown, NodeGone, StateOutcome, Written
from sparklog.zk.errors import ZkUnreachable

#: The maximum time for which one iteration of the event loop sends writes, and the maximum number of outcomes in one
#: step of the core.
_TURN_S = 0.03
_OUTCOMES_AT_ONCE = 2000


class PartitionStateIo:
    """The reader and writer of partition states in ZooKeeper, for one controller term. Its tasks end with the term."""

    def __init__(self, runner: CoreRunner, store: ControllerStore) -> None:
        self._runner = runner
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._to_write: deque[StateWrite] = deque()
        #: The outcomes that the core has not received yet, each with its write.
        self._outcomes: dict[TopicPartition, tuple[StateWrite, StateOutcome | None]] = {}
        #: The partitions whose states could not be read. They are read again after pauses.
        self._unread: dict[TopicPartition, None] = {}

    # --- writes ----------------------------------------------------------------------------------------------------

    def write(self, effect: WriteStates) -> None:
        """Queue writes of states after the writes of earlier calls. Later pass the outcomes to the ``Controller``."""
        is_new = not self._to_write
        self._to_write.extend(effect.writes)
        if is_new:
            self._write_more()

    def _write_more(self) -> None:
        """Send writes for a limited time; continue in the next iteration of the event loop.

        Skip a write if the deletion of its topic has begun since the core ordered it. Otherwise it could create nodes
        in a topic whose nodes are being deleted.
        """
        ends_s = time.monotonic() + _TURN_S
        while self._to_write and not self._runner.over.done():
            write = self._to_write.popleft()
            if not self._is_pending(write) or self._runner.core.state.topics[write.tp.topic].deleting:
                continue
            try:
                self._store.write_state(
                    write.tp,
                    write.state,
                    topic_id=write.topic_id,
                    leader_incarnation=write.leader_incarnation,
                    expected_version=write.expected_version,
                    on_outcome=partial(self._on_outcome, write),
                )
            except Exception as error:
                # The event loop calls this method and would only log an error, and the remaining writes would wait
                # forever.
                self._runner.fail(f"write of {write.tp}", error)
                return
            if self._to_write and time.monotonic() >= ends_s:
                self._loop.call_soon(self._write_more)
                return

    def _is_pending(self, write: StateWrite) -> bool:
        """Return whether the core waits for the outcome of this write.

        If the topic was deleted, the core does not wait, even if a new topic with this name waits for a write of the
        same partition.
        """
        partition = self._runner.core.state.partition(write.tp)
        return partition is not None and partition.pending is write

    def _on_outcome(self, write: StateWrite, tp: TopicPartition, outcome: StateOutcome | None) -> None:
        """Collect an outcome. The core receives all outcomes of one iteration of the event loop together."""
        if not self._outcomes:
            self._loop.call_soon(self._report_outcomes)
        self._outcomes[tp] = (write, outcome)

    def _report_outcomes(self) -> None:
        outcomes, self._outcomes = self._outcomes, {}
        if len(outcomes) > _OUTCOMES_AT_ONCE:
            found = list(outcomes.items())
            outcomes, self._outcomes = dict(found[:_OUTCOMES_AT_ONCE]), dict(found[_OUTCOMES_AT_ONCE:])
            self._loop.call_soon(self._report_outcomes)
        written: dict[TopicPartition, int] = {}
        gone: dict[TopicPartition, VersionedState | None] = {}
        unknown: list[TopicPartition] = []
        lost: list[StateWrite] = []
        for tp, (write, outcome) in outcomes.items():
            if isinstance(outcome, EpochLost):
                self._runner.step(Fenced("another controller has a higher epoch"))
                return
            if not self._is_pending(write):
                continue
            if isinstance(outcome, Written):
                written[tp] = outcome.version
            elif outcome is None:
                lost.append(write)
            elif isinstance(outcome, NodeGone):
                gone[tp] = None
            else:
                assert isinstance(outcome, FateUnknown)
                unknown.append(tp)
        if written:
            self._runner.step(StatesWritten(written))
        if gone:
            self._runner.step(StatesRefused(gone))
        if unknown:
            self._runner.step(StatesUnknown(tuple(unknown)))
        if lost:
            self._runner.start(self._read_refused(lost), "read refused states")

    async def _read_refused(self, writes: Sequence[StateWrite]) -> None:
        found: dict[TopicPartition, VersionedState | None] = {}
        with suppress(ZkUnreachable):
            found = await self._store.levels.states([write.tp for write in writes])
        tps = [write.tp for write in writes if self._is_pending(write)]
        read = {tp: found[tp] for tp in tps if tp in found}
        if read:
            self._runner.step(StatesRefused(read))
        unread = tuple(tp for tp in tps if tp not in found)
        if unread:
            self._runner.step(StatesUnknown(unread))

    # --- reads -----------------------------------------------------------------------------------------------------

    async def read(self, tps: Sequence[TopicPartition]) -> None:
        """Read states that the ``Controller`` requested with ReadStates, and pass them to it.

        If the connection is lost, pass StatesUnknown.
        """
        try:
            await self._store.session.connected()
            await self.read_changed(tps)
        except ZkUnreachable:
            self._runner.step(StatesUnknown(tuple(tps)))

    async def read_changed(self, tps: Sequence[TopicPartition]) -> None:
        """Read states and pass them to the ``Controller``. Later read the unreadable states again.

        Until a state can be read, the ``Controller`` decides nothing about its partition.

        Raises:
            ZkUnreachable: the connection was lost.
        """
        found = await self._store.levels.states(tps)
        if found:
            self._runner.step(StatesRead(found))
        self._read_later([tp for tp in tps if tp not in found])

    def _read_later(self, unread: Sequence[TopicPartition]) -> None:
        if unread and not self._unread:
            self._runner.start(self._read_unread(), "read states that could not be read")
        self._unread.update(dict.fromkeys(unread))
        self._runner.report_change()

    async def _read_unread(self) -> None:
        for pause_s in growing_pauses():
            await asyncio.sleep(pause_s)
            found: dict[TopicPartition, VersionedState | None] = {}
            with suppress(ZkUnreachable):
                await self._store.session.connected()
                found = await self._store.levels.states(tuple(self._unread))
            for tp in found:
                del self._unread[tp]
            if found:
                self._runner.step(StatesRead(found))
            if not self._unread:
                return
