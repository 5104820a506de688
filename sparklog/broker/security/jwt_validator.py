"""The validation of OAUTHBEARER tokens, which are JWTs that an identity provider signs.

A local file has the provider's public keys.

The type of the key determines the algorithm. The broker ignores the algorithm in the token's header. So it refuses a
token without a signature, and a token whose signature is an HMAC with a public key as the secret. Source: RFC 7515, RFC
7517, RFC 7519, RFC 8725.

The package PyJWT is needed: ``pip install 'sparklog[oauth]'``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from sparklog.config import BrokerConfig
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import USER, Principal
from sparklog.protocol.oauthbearer import ValidToken
from sparklog.protocol.scram import MAX_NAME

_log = logging.getLogger(__name__)

#: The algorithm for each type and curve of a key. Keys of other types are not usable.
_ALGORITHMS = {("RSA", ""): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
_MIN_RSA_BITS = 2048
_MAX_FILE_BYTES = 1024 * 1024
_MAX_KEYS = 100
#: The minimum time between two checks of the file.
_CHECK_S = 1.0
#: The latest expiry: the end of the year 9999.
_LATEST_S = 253_402_300_799


class _Key(NamedTuple):
    algorithm: str
    key: Any


class JwtRules(NamedTuple):
    """The requirements that a token must satisfy. ``jwks`` is the path of the file with the public keys (a JWK set)."""

    jwks: Path
    issuer: str
    audiences: tuple[str, ...]
    skew_s: int = 30
    claim: str = "sub"


def jwt_rules(config: BrokerConfig) -> JwtRules:
    """Return the requirements that the settings ``sasl.oauthbearer.*`` describe.

    Raises:
        ConfigError: a setting is missing or wrong.
    """
    prefix = "sasl.oauthbearer."
    url = urlsplit(config.sasl_oauthbearer_jwks_endpoint_url)
    if url.scheme != "file" or url.netloc not in {"", "localhost"} or not url.path:
        raise ConfigError(
            f"{prefix}jwks.endpoint.url: OAUTHBEARER needs the URL of a file, such as file:///etc/jwks.json"
        )
    audiences = tuple(part.strip() for part in config.sasl_oauthbearer_expected_audience.split(",") if part.strip())
    if not audiences:
        raise ConfigError(
            f"{prefix}expected.audience: OAUTHBEARER needs it, otherwise any token of the issuer is valid"
        )
    if not config.sasl_oauthbearer_expected_issuer:
        raise ConfigError(f"{prefix}expected.issuer: OAUTHBEARER needs it")
    return JwtRules(
        Path(unquote(url.path)),
        config.sasl_oauthbearer_expected_issuer,
        audiences,
        config.sasl_oauthbearer_clock_skew_seconds,
        config.sasl_oauthbearer_sub_claim_name,
    )


class JwtValidator:
    """A validator of OAUTHBEARER tokens in one broker.

    The validator reads the file of keys again when the file has changed. If it cannot read the file, it continues to
    use the last keys. Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, rules: JwtRules, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Read the keys.

        Raises:
            ConfigError: the file has no usable key, or cannot be read.
        """
        self._rules = rules
        self._monotonic_s = monotonic_s
        self._checked_s = monotonic_s()
        self._stamp = self._stamp_of_file()
        self._keys = _read_keys(rules.jwks)

    def validate(self, token: str) -> ValidToken:
        """Check the token, and return its principal and the time at which it expires.

        Raises:
            BrokerError: SASL_AUTHENTICATION_FAILED, the token is not valid. The detail does not quote the token.
        """
        self._reload()
        rules = self._rules
        try:
            key = self._key(jwt.get_unverified_header(token))
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm],
                audience=list(rules.audiences),
                issuer=rules.issuer,
                leeway=rules.skew_s,
                options={"require": ["exp", "iss", "aud", rules.claim]},
            )
            expires_s = int(claims["exp"])
        except jwt.PyJWTError as error:
            raise _refused(type(error).__name__) from None
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise _refused(f"malformed ({type(error).__name__})") from None
        if expires_s > _LATEST_S:
            raise _refused("its expiry is after the year 9999")
        name = claims[rules.claim]
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise _refused(f"its claim {rules.claim} is not a name")
        return ValidToken(Principal(USER, name), (expires_s + rules.skew_s) * 1000)

    def _key(self, header: dict[str, Any]) -> _Key:
        """Return the key that the header names. Without a name there must be a single key. Raises BrokerError."""
        key_id = header.get("kid")
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        found = self._keys.get(key_id) if isinstance(key_id, str) else None
        if found is None:
            raise _refused("its key is not in the file of keys")
        return found

    def _reload(self) -> None:
        now_s = self._monotonic_s()
        if now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        stamp = self._stamp_of_file()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _read_keys(self._rules.jwks)
            _log.info("read %d keys of OAUTHBEARER from %s", len(self._keys), self._rules.jwks)
        except ConfigError as error:
            _log.error("%s; continuing with the keys read before", error)

    def _stamp_of_file(self) -> tuple[int, int, int] | None:
        try:
            found = self._rules.jwks.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def _read_keys(path: Path) -> dict[str, _Key]:
    """Return the usable keys of the file by their ids. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        entries = json.loads(data)["keys"]
    except OSError as error:
        raise ConfigError(f"file of keys {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"file of keys {path}: expected a JWK set: a JSON object with keys") from None
    if len(data) > _MAX_FILE_BYTES or not isinstance(entries, list) or len(entries) > _MAX_KEYS:
        raise ConfigError(f"file of keys {path}: expected at most {_MAX_KEYS} keys and {_MAX_FILE_BYTES} bytes")
    found: dict[str, _Key] = {}
    for entry in entries:
        key = _usable(entry)
        if key is not None:
            found[str(entry.get("kid", ""))] = key
    if not found:
        raise ConfigError(f"file of keys {path}: no key for RS256, ES256 or EdDSA found")
    return found


def _usable(entry: Any) -> _Key | None:
    """Return the public key of an entry, or None if the entry is for something else."""
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig" or "d" in entry:
        return None
    kind = str(entry.get("kty", ""))
    algorithm = _ALGORITHMS.get((kind, "" if kind == "RSA" else str(entry.get("crv", ""))))
    if algorithm is None or entry.get("alg", algorithm) != algorithm:
        return None
    try:
        key = jwt.PyJWK(entry, algorithm=algorithm).key
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
    if isinstance(key, RSAPublicKey) and key.key_size < _MIN_RSA_BITS:
        return None
    return _Key(algorithm, key)


def _refused(reason: str) -> BrokerError:
    return BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, f"the token is not valid: {reason}")
