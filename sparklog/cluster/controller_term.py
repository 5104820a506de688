"""One controller term: it passes events to a ``Controller``, and performs the effects that the ``Controller`` returns.

The events come from ZooKeeper and brokers. The ``Controller`` is the *core* of the term.

This module makes no decisions. Everything runs on one event loop. The results of effects return to the core as events.
The term ends when the core resigns, the session expires, or ``/controller`` belongs to another controller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sparklog.cluster.broker_connections import BrokerConnections
from sparklog.cluster.core_runner import CoreRunner
from sparklog.cluster.effect_performer import EffectPerformer
from sparklog.cluster.partition_state_io import PartitionStateIo
from sparklog.cluster.required_proofs import RequiredProofs
from sparklog.cluster.topic_io import TopicIo
from sparklog.cluster.zookeeper_facts import ZookeeperFacts
from sparklog.controller.controller import Controller
from sparklog.controller.effects import Effect
from sparklog.controller.events import Disconnected, Reconnected
from sparklog.net.greeting import Credentials
from sparklog.net.peer_security import PeerSecurity
from sparklog.protocol.proof import Identity, KeyRing
from sparklog.protocol.senders import SenderKind
from sparklog.zk.controller_store import ControllerStore
from sparklog.zk.errors import ZkUnreachable
from sparklog.zk.session import SessionState


class ControllerTerm:
    """One term of the active controller. ``run`` returns when the term is over. A part of ``ControllerLoop``."""

    def __init__(
        self,
        store: ControllerStore,
        core: Controller,
        *,
        cluster_id: str,
        session_timeout_ms: int,
        on_change: Callable[[], None],
        keys: KeyRing | None = None,
        peers: PeerSecurity | None = None,
    ) -> None:
        peers = PeerSecurity() if peers is None else peers
        self.core = core
        self._session = store.session
        self._generation = store.session.generation
        self._connections = BrokerConnections(
            client_id=f"controller-{core.controller_epoch}",
            cluster_id=cluster_id,
            connect_timeout_s=max(1.0, session_timeout_ms / 1000),
            credentials=Credentials(
                KeyRing() if keys is None else keys,
                lambda: Identity(SenderKind.CONTROLLER, -1, core.controller_epoch),
                peers.certificates(cluster_id),
            ),
            listener=peers.listener.name,
            security=peers.client,
        )
        self.runner = CoreRunner(
            core, self._session, unreadable=store.unreadable, perform=self._perform, on_change=on_change
        )
        self.topics = TopicIo(self.runner, store)
        states = PartitionStateIo(self.runner, store)
        self.performer = EffectPerformer(
            self.runner, store, topics=self.topics, states=states, connections=self._connections
        )
        proofs = RequiredProofs(self._session, enabled=bool(keys), inter_broker=peers.listener)
        self.facts = ZookeeperFacts(self.runner, store, topics=self.topics, states=states, proofs=proofs)

    @property
    def failed(self) -> bool:
        """Return whether the term ended with an unexpected error."""
        return self.runner.failed

    @property
    def counters(self) -> Counter[str]:
        """Return the counters of this term by metric name."""
        return self.runner.counters

    async def run(self, *, cautious: bool) -> str:
        """Read the cluster's state, then handle its changes until the term is over. Return the reason for the end.

        ``cautious`` means that this process's own session had expired, so brokers that seem absent may be alive.

        Raises:
            ZkUnreachable: the connection to ZooKeeper was lost before the whole state was read.
            ZkError: a node that every cluster has is missing, or ZooKeeper refused a request.
        """
        unwatch: Callable[[], None] | None = None
        try:
            self.runner.advance(await self.facts.load(cautious=cautious))
            unwatch = self._session.add_listener(self._session_moved)
            if self._session.state is not SessionState.CONNECTED or self._session.generation != self._generation:
                raise ZkUnreachable("the connection to ZooKeeper was lost while reading the cluster's state")
            self.facts.follow()
            return await self.runner.over
        finally:
            if unwatch is not None:
                unwatch()
            await self.close()

    async def close(self) -> None:
        """End the watches, the tasks and the connections to brokers."""
        self.facts.close()
        await self.runner.close()
        await self._connections.close()

    def _perform(self, effect: Effect) -> None:
        self.performer.perform(effect)

    def _session_moved(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED and self._session.generation == self._generation:
            self.runner.step(Reconnected())
        elif state is SessionState.DISCONNECTED:
            self.runner.step(Disconnected())
        elif state is not SessionState.CONNECTING:
            self.runner.finish(f"the ZooKeeper session is {state.value}")
