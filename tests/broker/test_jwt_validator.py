"""Tests of the tokens of OAUTHBEARER: only tokens of the issuer's keys, for this audience, in their time, are valid."""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from sparklog.broker.security.jwt_validator import JwtRules, JwtValidator, jwt_rules
from sparklog.broker.security.logins import token_validator
from sparklog.config import broker_config
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import USER, Principal

ISSUER, AUDIENCE = "https://issuer.example.com", "sparklog"
NAMES = ("RS256", "ES256", "EdDSA")
SIGNERS: dict[str, Any] = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}
OTHERS: dict[str, Any] = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}


def jwk(algorithm: str, key: Any, key_id: str | None, **more: str) -> dict[str, Any]:
    kind = jwt.get_algorithm_by_name(algorithm)
    found = json.loads(kind.to_jwk(key.public_key()))
    return {**found, **({"kid": key_id} if key_id is not None else {}), **more}


def write_keys(path: Path, *keys: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": keys}))
    return path


def claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    found = {"iss": ISSUER, "aud": AUDIENCE, "sub": "anna", "exp": now + 600, "iat": now, **changes}
    return {name: value for name, value in found.items() if value is not None}


def token(algorithm: str = "RS256", key: Any = None, *, key_id: str | None = None, **changes: Any) -> str:
    headers = {"kid": key_id or algorithm}
    return jwt.encode(claims(**changes), key or SIGNERS[algorithm], algorithm=algorithm, headers=headers)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "jwks.json", *(jwk(name, SIGNERS[name], name) for name in NAMES))


@pytest.fixture
def validator(keys: Path) -> JwtValidator:
    return JwtValidator(JwtRules(keys, ISSUER, (AUDIENCE, "other")))


def refused(validator: JwtValidator, text: str) -> str:
    with pytest.raises(BrokerError) as error:
        validator.validate(text)
    assert error.value.code is ErrorCode.SASL_AUTHENTICATION_FAILED
    assert not text or text not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("algorithm", NAMES)
def test_a_signed_token_gives_its_principal_and_expiry(validator: JwtValidator, algorithm: str) -> None:
    expires = int(time.time()) + 600
    valid = validator.validate(token(algorithm, exp=expires))
    assert valid.principal == Principal(USER, "anna")
    assert valid.expires_at_ms == (expires + 30) * 1000, "with the skew of the clocks"
    assert validator.validate(token(algorithm, aud=["x", "other"])).principal == Principal(USER, "anna")


@pytest.mark.parametrize("algorithm", NAMES)
def test_a_forged_signature_is_refused(validator: JwtValidator, algorithm: str) -> None:
    refused(validator, token(algorithm, OTHERS[algorithm]))
    head, _, signature = token(algorithm).split(".")
    body = token(algorithm, sub="admin").split(".")[1]
    refused(validator, f"{head}.{body}.{signature}")


