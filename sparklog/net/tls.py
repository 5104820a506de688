"""TLS contexts of brokers and clients, from PEM files.

A context stays in use until one of its files changes. The next connection then gets a new context. If the new files
cannot be used, for example because only one of two files is replaced so far, the last context stays in use. TLS 1.2 is
the oldest version. Renegotiation and compression are off.
"""

from __future__ import annotations

import functools
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import Principal
from sparklog.net.certificate_expiry import expires_at_s
from sparklog.net.client_security import ClientSecurity
from sparklog.net.password import NO_PASSWORD, Password
from sparklog.security.listeners import ClientAuth
from sparklog.security.mapping_rules import MappingRules, subject_of
from sparklog.security.principals import ANONYMOUS

_log = logging.getLogger(__name__)

#: A file's inode, size and time of change, or None if the file does not exist.
_Stamp = tuple[int, int, int] | None

_VERIFICATION = {
    ClientAuth.NONE: ssl.CERT_NONE,
    ClientAuth.REQUESTED: ssl.CERT_OPTIONAL,
    ClientAuth.REQUIRED: ssl.CERT_REQUIRED,
}
#: The oldest and the newest version of TLS.
TlsVersions = tuple[ssl.TLSVersion, ssl.TLSVersion]
_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_ALL_VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
#: OpenSSL's reason codes when the peer sends bytes of another protocol.
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
    "HTTP_REQUEST",
    "UNKNOWN_PROTOCOL",
)
#: OpenSSL's reason codes when the peer rejects the certificate of this process.
_CERTIFICATE_ALERTS = (
    "CERTIFICATE_REQUIRED",
    "BAD_CERTIFICATE",
    "UNKNOWN_CA",
    "CERTIFICATE_EXPIRED",
)


class PemFiles(NamedTuple):
    """The PEM files of one context: the trusted authorities, this side's certificate, and the certificate's key.

    An empty path means no file. If ``key`` is empty, the key is in the file ``certificate``.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""
    key_password: Password = NO_PASSWORD

    def stamps(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in (self.ca, self.certificate, self.key) if path)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load the files into ``context``. Raises ConfigError with the name of the file that cannot be used."""
        if self.ca:
            _load(self.ca, lambda: context.load_verify_locations(self.ca))
        if self.certificate:
            password = self.key_password.reveal

            def load() -> None:
                context.load_cert_chain(self.certificate, self.key or None, password)

            _load(" and ".join(filter(None, (self.certificate, self.key))), load)


def _stamp(path: str) -> _Stamp:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _load(what: str, load: Callable[[], None]) -> None:
    try:
        load()
    except ssl.SSLError as error:
        raise ConfigError(f"{what}: not usable as PEM: {error.reason or error}") from None
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror or error}") from None


class _ServerObject(ssl.SSLObject):
    """The server side of one TLS connection. The error of a failed handshake contains the bytes that were not sent."""

    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            error.unsent = self.outgoing.read()  # type: ignore[attr-defined]
            raise
        if self.session_reused:
            # OpenSSL keeps the sessions of TLS 1.2, and a resumed one would skip the check of the client's certificate.
            refused = ssl.SSLError(ssl.SSL_ERROR_SSL, "the client has resumed a session")
            refused.reason = "SESSION_RESUMED"
            raise refused


class _ServerContext(ssl.SSLContext):
    """A server context that keeps the TLS alert of a failed handshake, so that the server can send it to the peer.

    asyncio and uvloop close the connection without sending this alert.
    """

    sslobject_class = _ServerObject

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        wrapped = super().wrap_bio(incoming, outgoing, *args, **options)
        assert isinstance(wrapped, _ServerObject)
        wrapped.outgoing = outgoing
        return wrapped


def unsent_alert(error: BaseException) -> bytes:
    """Return the TLS alert that the caller must still send to the peer after a failed handshake.

    Return empty bytes if there is no such alert.
    """
    alert: bytes = getattr(error, "unsent", b"")
    return alert


