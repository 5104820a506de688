"""Checks that a request of a broker or of the controller really comes from that broker or controller.

The sender proves on its connection that it is a certain broker or the controller (``protocol.proof``). Then the
connection may send requests of this sender, and of no other sender. Brokers of release 0.1.0 cannot prove their
identity. While the controller's list of brokers contains a broker of release 0.1.0, this broker accepts requests of
brokers without a proof. A follower's fetch without a proof must have the id of a broker of release 0.1.0. A request
without a proof must not name a newer incarnation or coordinator epoch than the controller has announced. Control
updates always need a proof.

In a cluster whose brokers have TLS certificates, the certificate is the only proof, and a broker of release 0.1.0 is
not accepted.

A broker that an operator started without a secret and without a certificate accepts every request, and logs a warning
at its start.
"""

from __future__ import annotations

from collections import Counter

from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.security.authorizer import DenialLog
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.greeting import Credentials
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.senders import SenderKind
from sparklog.security.acls import CLUSTER_NAME, Operation, ResourceType


class Access:
    """The component that checks which connection may send which request to one broker.

    It reports refusals to ``denials``. Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self, credentials: Credentials, cache: MetadataCache, counters: Counter[str], denials: DenialLog
    ) -> None:
        self._denials = denials
        self._credentials = credentials
        self._cache = cache
        self._counters = counters

    def require(self, connection: ServerConnection, sender: SenderKind, what: str) -> None:
        """Check that ``connection`` has proved that it belongs to this kind of sender, unless no proof is required.

        ``what`` names the request in the error.

        Raises:
            BrokerError: CLUSTER_AUTHORIZATION_FAILED.
        """
        if not self._credentials.required or self._proves(connection, sender):
            return
        if sender is SenderKind.BROKER and self._unproven:
            self._counters["requests.unproven"] += 1
            return
        raise self._refusal(connection, sender, what)

    def require_controller(self, connection: ServerConnection, controller_epoch: int) -> None:
        """Check that ``connection`` belongs to the controller with this epoch.

        Raises:
            BrokerError: CLUSTER_AUTHORIZATION_FAILED.
        """
        if not self._credentials.required:
            return
        self.require(connection, SenderKind.CONTROLLER, "a control update")
        identity = connection.identity
        if identity is None or identity.incarnation != controller_epoch:
            proved = identity.incarnation if identity is not None else None
            raise self._refused(
                connection,
                f"a control update of controller epoch {controller_epoch}",
                f"its connection has proved epoch {proved}",
            )

    def require_follower(self, connection: ServerConnection, broker_id: int) -> None:
        """Check that ``connection`` may fetch as the follower ``broker_id``.

        Raises:
            BrokerError: CLUSTER_AUTHORIZATION_FAILED.
        """
        if self.proves_broker(connection, broker_id):
            return
        if broker_id in self._unproven and connection.identity is None:
            self._counters["requests.unproven"] += 1
            return
        raise self._refusal(connection, SenderKind.BROKER, f"a fetch of follower {broker_id}")

    def proves_broker(self, connection: ServerConnection, broker_id: int | None = None) -> bool:
        """Return whether ``connection`` has proved that it belongs to broker ``broker_id``; None means any broker.

        If this broker has neither a cluster secret nor certificates, every connection counts as proved.
        """
        if not self._credentials.required:
            return True
        identity = connection.identity
        return (
            identity is not None
            and identity.role is SenderKind.BROKER
            and (broker_id is None or identity.number == broker_id)
        )

    @property
    def _unproven(self) -> frozenset[int]:
        """Return the brokers whose requests need no proof."""
        return self._cache.unproven if self._credentials.certificates is None else frozenset()

    def _proves(self, connection: ServerConnection, sender: SenderKind) -> bool:
        identity = connection.identity
        return identity is not None and identity.role is sender

    def _refusal(self, connection: ServerConnection, sender: SenderKind, what: str) -> BrokerError:
        identity = connection.identity
        found = "no proof" if identity is None else f"a proof of {identity.role.value} {identity.number}"
        return self._refused(
            connection,
            what,
            f"it requires a connection that is proved to be of a {sender.value} of this cluster; found {found}",
        )

    def _refused(self, connection: ServerConnection, what: str, reason: str) -> BrokerError:
        """Count and report a refused request, and return its error."""
        self._counters["requests.unauthorized"] += 1
        resource = f"{ResourceType.CLUSTER}:{CLUSTER_NAME}"
        self._denials.denied(connection, what, Operation.CLUSTER_ACTION.value, resource, reason)
        return BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, f"{what}: {reason}")
