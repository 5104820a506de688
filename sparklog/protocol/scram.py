"""Logins with a password that is never sent: SCRAM-SHA-256 and SCRAM-SHA-512.

This module is pure: the nonces are arguments. The server stores a ``ScramCredential``, which is not enough to log in as
the user. The client proves that it knows the password, and then the server proves that it knows the credential. Both
proofs cover both nonces and all earlier messages.

A client cannot find out whether a user exists. For an unknown user the server sends the same replies and does the same
work as for a wrong password. Each unknown user has a dummy credential. Among unknown users, each number of iterations
and each length of salt is as frequent as among existing users.

There is no channel binding. Source: RFC 5802, RFC 7677; KIP-84 (Kafka's use), KIP-48 (the extension ``tokenauth``).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import USER, Principal
from sparklog.protocol.sasl import SCRAM_SHA_256, SCRAM_SHA_512, ServerStep
from sparklog.protocol.saslprep import saslprep

#: The bounds of the iterations, and the number for new credentials. Kafka has the same minimum. The maximum limits the
#: time that a server can make a client spend: about two seconds.
MIN_ITERATIONS = 4096
MAX_ITERATIONS = 1_000_000
DEFAULT_ITERATIONS = 16_384
#: The length of the salt of new credentials, and the bounds of the salt length of all credentials.
SALT_BYTES = 24
MIN_SALT_BYTES = 8
MAX_SALT_BYTES = 128
#: The maximum length of a user name, in characters.
MAX_NAME = 255
#: The bounds of one side's part of the nonce, in characters.
MIN_NONCE = 8
MAX_NONCE = 256
_MAX_BYTES = 4096
_MAX_EXTENSIONS = 8
_TOKEN_EXTENSION = "tokenauth=true"
_HASHES = {SCRAM_SHA_256: "sha256", SCRAM_SHA_512: "sha512"}
_SIZES = {SCRAM_SHA_256: 32, SCRAM_SHA_512: 64}
_NONCE_CHARACTERS = frozenset(map(chr, range(0x21, 0x7F))) - {","}
#: The reply to every login with a wrong name or password.
_REFUSED = "the user name or the password is wrong"


@dataclass(frozen=True, slots=True)
class ScramCredential:
    """The keys that a server stores for one password and one mechanism. Its ``repr`` contains no keys."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    @classmethod
    def derive(
        cls, mechanism: str, password: str, salt: bytes, iterations: int = DEFAULT_ITERATIONS
    ) -> ScramCredential:
        """Compute the credential for a new password. This takes about 10 ms for each 16,384 iterations.

        Raises:
            ConfigError: the password has characters that are not allowed, or another argument is out of bounds.
        """
        salted = salted_password(mechanism, saslprep(password, stored=True), salt, iterations)
        return cls.of_salted_password(mechanism, salted, salt, iterations)

    @classmethod
    def of_salted_password(cls, mechanism: str, salted: bytes, salt: bytes, iterations: int) -> ScramCredential:
        """Return the credential for the salted form of a password.

        Raises:
            ConfigError: the mechanism is unknown, or another argument is out of bounds.
        """
        if mechanism not in _HASHES or len(salted) != _SIZES[mechanism]:
            detail = f"mechanism {mechanism[:100]!r}: a salted password of {len(salted)} bytes found"
            raise ConfigError(f"{detail}, one of {' or '.join(map(str, _SIZES.values()))} expected")
        stored_key, server_key = _keys(_HASHES[mechanism], salted)
        return check_credential(mechanism, cls(salt, iterations, stored_key, server_key))

    def __repr__(self) -> str:
        return f"ScramCredential(iterations={self.iterations})"


class CredentialForm(NamedTuple):
    """The properties of a credential that the server sends to a client before the login."""

    iterations: int
    salt_bytes: int


#: The form of the credentials that this release makes for passwords, and for delegation tokens. The secret of a token
#: is random, so that few iterations are enough.
NEW_FORM = CredentialForm(DEFAULT_ITERATIONS, SALT_BYTES)
TOKEN_FORM = CredentialForm(MIN_ITERATIONS, SALT_BYTES)


