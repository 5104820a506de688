"""Tests of the roles that certificates give."""

from __future__ import annotations

from typing import Any

import pytest

from sparklog.protocol.senders import SenderKind
from sparklog.security.peer_certificates import Certificate, PeerCertificates, role_uri
from sparklog.security.principals import Principal

BROKER, CONTROLLER = frozenset({SenderKind.BROKER}), frozenset({SenderKind.CONTROLLER})
OPS = Principal("User", "CN=ops")


def principal_of(certificate: Certificate) -> Principal:
    return Principal("User", f"CN={certificate['name']}")


def certificate(*names: tuple[str, str], name: str = "host") -> dict[str, Any]:
    return {"name": name, "subjectAltName": names}


PEERS = PeerCertificates("c1", frozenset({OPS}), principal_of)


@pytest.mark.parametrize(
    ("presented", "roles"),
    [
        (None, frozenset()),
        ({}, frozenset()),
        ({"name": "host"}, frozenset()),
        (certificate(("DNS", "host-1")), frozenset()),
        (certificate(("DNS", "host-1"), ("URI", "sparklog:c1/broker")), BROKER),
        (certificate(("URI", role_uri("c1", "controller"))), CONTROLLER),
        (certificate(("URI", "sparklog:c1/broker"), ("URI", "sparklog:c1/controller")), BROKER | CONTROLLER),
        (certificate(("URI", "sparklog:c2/broker")), frozenset()),
        (certificate(("URI", "sparklog:c1/client")), frozenset()),
        (certificate(("URI", "sparklog:c1/broker/")), frozenset()),
        (certificate(("DNS", "sparklog:c1/broker")), frozenset()),
        (certificate(name="ops"), BROKER | CONTROLLER),
    ],
)
def test_only_the_clusters_own_names_give_roles(presented: Certificate | None, roles: frozenset[SenderKind]) -> None:
    assert PEERS.roles(presented) == roles


def test_no_principal_gives_a_role_unless_it_is_listed() -> None:
    assert not PeerCertificates("c1", frozenset(), principal_of).roles(certificate(name="ops"))
