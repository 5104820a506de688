"""The security of a cluster that ``sparklog cluster --secure`` starts. The driver creates the files.

The files are in the directory ``security`` in the data directory, which only the user that runs the cluster can read:

- The CA.
- The certificates of the brokers, of the controller and of the embedded ZooKeeper.
- The password of the user ``admin``.
- The file with the settings of clients.

The driver creates the files at the first start and keeps them. At a later start it replaces a certificate that expires
within thirty days, or whose host or cluster has changed.

If Spark may use several hosts, each host makes its own key for the brokers and the driver signs: see ``enrolment``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparklog.cluster import certificates, enrolment
from sparklog.cluster.certificates import Subject
from sparklog.cluster.client_file import SECURITY_DIRECTORY, client_file
from sparklog.cluster.process import host_name
from sparklog.errors import ConfigError
from sparklog.protocol.proof import KeyRing
from sparklog.protocol.sasl import SCRAM_MECHANISMS, SCRAM_SHA_512
from sparklog.protocol.scram import SALT_BYTES, ScramCredential
from sparklog.zk.security import ZooKeeperSecurity
from sparklog.zk.session import ZkSession
from sparklog.zk.unreadable import Unreadable
from sparklog.zk.user_store import KEY_BYTES, UserStore

ADMIN = "admin"
_PASSWORD_BYTES = 24


class DevelopmentSecurity:
    """A component that creates the security files of a cluster, and returns the settings that use them."""

    def __init__(self, data_dir: Path, *, advertised_host: str = "", embedded_zookeeper: bool = True) -> None:
        self._client_file = client_file(data_dir.resolve())
        self._password_file = self._client_file.with_name("admin.password")
        self._directory = data_dir.resolve() / SECURITY_DIRECTORY
        self._embedded_zookeeper = embedded_zookeeper
        self._advertised_host = advertised_host
        named = ("localhost", "127.0.0.1", "::1", host_name(), advertised_host)
        self._hosts = tuple(dict.fromkeys(host for host in named if host))

    def settings(self) -> dict[str, str]:
        """Return the broker settings that a secure cluster needs: listeners with TLS, files, and the super user."""
        broker, controller = self._files(enrolment.NAME), self._files("controller")
        found = {
            "listeners": "CLIENT://:0,BROKER://:0",
            "listener.security.protocol.map": "CLIENT:SASL_SSL,BROKER:SSL",
            "inter.broker.listener.name": "BROKER",
            "ssl.ca.location": str(self._files("ca").certificate),
            "ssl.certificate.location": str(broker.certificate),
            "ssl.key.location": str(broker.key),
            "controller.ssl.certificate.location": str(controller.certificate),
            "controller.ssl.key.location": str(controller.key),
            "super.users": f"User:{ADMIN}",
        }
        if self._embedded_zookeeper:
            zookeeper = self._files("zookeeper")
            found |= {
                "zookeeper.ssl.client.enable": "true",
                "zookeeper.ssl.truststore.location": str(self._files("ca").certificate),
                "zookeeper.ssl.keystore.location": str(zookeeper.certificate),
                "zookeeper.ssl.key.location": str(zookeeper.key),
            }
        return found

    def host_settings(self, settings: Mapping[str, str]) -> dict[str, str]:
        """Return the broker ``settings`` for hosts that have the brokers' files but not the driver's files."""
        found = {key: value for key, value in settings.items() if not key.startswith("controller.ssl.")}
        if self._embedded_zookeeper:
            broker = self._files(enrolment.NAME)
            found["zookeeper.ssl.keystore.location"] = str(broker.certificate)
            found["zookeeper.ssl.key.location"] = str(broker.key)
        return found

    def signer(
        self, cluster_id: str, settings: Mapping[str, str], *, executor_hosts: Callable[[], Sequence[str]]
    ) -> enrolment.CertificateSigner:
        """Return the signer of the certificates of several hosts. ``settings`` are the driver's settings."""
        return enrolment.CertificateSigner(
            self._directory,
            cluster_id,
            settings=self.host_settings(settings),
            executor_hosts=executor_hosts,
            alias=self._advertised_host,
        )

    def prepare(self) -> None:
        """Create the CA and ZooKeeper's certificate, which ZooKeeper needs when it starts.

        Raises:
            ConfigError: a file cannot be used.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        if not self._files("ca").certificate.exists():
            certificates.create_ca(self._directory)
        if self._embedded_zookeeper:
            self._issue(Subject("zookeeper", self._hosts))

    def complete(self, cluster_id: str) -> None:
        """Create the certificate of the controller, the admin's password, and the clients' settings file.

        Call it when the cluster's id is known.

        Raises:
            ConfigError: a file cannot be used.
        """
        self._issue(Subject("controller", (), "controller", cluster_id))
        if not self._password_file.exists():
            _write_private(self._password_file, f"{secrets.token_urlsafe(_PASSWORD_BYTES)}\n")
        _write_private(
            self._client_file,
            f"# Clients of this cluster: sparklog --client-config {self._client_file}\n"
            "security.protocol = SASL_SSL\n"
            f"ssl.ca.location = {self._files('ca').certificate}\n"
            f"sasl.mechanism = {SCRAM_SHA_512}\n"
            f"sasl.username = {ADMIN}\n"
            f"sasl.password = ${{file:{self._password_file}}}\n",
        )

    def issue_brokers(self, cluster_id: str) -> None:
        """Create the certificate of the brokers of this machine.

        Raises:
            ConfigError: a file cannot be used.
        """
        self._issue(Subject(enrolment.NAME, self._hosts, "broker", cluster_id))

    async def make_admin(self, zookeeper: str, *, keys: KeyRing, security: ZooKeeperSecurity) -> None:
        """Store credentials for the user ``admin`` in ZooKeeper, unless the stored credentials match the password file.

        Raises:
            ConfigError: the password file is empty.
            ClusterError: ZooKeeper does not respond.
        """
        password = self._password_file.read_text("utf-8").strip()
        if not password:
            raise ConfigError(f"{self._password_file}: it is empty; delete it for a new password")
        session = await ZkSession.open(zookeeper, keys=keys, security=security)
        try:
            store = UserStore(session, Unreadable())
            stored = (await store.users([ADMIN])).get(ADMIN, {})
            made = {
                mechanism: ScramCredential.derive(mechanism, password, secrets.token_bytes(SALT_BYTES))
                for mechanism in SCRAM_MECHANISMS
                if not _has_password(stored.get(mechanism), mechanism, password)
            }
            if made:
                await store.alter(ADMIN, made, new_key=secrets.token_bytes(KEY_BYTES))
        finally:
            await session.close()

    def _files(self, name: str) -> certificates.CertificateFiles:
        return certificates.files_of(self._directory, name)

    def _issue(self, subject: Subject) -> None:
        if not certificates.is_current(self._directory, subject):
            certificates.issue(self._directory, subject)


def _has_password(stored: ScramCredential | None, mechanism: str, password: str) -> bool:
    return stored is not None and stored == ScramCredential.derive(mechanism, password, stored.salt, stored.iterations)


def _write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600 in one step."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.replace(path)