def _encoded(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize("name", ["none", "None", "NONE", "nOnE", ""])
def test_a_token_without_a_signature_is_refused(validator: JwtValidator, name: str) -> None:
    for key_id in NAMES:
        refused(validator, f"{_encoded({'alg': name, 'kid': key_id})}.{_encoded(claims())}.")


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("name", ["HS256", "HS512"])
def test_an_hmac_with_the_public_key_is_refused(validator: JwtValidator, algorithm: str, name: str) -> None:
    public = SIGNERS[algorithm].public_key()
    for encoding, form in (
        (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
        (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo),
    ):
        secret = public.public_bytes(encoding, form)
        signed = f"{_encoded({'alg': name, 'kid': algorithm})}.{_encoded(claims())}"
        made = hmac.digest(secret, signed.encode(), "sha256" if name == "HS256" else "sha512")
        refused(validator, f"{signed}.{base64.urlsafe_b64encode(made).rstrip(b'=').decode()}")


def test_an_algorithm_of_another_key_type_is_refused(validator: JwtValidator) -> None:
    refused(validator, token("ES256", key_id="RS256"))
    refused(validator, jwt.encode(claims(), SIGNERS["RS256"], algorithm="RS512", headers={"kid": "RS256"}))
    refused(validator, jwt.encode(claims(), SIGNERS["RS256"], algorithm="PS256", headers={"kid": "RS256"}))


@pytest.mark.parametrize("header", [{"kid": "unknown"}, {}, {"kid": None}])
def test_a_token_of_an_unknown_key_is_refused(validator: JwtValidator, header: dict[str, Any]) -> None:
    headers = {name: value for name, value in header.items() if value}
    refused(validator, jwt.encode(claims(), SIGNERS["RS256"], algorithm="RS256", headers=headers))


def test_a_token_may_omit_the_key_id_of_the_only_key(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "jwks.json", jwk("ES256", SIGNERS["ES256"], None))
    validator = JwtValidator(JwtRules(path, ISSUER, (AUDIENCE,)))
    assert validator.validate(jwt.encode(claims(), SIGNERS["ES256"], algorithm="ES256"))
    refused(validator, jwt.encode(claims(), OTHERS["ES256"], algorithm="ES256"))


@pytest.mark.parametrize(
    "changes",
    [
        {"iss": "https://another.example.com"},
        {"iss": None},
        {"aud": "another"},
        {"aud": []},
        {"aud": None},
        {"exp": None},
        {"exp": "tomorrow"},
        {"exp": -1},
        {"exp": 10**400},
        {"sub": None},
        {"sub": ""},
        {"sub": "x" * 256},
        {"sub": "an\x01na"},
    ],
    ids=str,
)
def test_a_wrong_claim_is_refused(validator: JwtValidator, changes: dict[str, Any]) -> None:
    refused(validator, token(**changes))


def test_times_count_with_the_skew_of_the_clocks(validator: JwtValidator) -> None:
    now = int(time.time())
    assert validator.validate(token(exp=now - 20))
    assert "ExpiredSignature" in refused(validator, token(exp=now - 40))
    assert validator.validate(token(nbf=now + 15))
    refused(validator, token(nbf=now + 120))


def test_another_claim_may_have_the_name(keys: Path) -> None:
    validator = JwtValidator(JwtRules(keys, ISSUER, (AUDIENCE,), claim="client_id"))
    assert validator.validate(token(client_id="loader")).principal == Principal(USER, "loader")
    refused(validator, token())
    refused(validator, token(client_id=["loader"]))


@pytest.mark.parametrize("text", ["", ".", "..", "a.b.c", "e30.e30.e30", "x" * 31_000, "\u00e4.b.c"])
def test_any_text_is_refused(validator: JwtValidator, text: str) -> None:
    refused(validator, text)


def test_rotated_keys_are_read_again(keys: Path) -> None:
    clock = Clock()
    validator = JwtValidator(JwtRules(keys, ISSUER, (AUDIENCE,)), monotonic_s=clock)
    old, new = token("ES256"), token("ES256", OTHERS["ES256"], key_id="second")
    refused(validator, new)
    write_keys(keys, jwk("ES256", SIGNERS["ES256"], "ES256"), jwk("ES256", OTHERS["ES256"], "second"))
    clock.now_s += 2
    assert validator.validate(old) and validator.validate(new)
    write_keys(keys, jwk("ES256", OTHERS["ES256"], "second"))
    clock.now_s += 2
    assert validator.validate(new)
    refused(validator, old)
    keys.write_text("half a fi")
    clock.now_s += 2
    assert validator.validate(new), "the last keys stay valid"
    keys.unlink()
    clock.now_s += 2
    assert validator.validate(new)


UNUSABLE: list[Callable[[], dict[str, Any]]] = [
    lambda: jwk("RS256", rsa.generate_private_key(65537, 1024), "k"),
    lambda: jwk("RS256", SIGNERS["RS256"], "k", use="enc"),
    lambda: jwk("RS256", SIGNERS["RS256"], "k", alg="RS512"),
    lambda: {"kty": "oct", "k": "c2VjcmV0", "kid": "k"},
    lambda: {"kty": "RSA", "kid": "k"},
    lambda: jwk("ES256", SIGNERS["ES256"], "k", crv="P-521"),
]


@pytest.mark.parametrize("entry", UNUSABLE)
def test_a_file_without_a_usable_key_is_refused(tmp_path: Path, entry: Callable[[], dict[str, Any]]) -> None:
    path = write_keys(tmp_path / "jwks.json", entry())
    with pytest.raises(ConfigError, match="no key"):
        JwtValidator(JwtRules(path, ISSUER, (AUDIENCE,)))
    with_another = write_keys(path, entry(), jwk("ES256", SIGNERS["ES256"], "good"))
    assert JwtValidator(JwtRules(with_another, ISSUER, (AUDIENCE,))).validate(token("ES256", key_id="good"))


@pytest.mark.parametrize("content", ["", "[]", '{"keys": 1}', "[" * 100_000])
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"jwks\.json"):
        JwtValidator(JwtRules(path, ISSUER, (AUDIENCE,)))


SETTINGS = {
    "sasl.enabled.mechanisms": "OAUTHBEARER",
    "sasl.oauthbearer.jwks.endpoint.url": "file:///nowhere/my%20keys.json",
    "sasl.oauthbearer.expected.issuer": ISSUER,
    "sasl.oauthbearer.expected.audience": "sparklog, other",
    "sasl.oauthbearer.clock.skew.seconds": "5",
    "sasl.oauthbearer.sub.claim.name": "name",
}


def test_the_rules_are_those_of_the_settings() -> None:
    expected = JwtRules(Path("/nowhere/my keys.json"), ISSUER, ("sparklog", "other"), 5, "name")
    assert jwt_rules(broker_config(SETTINGS)) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sasl.oauthbearer.jwks.endpoint.url", ""),
        ("sasl.oauthbearer.jwks.endpoint.url", "https://issuer.example.com/jwks"),
        ("sasl.oauthbearer.jwks.endpoint.url", "/etc/jwks.json"),
        ("sasl.oauthbearer.expected.issuer", ""),
        ("sasl.oauthbearer.expected.audience", ""),
        ("sasl.oauthbearer.expected.audience", ","),
    ],
)
def test_a_missing_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        token_validator(broker_config({**SETTINGS, name: value}))


def test_without_the_mechanism_no_file_is_read() -> None:
    assert token_validator(broker_config({})) is None
    with pytest.raises(ConfigError, match="my keys"):
        token_validator(broker_config(SETTINGS))
