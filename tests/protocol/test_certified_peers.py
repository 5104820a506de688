"""Tests of the hello in a cluster whose brokers have TLS certificates."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.greeting import Credentials, Greeting
from sparklog.protocol.connection import ImmediateAnswer, ServerEnd, hello
from sparklog.protocol.frames import encode_frame
from sparklog.protocol.messages import ErrorReply, Hello, HelloReply, encode_message
from sparklog.protocol.proof import SECRET_BYTES, Identity, KeyRing, Secret
from sparklog.protocol.senders import SenderKind
from sparklog.security.peer_certificates import PeerCertificates, role_uri
from sparklog.security.principals import ANONYMOUS

KEYS = KeyRing((Secret(b"s" * SECRET_BYTES),))
REPLY = HelloReply(1, 1, 3, 7, "c", 1000)


def certificate(*roles: SenderKind) -> Mapping[str, object]:
    return {"subjectAltName": tuple(("URI", role_uri("c", role.value)) for role in roles)}


def credentials(role: SenderKind, number: int = 2) -> Credentials:
    return Credentials(KEYS, lambda: Identity(role, number, 5), PeerCertificates("c", frozenset(), lambda _: ANONYMOUS))


def greeted(said: Hello, presented: Mapping[str, object] | None) -> tuple[ServerEnd, HelloReply | ErrorReply]:
    """Return the broker's end of the connection after the hello, and its reply."""
    own = credentials(SenderKind.BROKER, 3)
    end = ServerEnd(lambda cid, version: REPLY, 1000, own)
    end.roles = own.roles(presented)
    data = b"".join(encode_frame(encode_message(said), ()))
    end.get_buffer()[: len(data)] = data
    (event,) = end.buffer_updated(len(data))
    assert isinstance(event, ImmediateAnswer) and isinstance(event.reply, (HelloReply, ErrorReply))
    assert event.close is isinstance(event.reply, ErrorReply)
    return end, event.reply


@pytest.mark.parametrize("role", [SenderKind.BROKER, SenderKind.CONTROLLER])
def test_a_certificate_permits_the_identity_of_its_role(role: SenderKind) -> None:
    end, reply = greeted(Greeting("peer", "c", credentials=credentials(role)).hello(), certificate(role))
    assert end.identity == Identity(role, 2, 5)
    assert isinstance(reply, HelloReply) and not reply.proof, "the secret has no part in it"


@pytest.mark.parametrize("presented", [None, certificate(), certificate(SenderKind.CONTROLLER)])
def test_a_claim_without_the_certificate_is_refused(presented: Mapping[str, object] | None) -> None:
    said = Greeting("peer", "c", credentials=credentials(SenderKind.BROKER)).hello()
    end, reply = greeted(said, presented)
    assert isinstance(reply, ErrorReply) and reply.code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert end.identity is None


def test_the_secret_alone_proves_nothing() -> None:
    with_secret = Credentials(KEYS, lambda: Identity(SenderKind.BROKER, 2, 5))
    end, reply = greeted(Greeting("peer", "c", credentials=with_secret).hello(), None)
    assert isinstance(reply, ErrorReply) and reply.code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert end.identity is None and not end.may_prove


def test_a_client_claims_nothing_and_is_served() -> None:
    for presented in (None, certificate(SenderKind.BROKER)):
        end, reply = greeted(hello("client", "c"), presented)
        assert isinstance(reply, HelloReply) and end.admitted and end.identity is None


def test_the_broker_presents_the_certificate_of_a_broker() -> None:
    greeting = Greeting("peer", "c", credentials=credentials(SenderKind.CONTROLLER), broker_id=3)
    said = greeting.hello()
    assert greeting.prove(said, REPLY, certificate(SenderKind.BROKER)) is None
    for presented in (None, certificate(SenderKind.CONTROLLER)):
        with pytest.raises(BrokerError) as caught:
            greeting.prove(said, REPLY, presented)
        assert caught.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_another_broker_is_refused_despite_its_certificate() -> None:
    greeting = Greeting("peer", "c", credentials=credentials(SenderKind.CONTROLLER), broker_id=4)
    with pytest.raises(BrokerError) as caught:
        greeting.prove(greeting.hello(), REPLY, certificate(SenderKind.BROKER))
    assert caught.value.code is ErrorCode.BROKER_NOT_AVAILABLE
