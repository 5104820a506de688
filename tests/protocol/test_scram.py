"""Tests of SCRAM: the vectors of the RFCs, the library scramp as the other side, and hostile bytes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import pickle
import re
from typing import Any

import pytest
import scramp
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import USER, Principal
from sparklog.protocol.sasl import SCRAM_SHA_256, SCRAM_SHA_512
from sparklog.protocol.saslprep import saslprep
from sparklog.protocol.scram import (
    DEFAULT_ITERATIONS,
    MAX_ITERATIONS,
    MAX_SALT_BYTES,
    MIN_ITERATIONS,
    MIN_SALT_BYTES,
    SALT_BYTES,
    TOKEN_FORM,
    CredentialForm,
    SaltedPasswords,
    ScramClient,
    ScramCredential,
    ScramServer,
    TokenCredential,
    check_credential,
    dummy_credential,
    salted_password,
)

DUMMY = b"d" * 32
SALT = b"salt of this user"
MECHANISMS = (SCRAM_SHA_256, SCRAM_SHA_512)
CLIENT_NONCE, SERVER_NONCE = "client-nonce-0123456789", "server-nonce-0123456789"
CREDENTIALS = {
    (mechanism, name): ScramCredential.derive(mechanism, password, SALT, 4096)
    for mechanism in MECHANISMS
    for name, password in (("anna", "pencil"), ("a=b,c", "p=,€"), ("IX", "ok"))
}


def server(mechanism: str = SCRAM_SHA_256, **options: Any) -> ScramServer:
    return ScramServer(mechanism, lambda name: CREDENTIALS.get((mechanism, name)), SERVER_NONCE, DUMMY, **options)


def client(
    username: str = "anna", password: str = "pencil", mechanism: str = SCRAM_SHA_256, **options: Any
) -> ScramClient:
    return ScramClient(mechanism, username, password, CLIENT_NONCE, **options)


def run(one: ScramClient, other: ScramServer) -> Principal | None:
    """Run a whole login and return the principal on the server."""
    challenge = other.step(one.first())
    assert challenge.principal is None
    final = other.step(one.step(challenge.data))
    assert not one.complete
    assert one.step(final.data) == b""
    assert one.complete
    return final.principal


def refused(call: Any, *arguments: Any) -> BrokerError:
    with pytest.raises(BrokerError) as error:
        call(*arguments)
    assert error.value.code is ErrorCode.SASL_AUTHENTICATION_FAILED
    return error.value


# --- vectors ----------------------------------------------------------------------------------------------------------

#: Source: RFC 7677, section 3.
VECTOR = (
    b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
    b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
    b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
)


def test_the_vector_of_rfc_7677_for_the_client() -> None:
    one = ScramClient(SCRAM_SHA_256, "user", "pencil", "rOprNGfwEbeRWgbNEkqO")
    assert one.first() == VECTOR[0]
    assert one.step(VECTOR[1]) == VECTOR[2]
    assert one.step(VECTOR[3]) == b"" and one.complete


def test_the_vector_of_rfc_7677_for_the_server() -> None:
    credential = ScramCredential.derive(SCRAM_SHA_256, "pencil", base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="), 4096)
    other = ScramServer(SCRAM_SHA_256, {"user": credential}.get, "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0", DUMMY)
    assert other.step(VECTOR[0]).data == VECTOR[1]
    final = other.step(VECTOR[2])
    assert (final.data, final.principal) == (VECTOR[3], Principal(USER, "user"))


def test_the_escapes_of_rfc_5802() -> None:
    assert client("a=b,c", "p=,€").first() == b"n,,n=a=3Db=2Cc,r=client-nonce-0123456789"
    assert run(client("a=b,c", "p=,€"), server()) == Principal(USER, "a=b,c")


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_prepared_names_and_passwords_are_equal(mechanism: str) -> None:
    """The roman numeral nine, a soft hyphen and a wide letter have the same prepared form as plain letters."""
    assert run(client("\u2168", "o\u00ad\uff4b", mechanism), server(mechanism)) == Principal(USER, "IX")


# --- scramp as the other side -----------------------------------------------------------------------------------------

#: Texts that both libraries accept as names and passwords.
TEXTS = st.text(st.sampled_from("abcXYZ019 =,.-_éßñЖ漢字€\u00ad\u2168"), min_size=1, max_size=20).filter(
    lambda text: bool(text.replace("\u00ad", ""))
)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@given(name=TEXTS, password=TEXTS)
@settings(max_examples=25, deadline=None)
def test_our_client_logs_in_at_scramp(mechanism: str, name: str, password: str) -> None:
    theirs = scramp.ScramMechanism(mechanism)
    stored = theirs.make_auth_info(password, iteration_count=4096, salt=SALT)
    asked: list[str] = []

    def lookup(user: str) -> Any:
        asked.append(user)
        return stored

    other = theirs.make_server(lookup, s_nonce=SERVER_NONCE)
    one = client(name, password, mechanism)
    other.set_client_first(one.first().decode())
    other.set_client_final(one.step(other.get_server_first().encode()).decode())
    assert one.step(other.get_server_final().encode()) == b"" and one.complete
    assert asked == [saslprep(name)]
    ours = ScramCredential.derive(mechanism, password, SALT, 4096)
    assert (ours.salt, ours.stored_key, ours.server_key, ours.iterations) == stored


@pytest.mark.parametrize("mechanism", MECHANISMS)
@given(name=TEXTS, password=TEXTS)
@settings(max_examples=25, deadline=None)
def test_scramp_logs_in_at_our_server(mechanism: str, name: str, password: str) -> None:
    credential = ScramCredential.derive(mechanism, password, SALT, 4096)
    asked: list[str] = []

    def lookup(user: str) -> ScramCredential:
        asked.append(user)
        return credential

    theirs = scramp.ScramClient([mechanism], name, password, c_nonce=CLIENT_NONCE)
    other = ScramServer(mechanism, lookup, SERVER_NONCE, DUMMY)
    theirs.set_server_first(other.step(theirs.get_client_first().encode()).data.decode())
    final = other.step(theirs.get_client_final().encode())
    theirs.set_server_final(final.data.decode())
    assert final.principal == Principal(USER, saslprep(name))
    assert asked == [saslprep(name)]


def test_scramp_with_a_wrong_password_is_refused() -> None:
    theirs = scramp.ScramClient([SCRAM_SHA_256], "anna", "pen", c_nonce=CLIENT_NONCE)
    other = server()
    theirs.set_server_first(other.step(theirs.get_client_first().encode()).data.decode())
    refused(other.step, theirs.get_client_final().encode())


# --- whole logins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_login_gives_the_principal(mechanism: str) -> None:
    assert run(client(mechanism=mechanism), server(mechanism)) == Principal(USER, "anna")


def _until_refused(username: str, password: str) -> tuple[bytes, str]:
    one, other = client(username, password), server()
    challenge = other.step(one.first()).data
    return challenge, str(refused(other.step, one.step(challenge)))


def test_an_unknown_user_gets_the_replies_of_a_wrong_password() -> None:
    known, known_error = _until_refused("anna", "wrong")
    unknown, unknown_error = _until_refused("otto", "wrong")
    again, _ = _until_refused("otto", "other")
    assert known_error == unknown_error and unknown == again
    form = rb"r=[^,]+,s=[A-Za-z0-9+/]+=*,i=[0-9]+"
    assert re.fullmatch(form, known) and re.fullmatch(form, unknown)
    salt = re.search(rb"s=([^,]+)", unknown)
    assert salt is not None and len(base64.b64decode(salt[1])) == SALT_BYTES
    assert unknown.endswith(f"i={DEFAULT_ITERATIONS}".encode())
    assert _until_refused("olga", "wrong")[0] != unknown


def test_an_unknown_name_has_the_form_of_credentials() -> None:
    usual = CredentialForm(8192, 40)
    for _ in range(2):
        other = ScramServer(SCRAM_SHA_256, lambda name: None, SERVER_NONCE, DUMMY, forms={usual: 1})
        challenge = other.step(client("otto").first()).data
        salt = re.search(rb"s=([^,]+)", challenge)
        assert salt is not None and len(base64.b64decode(salt[1])) == 40 and challenge.endswith(b"i=8192")
    token = server().step(client("no-such-token", "hmac", token=True).first()).data
    assert token.endswith(f"i={TOKEN_FORM.iterations}".encode())


@given(salt_bytes=st.integers(MIN_SALT_BYTES, MAX_SALT_BYTES), name=st.text(max_size=20))
def test_an_invented_credential_is_the_same_each_time(salt_bytes: int, name: str) -> None:
    form = CredentialForm(MIN_ITERATIONS, salt_bytes)
    made = dummy_credential(SCRAM_SHA_512, name, DUMMY, form)
    assert check_credential(SCRAM_SHA_512, made) == dummy_credential(SCRAM_SHA_512, name, DUMMY, form)
    assert made.salt != dummy_credential(SCRAM_SHA_512, name + "x", DUMMY, form).salt


def test_a_user_without_this_mechanism_is_refused_as_unknown() -> None:
    other = ScramServer(SCRAM_SHA_512, lambda name: None, SERVER_NONCE, DUMMY)
    one = client(mechanism=SCRAM_SHA_512)
    refused(other.step, one.step(other.step(one.first()).data))


def test_a_server_without_the_credential_is_refused() -> None:
    one = client()
    challenge = server().step(one.first()).data
    one.step(challenge)
    refused(one.step, b"v=" + base64.b64encode(b"x" * 32))
    assert not one.complete


def test_an_error_of_the_server_is_raised() -> None:
    assert "other-error" in str(refused(client().step, b"e=other-error"))
    one = client()
    one.step(server().step(one.first()).data)
    refused(one.step, b"e=invalid-proof")
    assert not one.complete


def test_a_replayed_login_is_refused() -> None:
    one = client()
    first = one.first()
    final = one.step(server().step(first).data)
    other = ScramServer(SCRAM_SHA_256, lambda name: CREDENTIALS[SCRAM_SHA_256, name], "another-nonce", DUMMY)
    other.step(first)
    refused(other.step, final)


@pytest.mark.parametrize("end", ["complete", "failed"])
def test_a_login_that_has_ended_takes_no_message(end: str) -> None:
    one, other = client(), server()
    if end == "complete":
        run(one, other)
    else:
        refused(other.step, b"nonsense")
        refused(one.step, b"nonsense")
    for side in (one, other):
        with pytest.raises(BrokerError) as error:
            side.step(client().first())
        assert error.value.code is ErrorCode.ILLEGAL_SASL_STATE


def test_a_token_gives_the_principal_of_its_owner() -> None:
    credential = ScramCredential.derive(SCRAM_SHA_256, "hmac", SALT, 4096)
    owner = Principal(USER, "anna")
    tokens = {"token-1": TokenCredential(credential, owner, expires_at_ms=7)}
    one, other = client("token-1", "hmac", token=True), server(tokens=tokens.get)
    assert one.first() == b"n,,n=token-1,r=client-nonce-0123456789,tokenauth=true"
    final = other.step(one.step(other.step(one.first()).data))
    assert (final.principal, final.expires_at_ms, other.token_id) == (owner, 7, "token-1")
    one.step(final.data)


@pytest.mark.parametrize("token", [False, True])
def test_tokens_and_users_have_separate_names(token: bool) -> None:
    credential = ScramCredential.derive(SCRAM_SHA_256, "hmac", SALT, 4096)
    tokens = {"token-1": TokenCredential(credential, Principal(USER, "anna"), expires_at_ms=7)}
    one = client("anna", "pencil", token=True) if token else client("token-1", "hmac")
    other = server(tokens=tokens.get)
    refused(other.step, one.step(other.step(one.first()).data))


def test_a_token_is_refused_where_there_are_none() -> None:
    one, other = client(token=True), server()
    refused(other.step, one.step(other.step(one.first()).data))


def test_a_salted_password_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    salted = SaltedPasswords()
    run(client(salted=salted), server())
    monkeypatch.setattr("hashlib.pbkdf2_hmac", None)
    assert run(client(salted=salted), server()) == Principal(USER, "anna")
    with pytest.raises(TypeError):
        run(client(password="another", salted=salted), server())
    monkeypatch.undo()
    refused(run, client(password="another", salted=salted), server())


def test_failed_logins_leave_no_salted_password() -> None:
    salted = SaltedPasswords()
    one = client(salted=salted)
    one.step(server().step(one.first()).data)
    assert not salted._found


def test_salted_passwords_are_bounded() -> None:
    salted = SaltedPasswords()
    for number in range(100):
        salted.put((SCRAM_SHA_256, "p", b"salt", number), b"s")
    assert len(salted._found) == 16
    assert salted.get((SCRAM_SHA_256, "p", b"salt", 99)) == b"s"


def test_secrets_are_neither_shown_nor_pickled() -> None:
    salted = SaltedPasswords()
    one = client(salted=salted)
    run(one, server())
    credential = CREDENTIALS[SCRAM_SHA_256, "anna"]
    assert all("pencil" not in repr(thing) for thing in (salted, one))
    assert repr(credential) == "ScramCredential(iterations=4096)"
    assert b"pencil" not in pickle.dumps(salted)


# --- bounds -----------------------------------------------------------------------------------------------------------

LONG = "x" * 300


@pytest.mark.parametrize(
    "first",
    [
        "",
        "n",
        "n,,",
        "n,,n=anna",
        "n,,r=client-nonce,n=anna",
        "n,,n=,r=client-nonce",
        "n,,m=ext,n=anna,r=client-nonce",
        "p=tls-unique,,n=anna,r=client-nonce",
        "x,,n=anna,r=client-nonce",
        "n,a=otto,n=anna,r=client-nonce",
        "n,b=anna,n=anna,r=client-nonce",
        "n,,n=an=na,r=client-nonce",
        "n,,n=anna=,r=client-nonce",
        "n,,n=anna=2c,r=client-nonce",
        "n,,n=an\x07na,r=client-nonce",
        "n,,n=an\0na,r=client-nonce",
        "n,,n=\u00ad,r=client-nonce",
        "n,,n=\u0627a,r=client-nonce",
        "n,,n=anna,r=",
        "n,,n=anna,r=short",
        "n,,n=anna,r=client nonce",
        "n,,n=anna,r=client-nönce",
        f"n,,n=anna,r={LONG}",
        f"n,,n={LONG},r=client-nonce",
        f"n,,n={'=2C' * 300},r=client-nonce",
        "n,,n=anna,r=client-nonce" + ",x=y" * 9,
        "n,,n=anna,r=client-nonce,x=" + "y" * 5000,
    ],
)
def test_a_malformed_first_message_is_refused(first: str) -> None:
    refused(server().step, first.encode())


@pytest.mark.parametrize(
    "challenge",
    [
        "",
        "r={c}{s}",
        "r={c}{s},s=c2FsdHNhbHQ=",
        "r={c},s=c2FsdHNhbHQ=,i=4096",
        "r={s}{c},s=c2FsdHNhbHQ=,i=4096",
        "r={c}short,s=c2FsdHNhbHQ=,i=4096",
        "m=ext,r={c}{s},s=c2FsdHNhbHQ=,i=4096",
        "r={c}{s},s=,i=4096",
        "r={c}{s},s=c2FsdA==,i=4096",
        "r={c}{s},s=c2FsdHNhbHQ,i=4096",
        "r={c}{s},s=c2FsdHNhbHR=,i=4096",
        "r={c}{s},s=c2Fsd!HNhbHQ=,i=4096",
        "r={c}{s},s=" + "c2Fs" * 50 + ",i=4096",
        "r={c}{s},s=c2FsdHNhbHQ=,i=4095",
        "r={c}{s},s=c2FsdHNhbHQ=,i=04096",
        "r={c}{s},s=c2FsdHNhbHQ=,i=-4096",
        "r={c}{s},s=c2FsdHNhbHQ=,i= 4096",
        "r={c}{s},s=c2FsdHNhbHQ=,i=",
        "r={c}{s},s=c2FsdHNhbHQ=,i=x",
        "r={c}{s},s=c2FsdHNhbHQ=,i=1000001",
        "r={c}{s},s=c2FsdHNhbHQ=,i=" + "9" * 3000,
        "r={c}{s},s=c2FsdHNhbHQ=,i=4096" + ",x=y" * 9,
    ],
)
def test_a_malformed_challenge_is_refused(challenge: str) -> None:
    refused(client().step, challenge.format(c=CLIENT_NONCE, s=SERVER_NONCE).encode())


def test_an_authorization_id_of_the_same_user_is_accepted() -> None:
    one, other = client(), server()
    assert other.step(one.first().replace(b"n,,", b"n,a=anna,")).data


@pytest.mark.parametrize(
    "change",
    [
        {"iterations": 4095},
        {"iterations": MAX_ITERATIONS + 1},
        {"salt": b"short"},
        {"salt": b"x" * 129},
        {"stored_key": b"x"},
        {"server_key": b"x" * 64},
    ],
    ids=str,
)
def test_a_credential_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    values: dict[str, Any] = {"salt": SALT, "iterations": 4096, "stored_key": b"x" * 32, "server_key": b"x" * 32}
    assert check_credential(SCRAM_SHA_256, ScramCredential(**values))
    with pytest.raises(ConfigError):
        check_credential(SCRAM_SHA_256, ScramCredential(**values | change))


@pytest.mark.parametrize("password", ["", "\x07", "\u00ad", "\U0001f600", "\u0627a"])
def test_a_password_that_cannot_be_prepared_is_not_stored(password: str) -> None:
    with pytest.raises(ConfigError):
        ScramCredential.derive(SCRAM_SHA_256, password, SALT, 4096)


def test_another_mechanism_is_refused() -> None:
    with pytest.raises(ConfigError, match="PLAIN"):
        ScramClient("PLAIN", "anna", "pencil", CLIENT_NONCE)
    with pytest.raises(ConfigError, match="PLAIN"):
        ScramCredential.derive("PLAIN", "pencil", SALT)


# --- hostile bytes ----------------------------------------------------------------------------------------------------


@given(data=st.binary(max_size=200), at=st.sampled_from(["first", "final", "challenge", "end"]))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_with_the_same_error(data: bytes, at: str) -> None:
    one, other = client(), server()
    if at == "challenge":
        refused(one.step, data)
    elif at == "first":
        refused(other.step, data)
    else:
        answer = one.step(other.step(one.first()).data)
        refused(other.step if at == "final" else one.step, answer if at == "end" else data)


@given(
    stage=st.integers(0, 3),
    place=st.integers(0, 10_000),
    change=st.one_of(st.integers(1, 255), st.just("cut"), st.binary(min_size=1, max_size=3)),
)
@settings(max_examples=500, deadline=None)
def test_no_login_succeeds_with_a_changed_byte(stage: int, place: int, change: int | str | bytes) -> None:
    """The change is at one place of one of the four messages."""

    def sent(message: bytes, number: int) -> bytes:
        if number != stage:
            return message
        at = place % len(message)
        if isinstance(change, int):
            return message[:at] + bytes([message[at] ^ change]) + message[at + 1 :]
        return message[:at] + message[at + 1 :] if isinstance(change, str) else message[:at] + change + message[at:]

    one, other = client(), server()

    def login() -> None:
        challenge = other.step(sent(one.first(), 0)).data
        final = other.step(sent(one.step(sent(challenge, 1)), 2)).data
        one.step(sent(final, 3))

    refused(login)
    assert not one.complete


@pytest.mark.parametrize("number", range(4))
def test_every_single_changed_byte_is_refused(number: int) -> None:
    messages = _messages()
    for at in range(len(messages[number])):
        for flip in (1, 2, 0x20, 0x80):
            changed = bytearray(messages[number])
            changed[at] ^= flip
            refused(_login_with, number, bytes(changed))


def _messages() -> list[bytes]:
    one, other = client(salted=_SALTED), server()
    first = one.first()
    challenge = other.step(first).data
    answer = one.step(challenge)
    final = other.step(answer).data
    one.step(final)
    return [first, challenge, answer, final]


def _login_with(number: int, changed: bytes) -> None:
    one, other = client(salted=_SALTED), server()
    first = changed if number == 0 else one.first()
    challenge = other.step(first).data
    answer = one.step(changed if number == 1 else challenge)
    final = other.step(changed if number == 2 else answer).data
    one.step(changed if number == 3 else final)


_SALTED = SaltedPasswords()


@pytest.mark.parametrize("mechanism", [SCRAM_SHA_256, SCRAM_SHA_512])
def test_a_salted_password_gives_the_credential_of_the_password(mechanism: str) -> None:
    salt = b"0123456789abcdef"
    derived = ScramCredential.derive(mechanism, "secret", salt, 4096)
    salted = salted_password(mechanism, "secret", salt, 4096)
    assert ScramCredential.of_salted_password(mechanism, salted, salt, 4096) == derived
    with pytest.raises(ConfigError, match="salted password"):
        ScramCredential.of_salted_password(mechanism, salted[1:], salt, 4096)
    with pytest.raises(ConfigError, match="iterations"):
        ScramCredential.of_salted_password(mechanism, salted, salt, 4095)


def test_a_nonce_of_the_client_may_be_repeated() -> None:
    """librdkafka before 2.6.1 puts its nonce in front of both nonces, and proves this message."""
    other = server()
    bare = f"n=anna,r={CLIENT_NONCE}"
    challenge = other.step(f"n,,{bare}".encode()).data.decode()
    without_proof = f"c=biws,r={CLIENT_NONCE}{CLIENT_NONCE}{SERVER_NONCE}"
    said = f"{bare},{challenge},{without_proof}".encode()
    salted = hashlib.pbkdf2_hmac("sha256", b"pencil", SALT, 4096)
    key = hmac.digest(salted, b"Client Key", "sha256")
    signature = hmac.digest(hashlib.sha256(key).digest(), said, "sha256")
    proof = base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True))).decode()
    assert other.step(f"{without_proof},p={proof}".encode()).principal == Principal(USER, "anna")


@pytest.mark.parametrize("nonces", [SERVER_NONCE, "x" + CLIENT_NONCE + SERVER_NONCE, CLIENT_NONCE * 3 + SERVER_NONCE])
def test_other_nonces_are_refused(nonces: str) -> None:
    other = server()
    other.step(f"n,,n=anna,r={CLIENT_NONCE}".encode())
    assert "does not belong" in str(refused(other.step, f"c=biws,r={nonces},p=AAAA".encode()))
