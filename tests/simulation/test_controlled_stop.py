"""Tests of a controlled shutdown of the leader, with both production cores: producers hardly notice it, and no write
waits for the ended broker."""

from __future__ import annotations

import pytest

from sparklog.model import LeaderAndIsr, TopicPartition
from sparklog.replica.replica import ReplicaSettings
from sparklog.testing.sim_cluster import SimCluster
from sparklog.testing.sim_network import FINE, ZK

TP = TopicPartition("t", 0)
STOP_MS = 1000
END_MS = 3000
LOOK_MS = 5
#: No timer helps: every broker that leaves announces it.
PATIENT = ReplicaSettings(lag_time_max_ms=60_000, connection_grace_ms=60_000, isr_retry_ms=60_000)


class PlannedStop:
    """A controlled stop of the leader.

    The process ends when it leads nothing or, with ``stays``, at the end of the run.
    """

    def __init__(self, seed: int, *, stays: bool) -> None:
        self.cluster = SimCluster(seed, weather=FINE, accidents=False, page_cache_loss=0.0)
        self.cluster.settings = PATIENT
        self.cluster.append_failure = 0.0
        self.stays = stays
        self.victim = -1
        self.relieved_ms = -1
        self.out_of_isr_ms = -1
        self.back_in_isr = False
        self.longest_silence_ms = 0
        self._acked = 0
        self._acked_ms = 0
        self.cluster.world.at(STOP_MS, self._stop)
        self.cluster.world.at(STOP_MS - 200, self._look)
        self.cluster.world.at(END_MS - 50, self._end)

    def _state(self) -> LeaderAndIsr:
        node = self.cluster.zk.read(TP)
        assert node is not None
        return node.state

    def _stop(self) -> None:
        self.victim = self._state().leader
        broker = self.cluster.brokers[self.victim]
        if self.stays:
            broker.ask_to_stop()
        else:
            broker.stop_in_order(lambda: None)

    def _look(self) -> None:
        now_ms, state = self.cluster.world.now_ms, self._state()
        if now_ms > END_MS:
            return
        acked = len(self.cluster.checkers[TP].acked)
        if acked > self._acked or not self._acked_ms:
            self._acked, self._acked_ms = acked, now_ms
        self.longest_silence_ms = max(self.longest_silence_ms, now_ms - self._acked_ms)
        if self.victim != -1:
            self._follow(now_ms, leader=state.leader, isr=state.isr)
        self.cluster.world.at(LOOK_MS, self._look)

    def _follow(self, now_ms: int, *, leader: int, isr: tuple[int, ...]) -> None:
        if self.relieved_ms == -1 and leader != self.victim:
            self.relieved_ms = now_ms
        if self.out_of_isr_ms == -1 and self.victim not in isr:
            self.out_of_isr_ms = now_ms
        elif self.out_of_isr_ms != -1 and self.victim in isr:
            self.back_in_isr = True

    def _end(self) -> None:
        """End the process and its session."""
        broker = self.cluster.brokers[self.victim]
        if broker.alive:
            assert broker.session is not None
            broker.session.close()
            broker.crash(lose_page_cache=False)


@pytest.mark.parametrize("stays", [False, True], ids=["gone as soon as it is relieved", "still fetching"])
def test_a_planned_stop_leaves_the_isr_without_a_stall(stays: bool) -> None:
    for seed in range(6):
        stop = PlannedStop(seed, stays=stays)
        stop.cluster.run(fault_ms=END_MS)
        assert stop.relieved_ms - STOP_MS < 150, f"seed {seed}: relieved at {stop.relieved_ms}"
        assert stop.out_of_isr_ms - STOP_MS < 200, f"seed {seed}: out of the ISR at {stop.out_of_isr_ms}"
        assert not stop.back_in_isr, f"seed {seed}: a stopping broker rejoined the ISR"
        assert stop.longest_silence_ms < 400, f"seed {seed}: no acknowledgement for {stop.longest_silence_ms} ms"


def test_a_withdrawn_stop_survives_a_lost_request() -> None:
    """After a pause all requests to a broker are performed at once."""
    cluster = SimCluster(0, weather=FINE, accidents=False, page_cache_loss=0.0)
    broker, cut = cluster.brokers[1], {(1, ZK)}

    def at_once() -> None:
        for act in (broker.ask_to_stop, broker.withdraw_stop, broker.ask_to_stop):
            act()
        cluster.world.cut |= cut
        broker.withdraw_stop()

    cluster.world.at(STOP_MS, lambda: broker.run(broker.process, at_once))
    cluster.world.at(STOP_MS + 100, lambda: cluster.world.cut.difference_update(cut))
    cluster.run(fault_ms=END_MS)
    assert cluster.zk.stopping == {}
    assert not broker.stopping
