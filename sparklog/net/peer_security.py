"""The security of connections from brokers and the controller to brokers: listener, TLS, and role certificates.

With an SSL listener each side presents a certificate and checks the certificate of the other side. With a PLAINTEXT
listener both sides prove that they know the cluster's secret.
"""

from __future__ import annotations

from typing import NamedTuple

from sparklog.config import BrokerConfig
from sparklog.errors import ConfigError
from sparklog.model import Principal
from sparklog.net.client_security import ClientSecurity
from sparklog.net.tls import PemFiles, ServerTls, client_context, tls_versions
from sparklog.security.listeners import InterBroker, Listener, inter_broker_listener
from sparklog.security.mapping_rules import MappingRules, subject_of
from sparklog.security.peer_certificates import Certificate, PeerCertificates
from sparklog.security.principals import parse_super_users


class PeerSecurity(NamedTuple):
    """The listener to which a broker or the controller connects, and the TLS settings of these connections."""

    listener: InterBroker = InterBroker()
    #: The TLS settings and the certificate of this process.
    client: ClientSecurity = ClientSecurity()
    principals: frozenset[Principal] = frozenset()
    rules: MappingRules = MappingRules()

    def certificates(self, cluster_id: str) -> PeerCertificates | None:
        """Return the rule that maps a TLS certificate to roles (broker, controller).

        Return None if brokers and the controller prove their roles by the cluster's secret and not by certificates.
        """
        if not self.listener.has_certificates:
            return None

        def principal_of(certificate: Certificate) -> Principal | None:
            return self.rules.principal(subject_of(dict(certificate)))

        return PeerCertificates(cluster_id, self.principals, principal_of)


def broker_peers(config: BrokerConfig) -> PeerSecurity:
    """Return the security settings of connections from a broker to other brokers.

    ``config`` has the settings of the broker that connects.

    Raises:
        ConfigError: a setting has the wrong syntax, or a PEM file cannot be used.
    """
    return _peers(config, config.ssl_certificate_location, config.ssl_key_location)


def controller_peers(config: BrokerConfig) -> PeerSecurity:
    """Return the security settings of connections from the controller to brokers.

    If no certificate is configured for the controller, it presents the brokers' certificate.

    Raises:
        ConfigError: a setting has the wrong syntax, or a PEM file cannot be used.
    """
    if not config.controller_ssl_certificate_location:
        return broker_peers(config)
    return _peers(config, config.controller_ssl_certificate_location, config.controller_ssl_key_location)


def _peers(config: BrokerConfig, certificate: str, key: str) -> PeerSecurity:
    listener = inter_broker_listener(config)
    if not listener.has_certificates:
        return PeerSecurity(listener)
    if not config.ssl_ca_location or not certificate:
        raise ConfigError(
            f"listener {listener.name} between brokers uses SSL: set ssl.ca.location, and ssl.certificate.location or"
            " controller.ssl.certificate.location"
        )
    client = ClientSecurity(listener.protocol, ca=config.ssl_ca_location, certificate=certificate, key=key)
    client_context(client)  # This reads the files.
    principals = parse_super_users(config.inter_broker_principals)
    return PeerSecurity(listener, client, principals, MappingRules(config.ssl_principal_mapping_rules))


def listener_tls(config: BrokerConfig, listener: Listener) -> ServerTls | None:
    """Return the TLS settings of a broker's listener, or None for a listener without TLS.

    Raises:
        ConfigError: the mapping rules have the wrong syntax, or a PEM file cannot be used.
    """
    if not listener.protocol.uses_tls:
        return None
    files = PemFiles(config.ssl_ca_location, config.ssl_certificate_location, config.ssl_key_location)
    rules, versions = MappingRules(config.ssl_principal_mapping_rules), tls_versions(config.ssl_enabled_protocols)
    return ServerTls(files, listener.client_auth, rules, versions)
