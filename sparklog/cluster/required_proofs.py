"""The node in ZooKeeper that requires every broker to prove that it knows the cluster's secret.

Running brokers of release 0.1.0 take part without a proof. When all live brokers, and all absent brokers that have
replicas, have registered with a proof, the controller creates the node. No process deletes the node. From then on the
controller ignores registrations without a proof: a broker without a proof leads no partition, and other brokers do not
receive its address.

In a cluster whose brokers have TLS certificates, the node has no meaning. The controller ignores every broker that does
not have the listener for brokers, because only certificates count there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable

from sparklog.model import BrokerRegistration
from sparklog.security.listeners import InterBroker
from sparklog.zk import codecs, paths
from sparklog.zk.errors import ZkNodeExists, ZkNoNode
from sparklog.zk.session import ZkSession

log = logging.getLogger(__name__)

_NO_PROOF = "does not prove the cluster's secret"


class RequiredProofs:
    """The filter of broker registrations for one controller term: it may require proofs that brokers know the secret.

    ``settle`` creates the node in ZooKeeper that requires these proofs. If ``enabled`` is false, this controller knows
    no secret and does not require proofs. ``inter_broker`` is the listener through which the controller connects to
    brokers.
    """

    def __init__(self, session: ZkSession, *, enabled: bool, inter_broker: InterBroker | None = None) -> None:
        self._session = session
        self._certified = inter_broker is not None and inter_broker.has_certificates
        self._enabled = enabled and not self._certified
        self._inter_broker = InterBroker() if inter_broker is None else inter_broker
        self._refused: set[tuple[int, int]] = set()
        self._awaited: frozenset[int] = frozenset()
        #: Whether every broker must prove that it knows the secret.
        self.required = self._certified

    async def load(self) -> None:
        """Read from ZooKeeper whether every broker must prove that it knows the cluster's secret.

        Raises:
            ZkError: ZooKeeper is not available or refused the request.
        """
        if self._enabled:
            self.required = await self._session.exists(paths.PROOF_REQUIRED)

    def admitted(self, brokers: Iterable[BrokerRegistration]) -> tuple[BrokerRegistration, ...]:
        """Return the registrations that the controller accepts, and log the registrations that it ignores."""
        if not self.required:
            return tuple(brokers)
        counted = []
        for broker in brokers:
            if broker.proves and self._is_reachable(broker):
                counted.append(broker)
            elif (broker.broker_id, broker.incarnation) not in self._refused:
                self._refused.add((broker.broker_id, broker.incarnation))
                reason = f"has no listener {self._inter_broker.name} with TLS" if self._certified else _NO_PROOF
                log.error(
                    "broker %d at %s:%d, incarnation %d, %s and is excluded: start it again with a driver of this"
                    " release and its settings",
                    broker.broker_id,
                    broker.host,
                    broker.port,
                    broker.incarnation,
                    reason,
                )
        return tuple(counted)

    def _is_reachable(self, broker: BrokerRegistration) -> bool:
        name, protocol = self._inter_broker.name, self._inter_broker.protocol.value
        return not self._certified or any(
            (found.name, found.protocol) == (name, protocol) for found in broker.endpoints
        )

    async def settle(
        self, live: Collection[BrokerRegistration], *, retired: Collection[int], hosting: Callable[[], set[int]]
    ) -> None:
        """Require brokers to prove that they know the cluster's secret, if all brokers can prove it.

        Store the requirement in ZooKeeper. Do nothing if a live broker cannot prove it, or if an absent broker with
        replicas could not prove it at its last registration. Ignore the ``retired`` brokers, whose processes have
        certainly ended. ``hosting`` returns the brokers that have replicas.

        Raises:
            ZkError: ZooKeeper is not available or refused the request.
        """
        if not self._enabled or self.required or not live:
            return
        awaited = {broker.broker_id for broker in live if not broker.proves}
        known = {broker.broker_id for broker in live} | set(retired)
        awaited |= await self._absent_without_proof(hosting() - known)
        if awaited:
            if frozenset(awaited) != self._awaited:
                self._awaited = frozenset(awaited)
                log.warning("brokers %s have not yet registered with a proof of the cluster's secret", sorted(awaited))
            return
        with contextlib.suppress(ZkNodeExists):
            await self._session.create(paths.PROOF_REQUIRED)
        self.required = True
        log.info("every broker proves the cluster's secret: from now on the proof is required")

    async def _absent_without_proof(self, brokers: Collection[int]) -> set[int]:
        found = await asyncio.gather(*map(self._last_registration, brokers))
        return {broker_id for broker_id, last in zip(brokers, found, strict=True) if last is None or not last.proves}

    async def _last_registration(self, broker_id: int) -> BrokerRegistration | None:
        """Return a broker's last registration, or None if there is none or it is unreadable."""
        path = paths.incarnation(broker_id)
        try:
            node = await self._session.get(path)
            return codecs.decode_broker(path, node.data, broker_id) if node.data else None
        except (ZkNoNode, codecs.ZkFormatError):
            return None
