"""The roles that TLS certificates give to brokers and controllers of one cluster.

Pure.

A certificate of the cluster's own authority names the role in a URI among its subject alternative names:
``sparklog:<cluster id>/broker`` or ``sparklog:<cluster id>/controller``. For certificates of an operator's authority,
which may not be able to issue such names, the setting ``inter.broker.principals`` lists their principals. Such a
certificate gives both roles. A certificate names no broker id, so each broker may act as every broker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparklog.protocol.senders import SenderKind
from sparklog.security.principals import Principal

#: The certificate of a peer, as ``ssl.SSLSocket.getpeercert`` returns it.
Certificate = Mapping[str, Any]

_ROLES = (SenderKind.BROKER, SenderKind.CONTROLLER)
_NO_ROLE: frozenset[SenderKind] = frozenset()


def role_uri(cluster_id: str, role: str) -> str:
    """Return the URI that a certificate of a broker or controller has among its subject alternative names."""
    return f"sparklog:{cluster_id}/{role}"


class PeerCertificates:
    """The rule by which a certificate of a peer gives roles in one cluster.

    ``principals`` are the principals of certificates that give every role, and ``principal_of`` returns the principal
    of a certificate, or None if it has none.
    """

    def __init__(
        self, cluster_id: str, principals: frozenset[Principal], principal_of: Callable[[Certificate], Principal | None]
    ) -> None:
        self._roles = {role_uri(cluster_id, role.value): role for role in _ROLES}
        self._principals = principals
        self._principal_of = principal_of

    def roles(self, certificate: Certificate | None) -> frozenset[SenderKind]:
        """Return the roles that this verified certificate gives; none if the peer has presented no certificate."""
        if not certificate:
            return _NO_ROLE
        if self._principals and self._principal_of(certificate) in self._principals:
            return frozenset(_ROLES)
        names = certificate.get("subjectAltName", ())
        return frozenset(self._roles[name] for kind, name in names if kind == "URI" and name in self._roles)