class TokenCredential(NamedTuple):
    """The credential of a delegation token, and the principal of a client that logs in with the token."""

    credential: ScramCredential
    owner: Principal
    expires_at_ms: int


def check_credential(mechanism: str, credential: ScramCredential) -> ScramCredential:
    """Check a credential, and return it if all its values are within bounds.

    Raises:
        ConfigError: the mechanism is unknown, or a value is out of bounds.
    """
    size = _SIZES.get(mechanism)
    if size is None:
        raise ConfigError(f"mechanism {mechanism!r}: expected {' or '.join(_HASHES)}")
    if not MIN_ITERATIONS <= credential.iterations <= MAX_ITERATIONS:
        detail = f"{credential.iterations} iterations found, {MIN_ITERATIONS} to {MAX_ITERATIONS} expected"
        raise ConfigError(detail)
    if not MIN_SALT_BYTES <= len(credential.salt) <= MAX_SALT_BYTES:
        detail = f"a salt of {len(credential.salt)} bytes found, {MIN_SALT_BYTES} to {MAX_SALT_BYTES} expected"
        raise ConfigError(detail)
    if len(credential.stored_key) != size or len(credential.server_key) != size:
        raise ConfigError(f"the keys of {mechanism} have {size} bytes, other lengths found")
    return credential


def salted_password(mechanism: str, prepared: str, salt: bytes, iterations: int) -> bytes:
    """Return the salted form of a password that ``saslprep`` has normalized.

    Raises ConfigError if the mechanism is unknown.
    """
    if mechanism not in _HASHES:
        raise ConfigError(f"mechanism {mechanism!r}: expected {' or '.join(_HASHES)}")
    return hashlib.pbkdf2_hmac(_HASHES[mechanism], prepared.encode(), salt, iterations)


class SaltedPasswords:
    """A cache of the salted passwords of the last ``_KEPT`` successful logins.

    With the cache, a client that logs in again, for example on another connection, need not repeat the iterations. The
    ``repr`` of the cache contains no secrets.
    """

    _KEPT = 16

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, bytes, int], bytes] = {}

    def get(self, key: tuple[str, str, bytes, int]) -> bytes | None:
        return self._found.get(key)

    def put(self, key: tuple[str, str, bytes, int], salted: bytes) -> None:
        # A copy, because threads may log in at the same time.
        self._found = dict([*self._found.items(), (key, salted)][-self._KEPT :])

    def __repr__(self) -> str:
        return "SaltedPasswords(...)"

    def __reduce__(self) -> tuple[type[SaltedPasswords], tuple[()]]:
        """Pickle an empty cache."""
        return SaltedPasswords, ()


class _State(Enum):
    FIRST = "first"
    FINAL = "final"
    ENDED = "ended"


