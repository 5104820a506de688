"""The security of ZooKeeper sessions: TLS, digest credentials, and the ACLs of nodes that sessions create.

The settings contain paths of files, never secrets. A session reads the files on its own host when it opens or connects.

A node has one of three kinds of ACL:

- Open: every session may do everything.
- Closed: sessions with the creator's credentials may do everything, and other sessions may read.
- Secret: sessions with the creator's credentials may do everything, and other sessions may not even read.

``paths.is_secret`` defines which nodes are secret.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparklog.config import BrokerConfig, broker_config
from sparklog.errors import ConfigError

#: The maximum size of a file with credentials, in bytes.
_LONGEST_FILE = 64 * 1024


class Masked(str):
    """A secret text whose ``repr`` and formatted output are masked, for example in a log line of kazoo."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"

    def __format__(self, form: str) -> str:
        return "***"


class ZooKeeperSecurity(msgspec.Struct, frozen=True, kw_only=True):
    """The security settings of ZooKeeper sessions. The settings contain no secrets, only paths of files."""

    #: Whether to connect with TLS.
    tls: bool = False
    #: The PEM file with the authorities that may sign the certificates of ZooKeeper servers. No other authorities are
    #: trusted.
    ca: str = ""
    #: The PEM file with the certificate chain of the session, and the PEM file with the private key. If the path of the
    #: key is empty, the key is in the certificate's file.
    certificate: str = ""
    key: str = ""
    #: Whether the server's certificate must contain the host name in the connect string.
    check_hostname: bool = True
    #: The file with a line ``user:password`` for each credential, the newest first.
    digest_file: str = ""
    #: Whether the session closes the nodes that it creates.
    set_acl: bool = False

    @property
    def has_identity(self) -> bool:
        """Return whether a session proves an identity to ZooKeeper, by a digest or by a TLS certificate."""
        return bool(self.digest_file) or (self.tls and bool(self.certificate))

    def context(self) -> ssl.SSLContext:
        """Create a TLS context for one connection from the current content of the files.

        Raises:
            ConfigError: a file cannot be read, or is not the expected kind of PEM file.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = self.check_hostname
        path = self.ca
        try:
            context.load_verify_locations(path)
            if self.certificate:
                path = self.key or self.certificate
                _check_mode(Path(path), Path(path).stat(), "key file")
                context.load_cert_chain(self.certificate, self.key or None, password=_no_password)
        except OSError as error:  # SSLError is an OSError
            raise ConfigError(f"TLS for ZooKeeper: {path}: {error.strerror or error}") from None
        return context

    def credentials(self) -> tuple[Masked, ...]:
        """Read the credentials in the digest file. Each has the form ``user:password``. Without a file there are none.

        Raises:
            ConfigError: the file cannot be read, other users may read it, or a line has the wrong form. The error does
                not contain the line.
        """
        if not self.digest_file:
            return ()
        path = Path(self.digest_file)
        found: list[Masked] = []
        for number, line in enumerate(_read_private(path).splitlines(), 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            user, colon, password = text.partition(":")
            if not (user and colon and password):
                raise ConfigError(f"digest file {path}, line {number}: expected user:password")
            found.append(Masked(text))
        if not found:
            raise ConfigError(f"digest file {path}: expected a line user:password")
        return tuple(found)


def zookeeper_security(config: BrokerConfig) -> ZooKeeperSecurity:
    """Return the security settings of ZooKeeper sessions that the broker settings contain.

    Raises:
        ConfigError: settings contradict each other, or a path is relative.
    """
    paths = {
        "zookeeper.ssl.truststore.location": config.zookeeper_ssl_truststore,
        "zookeeper.ssl.keystore.location": config.zookeeper_ssl_keystore,
        "zookeeper.ssl.key.location": config.zookeeper_ssl_key,
        "zookeeper.digest.file": config.zookeeper_digest_file,
    }
    for name, path in paths.items():
        if path and not Path(path).is_absolute():
            raise ConfigError(f"{name}={path}: expected an absolute path, because brokers run in another directory")
        if path and "ssl" in name and not config.zookeeper_ssl:
            raise ConfigError(f"{name} is set, so zookeeper.ssl.client.enable must be true")
    if config.zookeeper_ssl and not config.zookeeper_ssl_truststore:
        raise ConfigError("zookeeper.ssl.client.enable=true: zookeeper.ssl.truststore.location is missing")
    if config.zookeeper_ssl_key and not config.zookeeper_ssl_keystore:
        raise ConfigError("zookeeper.ssl.key.location is set, but zookeeper.ssl.keystore.location is missing")
    return ZooKeeperSecurity(
        tls=config.zookeeper_ssl,
        ca=config.zookeeper_ssl_truststore,
        certificate=config.zookeeper_ssl_keystore,
        key=config.zookeeper_ssl_key,
        check_hostname=config.zookeeper_ssl_identification.lower() == "https",
        digest_file=config.zookeeper_digest_file,
        set_acl=config.zookeeper_set_acl,
    )


def security_of(settings: Mapping[str, str]) -> ZooKeeperSecurity:
    """Parse the ``zookeeper.*`` settings among ``settings``, and ignore all others.

    Raises:
        ConfigError: a ZooKeeper setting is unknown, settings contradict each other, or a path is relative.
    """
    return zookeeper_security(
        broker_config({key: value for key, value in settings.items() if key.startswith("zookeeper.")})
    )


def _read_private(path: Path) -> str:
    try:
        with path.open("rb") as file:
            _check_mode(path, os.fstat(file.fileno()), "digest file")
            content = file.read(_LONGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"digest file {path}: {error.strerror}") from None
    if len(content) > _LONGEST_FILE:
        raise ConfigError(f"digest file {path}: expected at most {_LONGEST_FILE} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"digest file {path}: expected UTF-8 text") from None


def _check_mode(path: Path, found: os.stat_result, what: str) -> None:
    if found.st_mode & 0o077 or found.st_uid not in {os.geteuid(), 0}:
        raise ConfigError(
            f"{what} {path}: owner {found.st_uid}, mode {stat.filemode(found.st_mode)} found;"
            f" only user {os.geteuid()} may read it: chmod 600"
        )


def _no_password() -> str:
    """Raise ConfigError instead of asking for the password of a key on the terminal."""
    raise ConfigError("TLS for ZooKeeper: the private key has a password, which is not supported")
