"""The roles that TLS certificates give to brokers and controllers of one cluster.

This module is pure.

A certificate has the role as a URI in its subject alternative names: ``sparklog:<cluster id>/broker`` or
``sparklog:<cluster id>/controller``. Some authorities cannot issue such names. The setting ``inter.broker.principals``
then lists the principals of the certificates, and each of these certificates gives both roles. A certificate contains
no broker id, so a broker's certificate is valid for every broker id.
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
    """Return the URI for a role. A certificate with this role has the URI in its subject alternative names."""
    return f"sparklog:{cluster_id}/{role}"


class PeerCertificates:
    """The rules by which certificates of brokers and controllers give roles in one cluster.

    A certificate with one of the ``principals`` gives every role. ``principal_of`` returns the principal of a
    certificate, or None if the certificate has none.
    """

    def __init__(
        self, cluster_id: str, principals: frozenset[Principal], principal_of: Callable[[Certificate], Principal | None]
    ) -> None:
        self._roles = {role_uri(cluster_id, role.value): role for role in _ROLES}
        self._principals = principals
        self._principal_of = principal_of

    def roles(self, certificate: Certificate | None) -> frozenset[SenderKind]:
        """Return the roles that this verified certificate gives; none if the peer has no certificate."""
        if not certificate:
            return _NO_ROLE
        if self._principals and self._principal_of(certificate) in self._principals:
            return frozenset(_ROLES)
        names = certificate.get("subjectAltName", ())
        return frozenset(self._roles[name] for kind, name in names if kind == "URI" and name in self._roles)