class ScramServer:
    """The server's side of one SCRAM login.

    ``lookup`` returns the credential of a user for this mechanism, or None. ``tokens`` returns the credential of a
    delegation token, or None; without ``tokens`` every token is unknown. ``nonce`` is the server's part of the nonce,
    and must be new for each login. ``dummy`` is a secret of the cluster, from which the server derives the credentials
    of unknown users. It must be the same on all brokers and never change, because a salt that differs between two
    logins would reveal that the user does not exist. ``forms`` has the number of users for each form of credential
    (iterations and length of the salt).
    """

    def __init__(
        self,
        mechanism: str,
        lookup: Callable[[str], ScramCredential | None],
        nonce: str,
        dummy: bytes,
        *,
        tokens: Callable[[str], TokenCredential | None] | None = None,
        forms: Mapping[CredentialForm, int] = MappingProxyType({NEW_FORM: 1}),
    ) -> None:
        self.mechanism = mechanism
        self._forms = forms
        self._hash = _HASHES[mechanism]
        self._lookup = lookup
        self._tokens = tokens
        self._nonce = nonce
        self._dummy = dummy
        self._state = _State.FIRST
        self._found = False
        self._principal = Principal(USER, "")
        self._expires_at_ms: int | None = None
        #: The name in the client's first message, for the audit log. It may be wrong until the login is complete.
        self.username = ""
        #: The id of the delegation token that the client logs in with, or an empty string.
        self.token_id = ""

    def step(self, data: bytes) -> ServerStep:
        """Return the reply to the client's next message. Raises the same errors as ``SaslServer.step``."""
        state, self._state = self._state, _State.ENDED
        if state is _State.FIRST:
            reply = self._on_first(_text(data))
            self._state = _State.FINAL
            return ServerStep(reply.encode())
        if state is _State.FINAL:
            return self._on_final(_text(data))
        raise BrokerError(ErrorCode.ILLEGAL_SASL_STATE, "the login has ended")

    def _on_first(self, text: str) -> str:
        flag, _, rest = text.partition(",")
        if flag not in {"n", "y"}:
            raise _malformed("channel binding is not supported")
        authorization, _, bare = rest.partition(",")
        parts = bare.split(",")
        if len(parts) > 2 + _MAX_EXTENSIONS:
            raise _malformed("too many extensions")
        name = _prepared_name(_attribute(parts, 0, "n"))
        client_nonce = _attribute(parts, 1, "r")
        _check_nonce(client_nonce)
        if authorization and (not authorization.startswith("a=") or _prepared_name(authorization[2:]) != name):
            raise _malformed("the authorization id must be that of the user")
        self._gs2_header = f"{flag},{authorization},"
        self.username = name
        credential = self._credential(name, token=_TOKEN_EXTENSION in parts[2:])
        self._client_nonce, self._nonces = client_nonce, client_nonce + self._nonce
        salt = base64.b64encode(credential.salt).decode()
        reply = f"r={self._nonces},s={salt},i={credential.iterations}"
        self._said = f"{bare},{reply}"
        return reply

    def _credential(self, name: str, *, token: bool) -> ScramCredential:
        """Return the credential with which to check the client's proof, and record whether it is a dummy."""
        form = TOKEN_FORM if token else form_of_unknown(self.mechanism, name, self._dummy, self._forms)
        dummy = dummy_credential(self.mechanism, name, self._dummy, form)
        found: ScramCredential | None
        self._principal = Principal(USER, name)
        if token:
            self.token_id = name
            entry = self._tokens(name) if self._tokens is not None else None
            found = entry.credential if entry is not None else None
            if entry is not None:
                self._principal, self._expires_at_ms = entry.owner, entry.expires_at_ms
        else:
            found = self._lookup(name)
        self._found = found is not None
        self._used = found if found is not None else dummy
        return self._used

    def _on_final(self, text: str) -> ServerStep:
        without_proof, found, proof_text = text.rpartition(",p=")
        binding = f"c={base64.b64encode(self._gs2_header.encode()).decode()}"
        # librdkafka before 2.6.1 sends its own nonce twice, and Kafka accepts it. The proof covers what was sent.
        expected = tuple(f"{binding},r={nonces}," for nonces in (self._nonces, self._client_nonce + self._nonces))
        if not found or not f"{without_proof},".startswith(expected):
            raise _malformed("the final message does not belong to the first one")
        proof = _decoded(proof_text)
        if len(proof) != _SIZES[self.mechanism]:
            raise _malformed(f"a proof of {self.mechanism} has {_SIZES[self.mechanism]} bytes")
        said = f"{self._said},{without_proof}".encode()
        client_key = _xor(proof, hmac.digest(self._used.stored_key, said, self._hash))
        right = hmac.compare_digest(hashlib.new(self._hash, client_key).digest(), self._used.stored_key)
        signature = hmac.digest(self._used.server_key, said, self._hash)
        if not (right & self._found):
            raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, _REFUSED)
        reply = b"v=" + base64.b64encode(signature)
        return ServerStep(reply, self._principal, self._expires_at_ms, self.token_id)


