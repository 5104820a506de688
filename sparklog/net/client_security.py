"""The security settings of a client: TLS and the login.

The settings have the same names as in Kafka's Java client and in librdkafka.

A client accepts its settings as a mapping, as the path of a file with ``key = value`` lines, or as a
``ClientSecurity``. Values may contain references (see ``password``). A client without settings reads the file that the
environment variable ``SPARKLOG_CLIENT_CONFIG`` names. If this variable is not set either, the client connects without
TLS and without a login.

Certificates and keys are PEM files. Settings outside ``security.*``, ``sasl.*`` and ``ssl.*`` are ignored, so one file
may contain all settings of a client.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from sparklog.errors import ConfigError
from sparklog.net.password import NO_PASSWORD, Password, parse_properties, read_text, resolve
from sparklog.protocol.sasl import MECHANISMS, OAUTHBEARER, SCRAM_SHA_512
from sparklog.security.listeners import SecurityProtocol

_log = logging.getLogger(__name__)

#: The environment variable with the path of the settings file for clients that have no settings of their own.
CLIENT_CONFIG = "SPARKLOG_CLIENT_CONFIG"

_CA = ("ssl.truststore.location", "ssl.ca.location")
_CERTIFICATE = ("ssl.keystore.location", "ssl.certificate.location")
_KEY = ("ssl.key.location",)
_KEY_PASSWORD = ("ssl.key.password",)
_IDENTIFICATION = "ssl.endpoint.identification.algorithm"
_MECHANISM = ("sasl.mechanism", "sasl.mechanisms")
_USERNAME = ("sasl.username",)
_PASSWORD = ("sasl.password",)
_TOKEN_AUTH = "sasl.tokenauth"
_JAAS = "sasl.jaas.config"
_TOKEN_URL = "sasl.oauthbearer.token.endpoint.url"
_KNOWN = {
    "security.protocol",
    *_CA,
    *_CERTIFICATE,
    *_KEY,
    *_KEY_PASSWORD,
    _IDENTIFICATION,
    *_MECHANISM,
    *_USERNAME,
    *_PASSWORD,
    _TOKEN_AUTH,
    _JAAS,
    _TOKEN_URL,
}
#: Settings of Kafka's clients that have no effect here. TLS 1.2 and 1.3 are always allowed. PEM files have no password.
_WITHOUT_MEANING = {
    "ssl.protocol",
    "ssl.enabled.protocols",
    "ssl.truststore.password",
    "ssl.keystore.password",
    "sasl.login.callback.handler.class",
    "sasl.client.callback.handler.class",
}
_TYPES = {"ssl.truststore.type", "ssl.keystore.type"}
_INLINE = {
    "ssl.truststore.certificates",
    "ssl.keystore.certificate.chain",
    "ssl.keystore.key",
    "ssl.ca.pem",
    "ssl.certificate.pem",
    "ssl.key.pem",
}
_NOT_PEM = (".jks", ".p12", ".pfx", ".keystore", ".truststore")
_LOGIN_MODULE = re.compile(
    r"\s*(?P<module>[\w.]+)\s+(?:required|requisite|sufficient|optional)\b(?P<options>.*?);?\s*\Z", re.S
)
_OPTION = re.compile(
    r"""\s*(?P<name>[\w.]+)\s*=\s*(?:"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>(?:[^'\\]|\\.)*)'|(?P<bare>[^\s"';]+))"""
)


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """The security settings of a client. Its ``repr`` contains no secret."""

    protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT
    #: The PEM file with the certificates of the trusted authorities. If empty, the system's authorities are trusted.
    ca: str = ""
    #: The PEM file with the client's certificate, and perhaps its key; empty for none.
    certificate: str = ""
    #: The PEM file with the key; empty if it is in ``certificate``.
    key: str = ""
    key_password: Password = NO_PASSWORD
    #: Whether the broker's certificate must contain the host name to which the client connects.
    verify_hostname: bool = True
    mechanism: str = ""
    username: str = ""
    #: The password, or the secret of a delegation token, or a token for OAUTHBEARER.
    password: Password = NO_PASSWORD
    #: Whether ``username`` is the id of a delegation token, and ``password`` is the token's secret.
    is_token: bool = False

    def __post_init__(self) -> None:
        """Check the settings. Raises ConfigError."""
        if not self.protocol.uses_sasl:
            return
        if self.mechanism not in MECHANISMS:
            raise ConfigError(f"sasl.mechanism {self.mechanism!r}: expected {', '.join(MECHANISMS)}")
        if self.mechanism != OAUTHBEARER and not self.username:
            raise ConfigError("sasl.username is missing: set it, or sasl.jaas.config")
        if not self.password:
            raise ConfigError("sasl.password is missing: set it, or sasl.jaas.config")

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> ClientSecurity:
        """Parse settings that have Kafka's names, such as ``sasl.mechanism``.

        Raises:
            ConfigError: a setting is unknown or not allowed. The error does not quote secrets.
        """
        for name, value in settings.items():
            _check(name, value)
        jaas = _parse_jaas(settings[_JAAS]) if settings.get(_JAAS) else {}
        protocol = _protocol(resolve(settings.get("security.protocol", "PLAINTEXT")))
        if not protocol.uses_sasl:
            return cls(protocol, **_tls(settings)) if protocol.uses_tls else cls(protocol)
        mechanism = resolve(_first(settings, _MECHANISM)) or SCRAM_SHA_512
        username = resolve(_first(settings, _USERNAME) or jaas.get("username", ""))
        password = _first(settings, _PASSWORD) or jaas.get("password", "")
        is_token = _boolean(_TOKEN_AUTH, settings.get(_TOKEN_AUTH) or jaas.get("tokenauth", "false"))
        if mechanism == OAUTHBEARER:
            password = password or _token_of_url(settings.get(_TOKEN_URL, ""))
        return cls(
            protocol,
            mechanism=mechanism,
            username=username,
            password=Password(password, transferable=is_token),
            is_token=is_token,
            **(_tls(settings) if protocol.uses_tls else {}),
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ClientSecurity:
        """Read the settings from a file with ``key = value`` lines. Raises ConfigError."""
        settings = parse_properties(read_text(path), os.fspath(path))
        found = cls.parse(settings)
        if (
            found.password
            and not found.password.is_reference
            and Path(path).stat().st_mode & (stat.S_IROTH | stat.S_IWOTH)
        ):
            _log.warning("%s has a password, and every user of this host may read it: chmod 600", os.fspath(path))
        return found


Security: TypeAlias = "ClientSecurity | Mapping[str, str] | str | os.PathLike[str] | None"


def client_security(given: Security) -> ClientSecurity:
    """Return the security settings of a client from ``given``, in any of the forms that a client accepts.

    If ``given`` is None, read the file that the environment variable ``SPARKLOG_CLIENT_CONFIG`` names. If the variable
    is not set, return the defaults.

    Raises:
        ConfigError: the settings are not valid, or the file cannot be read.
    """
    if isinstance(given, ClientSecurity):
        return given
    if given is None:
        given = os.environ.get(CLIENT_CONFIG) or {}
    if isinstance(given, Mapping):
        return ClientSecurity.parse(given)
    return ClientSecurity.read(given)


def _first(settings: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the value of a setting that has several names. Raises ConfigError if two names have different values."""
    values = list(dict.fromkeys(settings[name] for name in names if settings.get(name)))
    if len(values) > 1:
        raise ConfigError(f"{' and '.join(names)} are the same setting, and their values differ")
    return values[0] if values else ""


def _check(name: str, value: str) -> None:
    if not name.startswith(("security.", "sasl.", "ssl.")) or name in _KNOWN or name in _WITHOUT_MEANING:
        return
    if name in _TYPES:
        if value.upper() != "PEM":
            raise ConfigError(f"{name}={value}: only PEM files are supported")
    elif name in _INLINE:
        raise ConfigError(f"{name}: certificates and keys are in PEM files: set ssl.ca.location and the like")
    elif name == "ssl.enable.certificate.verification":
        raise ConfigError(f"{name}: the broker's certificate is always verified: set ssl.ca.location")
    else:
        raise ConfigError(f"{name}: unknown setting, expected one of {', '.join(sorted(_KNOWN))}")


def _protocol(text: str) -> SecurityProtocol:
    try:
        return SecurityProtocol(text.upper())
    except ValueError:
        expected = ", ".join(protocol.value for protocol in SecurityProtocol)
        raise ConfigError(f"security.protocol {text!r}: expected {expected}") from None


def _tls(settings: Mapping[str, str]) -> dict[str, Any]:
    identification = resolve(settings.get(_IDENTIFICATION, "https")).lower()
    if identification not in {"https", "none", ""}:
        raise ConfigError(f"{_IDENTIFICATION} {identification!r}: expected https, or nothing for no check")
    paths = {"ca": _CA, "certificate": _CERTIFICATE, "key": _KEY}
    found = {name: resolve(_first(settings, names)) for name, names in paths.items()}
    for path in found.values():
        if PurePath(path).suffix.lower() in _NOT_PEM:
            raise ConfigError(f"{path}: only PEM files are supported")
    return {
        **found,
        "key_password": Password(_first(settings, _KEY_PASSWORD)),
        "verify_hostname": identification == "https",
    }


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ConfigError(f"{name}: expected true or false")
    return text.lower() == "true"


def _token_of_url(url: str) -> str:
    """Return the reference to the OAUTHBEARER token in a file whose URL is ``file:///path``."""
    parts = urlsplit(resolve(url))
    if parts.scheme != "file" or not parts.path:
        raise ConfigError(f"{_TOKEN_URL}: expected the file with the token, as file:///path, or set sasl.password")
    return f"${{file:{unquote(parts.path)}}}"


def _parse_jaas(text: str) -> dict[str, str]:
    """Return the options of the login module. Raises ConfigError. The error does not quote the text."""
    if text.strip().startswith("${"):
        text = resolve(text.strip())
    module = _LOGIN_MODULE.match(text)
    if module is None:
        raise ConfigError(f'{_JAAS}: expected a login module, "required" and its options, and then a semicolon')
    name = module["module"].rpartition(".")[2]
    if name not in {"ScramLoginModule", "OAuthBearerLoginModule"}:
        raise ConfigError(f"{_JAAS}: {name} is not supported, expected ScramLoginModule or OAuthBearerLoginModule")
    options: dict[str, str] = {}
    rest, at = module["options"].rstrip().removesuffix(";"), 0
    while rest[at:].strip():
        option = _OPTION.match(rest, at)
        if option is None:
            raise ConfigError(f'{_JAAS}: expected options as name="value" after {name}')
        quoted = option["double"] if option["double"] is not None else option["single"]
        options[option["name"]] = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else option["bare"]
        at = option.end()
    return options