class _ReloadedContext:
    """A TLS context that is loaded again when its files change. Any thread may call ``current``."""

    def __init__(self, files: PemFiles, make: Callable[[], ssl.SSLContext]) -> None:
        """Create the first context. ``make`` returns a context into which no file is loaded. Raises ConfigError."""
        self._files = files
        self._make = make
        self._stamps = files.stamps()
        self._context = self._loaded()

    def current(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        stamps = self._files.stamps()
        if stamps != self._stamps:
            try:
                self._context = self._loaded()
            except ConfigError as error:
                _log.warning("the last certificates stay in use: %s", error)
            # If the files cannot be used, wait until they change again before the next attempt.
            self._stamps = stamps
        return self._context

    def _loaded(self) -> ssl.SSLContext:
        context = self._make()
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        self._files.load_into(context)
        return context


def tls_versions(text: str) -> TlsVersions:
    """Return the oldest and the newest TLS version in ``text``, a value of the setting ``ssl.enabled.protocols``."""
    found = sorted(_VERSIONS[name] for name in text.split(","))
    return found[0], found[-1]


class ServerTls:
    """A provider of TLS contexts for one listener of a broker, from the listener's TLS settings."""

    def __init__(
        self,
        files: PemFiles,
        client_auth: ClientAuth = ClientAuth.NONE,
        rules: MappingRules = MappingRules(),  # noqa: B008 - an immutable value
        versions: TlsVersions = _ALL_VERSIONS,
    ) -> None:
        """Read the files. Raises ConfigError.

        If ``client_auth`` is REQUIRED or REQUESTED, the server accepts only certificates of clients that an authority
        in ``files.ca`` has issued. ``rules`` map the subjects of these certificates to principals. ``versions`` are the
        oldest and the newest accepted version of TLS.
        """
        if not files.certificate:
            raise ConfigError("a listener with TLS needs a certificate: set ssl.certificate.location")
        if client_auth is not ClientAuth.NONE and not files.ca:
            raise ConfigError(f"ssl.client.auth={client_auth.value} needs trusted authorities: set ssl.ca.location")
        self.files = files
        self.client_auth = client_auth
        self._rules = rules
        self._expiry: tuple[ssl.SSLContext, float] | None = None
        self._versions = versions
        self._reloaded = _ReloadedContext(files, self._make)

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        return self._reloaded.current()

    def expires_at_s(self) -> float | None:
        """Return when this listener's certificate expires, in seconds since the Unix epoch, or None if unknown."""
        context = self.context()
        if self._expiry is None or self._expiry[0] is not context:
            try:
                self._expiry = context, expires_at_s(self.files.certificate)
            except ConfigError as error:
                _log.warning("the time at which a certificate expires is not known: %s", error)
                return None
        return self._expiry[1]

    def principal(self, certificate: dict[str, Any] | None) -> Principal:
        """Return the principal of a client with this verified certificate, or ANONYMOUS if it has no certificate.

        Raises:
            BrokerError: SASL_AUTHENTICATION_FAILED, no mapping rule matches the certificate's subject.
        """
        if not certificate:
            return ANONYMOUS
        subject = subject_of(certificate)
        found = self._rules.principal(subject)
        if found is None:
            raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, f"no mapping rule matches the subject {subject}")
        return found

    def _make(self) -> ssl.SSLContext:
        context = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
        # A resumed session would skip the check of the client's certificate. See also ``_ServerObject``.
        context.num_tickets = 0
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE | ssl.OP_NO_TICKET
        context.verify_mode = _VERIFICATION[self.client_auth]
        context.minimum_version, context.maximum_version = self._versions
        return context


class ClientTls:
    """A provider of TLS contexts for a client's connections, from the client's TLS settings."""

    def __init__(self, files: PemFiles, *, verify_hostname: bool = True) -> None:
        """Read the files. Raises ConfigError. Without ``files.ca`` the system's authorities are trusted."""
        self._files = files
        self._verify_hostname = verify_hostname
        self._reloaded = _ReloadedContext(files, self._make)

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        return self._reloaded.current()

    def _make(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self._verify_hostname
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if not self._files.ca:
            context.load_default_certs()
        return context


@functools.lru_cache(maxsize=16)
def _client_tls(files: PemFiles, verify_hostname: bool) -> ClientTls:
    return ClientTls(files, verify_hostname=verify_hostname)


def client_context(security: ClientSecurity) -> ssl.SSLContext | None:
    """Return the TLS context for a new connection of a client, or None if the client does not use TLS.

    Raises ConfigError if a file cannot be used.
    """
    if not security.protocol.uses_tls:
        return None
    files = PemFiles(security.ca, security.certificate, security.key, security.key_password)
    return _client_tls(files, security.verify_hostname).context()


def connect_failure(address: str, error: BaseException) -> BrokerError:
    """Return the BrokerError to raise for an error while connecting, in the TLS handshake or in the first messages."""
    if isinstance(error, ConfigError):  # A file of the settings has been removed meanwhile.
        return BrokerError(ErrorCode.NETWORK_EXCEPTION, f"{address}: {error}")
    if isinstance(error, ssl.SSLCertVerificationError):
        detail = f"{address}: the broker's certificate is not accepted: {error.verify_message or error}"
        return BrokerError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, detail)
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        if any(part in reason for part in _NOT_TLS):
            detail = f"{address}: the listener does not use TLS ({reason}): see security.protocol"
            return BrokerError(ErrorCode.INVALID_REQUEST, detail)
        if "ALERT" in reason and any(part in reason for part in _CERTIFICATE_ALERTS):
            detail = f"{address}: the broker does not accept the certificate of this client: {reason}"
            return BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, detail)
    return BrokerError(ErrorCode.NETWORK_EXCEPTION, f"{address}: {error}")