def form_of_unknown(mechanism: str, name: str, dummy: bytes, forms: Mapping[CredentialForm, int]) -> CredentialForm:
    """Return the form (iterations and length of the salt) of the dummy credential of a user that does not exist.

    ``forms`` has the number of existing users for each form. Each form is as frequent among unknown users as among
    existing users, so a rare form does not reveal that a user exists. A name always gets the same form for the same
    ``forms``. If the numbers in ``forms`` change, the forms of only a few names change. Source: weighted rendezvous
    hashing.
    """

    def score(form: CredentialForm) -> float:
        said = f"form\0{mechanism}\0{name}\0{form.iterations}\0{form.salt_bytes}".encode()
        part = int.from_bytes(hmac.digest(dummy, said, "sha256")[:6], "big") + 1
        return -math.log(part / (2**48 + 1)) / forms[form]

    return min(forms, key=score, default=NEW_FORM)


def dummy_credential(mechanism: str, name: str, dummy: bytes, form: CredentialForm = NEW_FORM) -> ScramCredential:
    """Return a dummy credential of this form for a user that does not exist.

    The same name always gets the same credential.
    """
    said = f"{mechanism}\0{name}".encode()
    salt = hmac.digest(dummy, b"salt\0" + said, "sha256")
    while len(salt) < form.salt_bytes:
        salt += hmac.digest(dummy, salt + said, "sha256")
    key = hmac.digest(dummy, b"key\0" + said, _HASHES[mechanism])
    return ScramCredential(salt[: form.salt_bytes], form.iterations, key, key)


class ScramClient:
    """The client's side of one SCRAM login.

    ``nonce`` is the client's part of the nonce, and must be new for each login. With ``token``, the user name is the id
    of a delegation token, and the password is its HMAC. With the cache ``salted``, the client need not repeat the
    iterations for a password that it has used before with the same salt.
    """

    def __init__(
        self,
        mechanism: str,
        username: str,
        password: str,
        nonce: str,
        *,
        token: bool = False,
        salted: SaltedPasswords | None = None,
    ) -> None:
        """Prepare a login. Raises ConfigError if the mechanism, the name or the password is not allowed."""
        if mechanism not in _HASHES:
            raise ConfigError(f"mechanism {mechanism!r}: expected {' or '.join(_HASHES)}")
        self.mechanism = mechanism
        self.complete = False
        self._hash = _HASHES[mechanism]
        self._password = saslprep(password)
        self._nonce = nonce
        self._salted = salted
        name = saslprep(username).replace("=", "=3D").replace(",", "=2C")
        self._bare = f"n={name},r={nonce}" + (f",{_TOKEN_EXTENSION}" if token else "")
        self._state = _State.FIRST

    def __repr__(self) -> str:
        return f"ScramClient({self.mechanism})"

    def first(self) -> bytes:
        """Return the first message of the login."""
        return f"n,,{self._bare}".encode()

    def step(self, data: bytes) -> bytes:
        """Return the reply to the server's message. Raises the same errors as ``SaslClient.step``.

        If the salted password is not cached, this takes about 10 ms of processor time for each 16,384 iterations.
        """
        state, self._state = self._state, _State.ENDED
        if state is _State.FIRST:
            reply = self._on_first(_text(data))
            self._state = _State.FINAL
            return reply.encode()
        if state is _State.FINAL:
            self._on_final(_text(data))
            return b""
        raise BrokerError(ErrorCode.ILLEGAL_SASL_STATE, "the login has ended")

    def _on_first(self, text: str) -> str:
        parts = text.split(",")
        _raise_server_error(parts[0])
        if len(parts) > 3 + _MAX_EXTENSIONS:
            raise _malformed("too many extensions")
        nonces, salt = _attribute(parts, 0, "r"), _decoded(_attribute(parts, 1, "s"))
        if not nonces.startswith(self._nonce):
            raise _malformed("the server's nonce does not begin with the client's")
        _check_nonce(nonces[len(self._nonce) :])
        if not MIN_SALT_BYTES <= len(salt) <= MAX_SALT_BYTES:
            raise _malformed(f"a salt of {len(salt)} bytes found, {MIN_SALT_BYTES} to {MAX_SALT_BYTES} expected")
        iterations = _iterations(_attribute(parts, 2, "i"))
        self._key = (self.mechanism, self._password, salt, iterations)
        found = self._salted.get(self._key) if self._salted is not None else None
        self._used = found or salted_password(self.mechanism, self._password, salt, iterations)
        without_proof = f"c=biws,r={nonces}"
        self._said = f"{self._bare},{text},{without_proof}".encode()
        client_key = hmac.digest(self._used, b"Client Key", self._hash)
        stored_key, self._server_key = _keys(self._hash, self._used)
        proof = _xor(client_key, hmac.digest(stored_key, self._said, self._hash))
        return f"{without_proof},p={base64.b64encode(proof).decode()}"

    def _on_final(self, text: str) -> None:
        parts = text.split(",")
        _raise_server_error(parts[0])
        if len(parts) > 1 + _MAX_EXTENSIONS:
            raise _malformed("too many extensions")
        signature = _decoded(_attribute(parts, 0, "v"))
        if not hmac.compare_digest(signature, hmac.digest(self._server_key, self._said, self._hash)):
            detail = "the server could not prove that it knows the user's credential"
            raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, detail)
        if self._salted is not None:
            self._salted.put(self._key, self._used)
        self.complete = True


