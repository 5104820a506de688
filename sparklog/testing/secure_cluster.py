"""A real cluster with TLS and logins: clients log in by SCRAM, and brokers and the controller have certificates.

It needs the optional library ``cryptography``.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparklog.client.admin.users import new_credentials
from sparklog.cluster.certificates import CertificateFiles, Subject, create_ca, issue
from sparklog.model import BrokerRegistration, ListenerEndpoint
from sparklog.net.blocking import BlockingConnection
from sparklog.net.client_security import ClientSecurity
from sparklog.net.greeting import Credentials
from sparklog.net.password import Password
from sparklog.net.peer_security import PeerSecurity
from sparklog.protocol.proof import Identity, KeyRing
from sparklog.protocol.sasl import SCRAM_SHA_256
from sparklog.protocol.scram import MIN_ITERATIONS
from sparklog.security.listeners import InterBroker, SecurityProtocol
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.unreadable import Unreadable
from sparklog.zk.user_store import KEY_BYTES, UserStore

#: The listener between brokers.
INTER_BROKER = InterBroker("BROKER", SecurityProtocol.SSL)
_LISTENERS = {
    "listeners": "CLIENT://:0,BROKER://:0",
    "listener.security.protocol.map": "CLIENT:SASL_SSL,BROKER:SSL",
    "inter.broker.listener.name": "BROKER",
}


class SecureCluster(ProcessCluster):
    """A cluster of processes with the listeners CLIENT (SASL_SSL) and BROKER (SSL). The user ``admin`` is a super user.

    ``client_security`` has the login of ``admin``, and the file ``client_config`` has the same settings. The directory
    ``pki`` has the certificate authority, and the certificates ``broker`` and ``controller``.
    """

    def __enter__(self) -> SecureCluster:
        super().__enter__()
        return self

    @property
    def pki(self) -> Path:
        """Return the directory of the certificate authority."""
        return self.base_dir / "pki"

    @property
    def client_config(self) -> Path:
        """Return the path of the settings file with which clients log in as ``admin``."""
        return self.base_dir / "client.conf"

    @property
    def ca(self) -> str:
        """Return the path of the certificate authority's certificate, a PEM file."""
        return str(self.pki / "ca.pem")

    def secure(self) -> None:
        """Create the certificate authority, the certificates, and the user ``admin``."""
        if not self.pki.exists():
            create_ca(self.pki)
        for role in ("broker", "controller"):
            self.issue(role)
        broker, controller = self.pki / "broker", self.pki / "controller"
        tls = {
            "ssl.ca.location": self.ca,
            "ssl.certificate.location": f"{broker}.pem",
            "ssl.key.location": f"{broker}-key.pem",
            "controller.ssl.certificate.location": f"{controller}.pem",
            "controller.ssl.key.location": f"{controller}-key.pem",
        }
        self.settings = {**_LISTENERS, "super.users": "User:admin", **tls, **self.settings}
        password = secrets.token_urlsafe(16)
        self.client_security = self.user("admin", password)
        self.client_config.touch(mode=0o600)
        self.client_config.write_text(
            f"security.protocol = SASL_SSL\nssl.ca.location = {self.ca}\nsasl.mechanism = {SCRAM_SHA_256}\n"
            f"sasl.username = admin\nsasl.password = {password}\n"
        )

    def issue(self, role: str, *, into: Path | None = None) -> CertificateFiles:
        """Issue a new certificate for ``role``. It replaces the earlier one, and running processes load it."""
        hosts = {"127.0.0.1", "localhost", *(slot.host for slot in self.slots.values())}
        return issue(
            self.pki, Subject(role, hosts=tuple(sorted(hosts)), role=role, cluster_id=self.cluster_id), into=into
        )

    def user(self, name: str, password: str, *, iterations: int = MIN_ITERATIONS) -> ClientSecurity:
        """Create a user, or change the user's password. Return the security settings of the user's clients."""
        credentials = new_credentials(password, [SCRAM_SHA_256], iterations)

        async def write(store: ClusterStore) -> None:
            users = UserStore(store.session, Unreadable())
            await users.alter(name, credentials, new_key=secrets.token_bytes(KEY_BYTES))

        self.ask_zookeeper(write)
        return ClientSecurity(
            SecurityProtocol.SASL_SSL,
            ca=self.ca,
            mechanism=SCRAM_SHA_256,
            username=name,
            password=Password(password, transferable=True),
        )

    def endpoint(self, broker_id: int, listener: str = INTER_BROKER.name) -> ListenerEndpoint:
        """Return the address of one listener of a broker that runs."""

        async def registrations(store: ClusterStore) -> Mapping[int, BrokerRegistration]:
            return {found.broker_id: found for found in await store.live_brokers()}

        found = self.ask_zookeeper(registrations)[broker_id]
        return next(endpoint for endpoint in found.endpoints if endpoint.name == listener)

    def connect_as(
        self, broker_id: int, identity: Identity | None, files: CertificateFiles | None, **options: Any
    ) -> BlockingConnection:
        """Open a connection to the listener BROKER. The connection claims to come from ``identity``.

        ``files`` is the certificate to present, or None.
        """
        certificate, key = (str(files.certificate), str(files.key)) if files is not None else ("", "")
        security = ClientSecurity(SecurityProtocol.SSL, ca=self.ca, certificate=certificate, key=key)
        own = PeerSecurity(INTER_BROKER).certificates(self.cluster_id)
        credentials = Credentials(KeyRing(), lambda: identity, own) if identity is not None else None
        endpoint = self.endpoint(broker_id)
        return BlockingConnection(
            endpoint.host, endpoint.port, client_id="test", credentials=credentials, security=security, **options
        )
