"""Tests of the simulated clients: they must keep the rules of the real producer."""

from __future__ import annotations

from sparklog.errors import ErrorCode
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_cluster import SimCluster
from sparklog.testing.sim_hosted import SimProduce
from sparklog.testing.sim_network import FINE

#: The mean pause of the producer in milliseconds. It could write twenty batches before a retry.
PRODUCE_MS = 5
#: One of this number of writes gets a wrong response.
ONE_OF = 8


class ForgetfulLeader(SimBroker):
    """A leader that commits a write, and responds as a leader that has lost its epoch."""

    def _tell(self, produce: SimProduce, code: ErrorCode) -> None:
        chosen = produce.sequence.first_sequence % ONE_OF == 0 and f"denied {produce.body}" not in self.world.happened
        if chosen and code == ErrorCode.NONE:
            self.world.happened[f"denied {produce.body}"] += 1
            code = ErrorCode.NOT_LEADER_OR_FOLLOWER
        super()._tell(produce, code)


def test_a_write_is_retried_while_its_broker_remembers_it() -> None:
    """After more than four later batches, the log refuses the retry, and the producer gives the write up."""
    cluster = SimCluster(0, broker_type=ForgetfulLeader, weather=FINE, accidents=False, produce_ms=PRODUCE_MS)
    cluster.append_failure = 0.0
    cluster.run(fault_ms=2000)
    happened = cluster.world.happened
    assert happened["duplicate recognised"] > ONE_OF
    assert happened["write given up"] == 0