def _keys(hash_name: str, salted: bytes) -> tuple[bytes, bytes]:
    """Return the stored key and the server key."""
    client_key = hmac.digest(salted, b"Client Key", hash_name)
    return hashlib.new(hash_name, client_key).digest(), hmac.digest(salted, b"Server Key", hash_name)


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _text(data: bytes) -> str:
    if len(data) > _MAX_BYTES:
        raise _malformed(f"{len(data)} bytes found, at most {_MAX_BYTES} expected")
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError:
        raise _malformed("the bytes are not UTF-8") from None
    if "\0" in text:
        raise _malformed("a NUL character is not allowed")
    return text


def _attribute(parts: list[str], index: int, name: str) -> str:
    """Return the value of the attribute at this position, which must have this name."""
    if index >= len(parts) or not parts[index].startswith(f"{name}="):
        raise _malformed(f"attribute {name} expected at place {index + 1}")
    return parts[index][2:]


def _prepared_name(escaped: str) -> str:
    """Return the unescaped user name in its prepared form."""
    pieces = escaped.split("=")
    if len(escaped) > 3 * MAX_NAME or any(piece[:2] not in {"2C", "3D"} for piece in pieces[1:]):
        raise _malformed("the user name is not escaped as it must be")
    try:
        name = saslprep(escaped.replace("=2C", ",").replace("=3D", "="))
    except ConfigError as error:
        raise _malformed(str(error)) from None
    if len(name) > MAX_NAME:
        raise _malformed(f"a user name of {len(name)} characters found, at most {MAX_NAME} expected")
    return name


def _check_nonce(nonce: str) -> None:
    if not MIN_NONCE <= len(nonce) <= MAX_NONCE:
        raise _malformed(f"a nonce of {len(nonce)} characters found, {MIN_NONCE} to {MAX_NONCE} expected")
    if not _NONCE_CHARACTERS.issuperset(nonce):
        raise _malformed("a nonce has a character that is not allowed")


def _iterations(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ITERATIONS)) and text[0] != "0"):
        raise _malformed("the iterations are not a number")
    if not MIN_ITERATIONS <= (found := int(text)) <= MAX_ITERATIONS:
        raise _malformed(f"{found} iterations found, {MIN_ITERATIONS} to {MAX_ITERATIONS} expected")
    return found


def _decoded(text: str) -> bytes:
    """Return the bytes of a Base64 text. Refuse a text that is not the canonical encoding of its bytes."""
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _malformed("a value is not Base64") from None
    if base64.b64encode(found).decode() != text:
        raise _malformed("a value is not canonical Base64")
    return found


def _raise_server_error(part: str) -> None:
    """Raise the error that the server has sent instead of its message. Source: RFC 5802, server-error."""
    if part.startswith("e="):
        detail = f"the server refused the login: {part[2:52]!r}"
        raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, detail)


def _malformed(detail: str) -> BrokerError:
    return BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, f"the message of the login is malformed: {detail}")
