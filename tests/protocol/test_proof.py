"""Tests of mutual authentication: a proof is valid only for what both sides have sent."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.connection import hello
from sparklog.protocol.messages import Hello, HelloReply, decode_request, encode_message
from sparklog.protocol.proof import Identity, IdentityClaim, KeyRing, Secret, answer, check, offer
from sparklog.protocol.senders import SenderKind

ONE, OTHER, THIRD = Secret(b"1" * 32), Secret(b"2" * 32), Secret(b"3" * 32)
BROKER = Identity(SenderKind.BROKER, 1, 5)
REPLY = HelloReply(1, 1, 7, 3, "cluster", 1024, "boot", "/local", "unix-name", ("127.0.0.1", 9092))


def offered(*secrets: Secret, identity: Identity = BROKER, nonce: bytes = b"c" * 32) -> Hello:
    return offer(hello("client", "cluster"), KeyRing(secrets), identity, nonce)


def answered(said: Hello, *secrets: Secret, nonce: bytes = b"s" * 32) -> tuple[HelloReply, IdentityClaim]:
    reply, claim = answer(said, REPLY, KeyRing(secrets), nonce)
    assert claim is not None
    return reply, claim


def checked(said: Hello, reply: HelloReply, *secrets: Secret) -> bytes:
    return check(said, reply, KeyRing(secrets), expected=7, required=True)


def test_both_sides_authenticate_with_a_shared_secret() -> None:
    said = offered(OTHER, ONE)
    reply, claim = answered(said, ONE, THIRD)
    assert reply.key_id == ONE.key_id
    assert checked(said, reply, OTHER, ONE) == claim.proof != reply.proof
    assert claim.identity == BROKER


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": b"x" * 32},
        {"role": "controller"},
        {"number": 2},
        {"incarnation": 6},
        {"client_id": "another"},
        {"cluster_id": "another"},
        {"max_version": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_proof_for_another_hello_is_wrong(change: dict[str, object]) -> None:
    said = offered(ONE)
    reply, claim = answered(said, ONE)
    other = msgspec.structs.replace(said, **change)
    with pytest.raises(BrokerError) as error:
        checked(other, reply, ONE)
    assert error.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert answered(other, ONE)[1].proof != claim.proof


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": b"x" * 32},
        {"nonce": b"short"},
        {"incarnation": 4},
        {"cluster_id": "another"},
        {"unix_socket": "another"},
        {"local_socket": "another"},
        {"reached_at": ("127.0.0.1", 1)},
        {"proof": b""},
        {"proof": b"x" * 32},
        {"key_id": OTHER.key_id},
        {"key_id": ""},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_broker_with_an_altered_response_is_refused(change: dict[str, object]) -> None:
    said = offered(ONE, OTHER)
    reply, _ = answered(said, ONE)
    with pytest.raises(BrokerError) as error:
        checked(said, msgspec.structs.replace(reply, **change), ONE, OTHER)
    assert error.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_an_unexpected_broker_gets_no_proof() -> None:
    said = offered(ONE)
    reply, _ = answered(said, ONE)
    with pytest.raises(BrokerError) as error:
        check(said, reply, KeyRing([ONE]), expected=8, required=True)
    assert error.value.code is ErrorCode.BROKER_NOT_AVAILABLE


def test_each_connection_has_its_own_proofs() -> None:
    said = offered(ONE)
    first, second = answered(said, ONE, nonce=b"a" * 32), answered(said, ONE, nonce=b"b" * 32)
    assert len({first[0].proof, first[1].proof, second[0].proof, second[1].proof}) == 4


@pytest.mark.parametrize("role", ["", "client", "operator"])
def test_only_brokers_and_controllers_prove_themselves(role: str) -> None:
    with pytest.raises(BrokerError):
        answered(msgspec.structs.replace(offered(ONE), role=role), ONE)


def test_a_broker_refuses_its_own_name() -> None:
    with pytest.raises(BrokerError):
        answered(offered(ONE, identity=Identity(SenderKind.BROKER, 7, 3)), ONE)


def test_without_a_common_secret_there_is_no_authentication() -> None:
    for said in (offered(ONE), offered(), hello("client")):
        assert answer(said, REPLY, KeyRing([OTHER]), b"s" * 32) == (REPLY, None)
    assert check(offered(ONE), REPLY, KeyRing([ONE]), expected=7, required=False) == b""


def test_a_release_0_1_0_hello_offers_no_proof() -> None:
    old = msgspec.msgpack.encode(["hello", 1, 1, 1, "client", "cluster"])
    found = decode_request(old)
    assert found == hello("client", "cluster").__class__(1, 1, 1, "client", "cluster")
    assert decode_request(encode_message(offered(ONE))) == offered(ONE)


# --- the secret ------------------------------------------------------------------------------------------------------


def test_a_secret_is_not_shown() -> None:
    for text in (repr(ONE), str(ONE), repr(KeyRing([ONE]).secrets), f"{[ONE]}"):
        assert ONE.hex() not in text and "1111" not in text
        assert ONE.key_id in text
    for wrong in ("password", "zz" * 32):
        with pytest.raises(ConfigError) as error:
            Secret.from_hex(wrong)
        assert wrong not in str(error.value)


def test_a_secret_survives_pickling_and_text() -> None:
    assert pickle.loads(pickle.dumps(ONE)) == ONE == Secret.from_hex(ONE.hex())
    assert ONE != OTHER and len({ONE.derive("hello"), ONE.derive("key id"), OTHER.derive("hello")}) == 3


def test_a_ring_knows_the_two_newest_secrets() -> None:
    keys = KeyRing([ONE])
    keys.add(OTHER)
    keys.add(OTHER)
    assert keys.secrets == (OTHER, ONE)
    keys.add(THIRD)
    assert keys.secrets == (THIRD, OTHER)
    assert keys.find([ONE.key_id]) is None and keys.find(["?", OTHER.key_id]) == OTHER
