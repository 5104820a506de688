"""Tests of the TLS and the certificates by which brokers and the controller connect to brokers."""

from __future__ import annotations

import ssl

import pytest

from sparklog.config import BrokerConfig, broker_config
from sparklog.errors import ConfigError
from sparklog.net.peer_security import PeerSecurity, broker_peers, controller_peers, listener_tls
from sparklog.protocol.senders import SenderKind
from sparklog.security.listeners import SecurityProtocol, broker_listeners
from tests.net.certificates import Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("pki"))


def config(certificates: Certificates, **more: str) -> BrokerConfig:
    settings = {
        "listeners": "CLIENT://127.0.0.1:0,BROKER://127.0.0.1:0",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,BROKER:SSL",
        "inter.broker.listener.name": "BROKER",
        "ssl.ca.location": certificates.ca,
        "ssl.certificate.location": certificates.issue("broker", common_name="broker"),
    }
    return broker_config({**settings, **{name.replace("_", "."): value for name, value in more.items()}})


def test_the_controller_presents_its_own_certificate_or_the_brokers(certificates: Certificates) -> None:
    shared = config(certificates)
    assert controller_peers(shared).client == broker_peers(shared).client
    assert broker_peers(shared).client.protocol is SecurityProtocol.SSL
    own = certificates.issue("controller", common_name="controller")
    with_own = config(certificates, controller_ssl_certificate_location=own)
    assert controller_peers(with_own).client.certificate == own
    assert broker_peers(with_own).client.certificate == with_own.ssl_certificate_location


def test_only_listed_principals_get_roles_without_a_uri(certificates: Certificates) -> None:
    rules = {"ssl_principal_mapping_rules": "RULE:CN=([^,]*),.*/$1/", "inter_broker_principals": "User:ops"}
    found = broker_peers(config(certificates, **rules)).certificates("c")
    assert found is not None
    for name, roles in (("ops", {SenderKind.BROKER, SenderKind.CONTROLLER}), ("anna", set())):
        subject = ((("organizationName", "Example"),), (("commonName", name),))
        assert found.roles({"subject": subject}) == roles
    assert not found.roles({"subject": ((("organizationName", "ops"),),)}), "no rule matches this subject"


def test_a_plaintext_listener_gives_no_roles_by_certificates() -> None:
    assert broker_peers(broker_config({})) == PeerSecurity(rules=broker_peers(broker_config({})).rules)
    assert broker_peers(broker_config({})).certificates("c") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"ssl_certificate_location": "/nowhere.pem"},
        {"ssl_ca_location": "/nowhere.pem"},
        {"ssl_ca_location": ""},
        {"ssl_certificate_location": ""},
        {"ssl_principal_mapping_rules": "RULE:("},
        {"inter_broker_principals": "ops"},
    ],
)
def test_unusable_settings_are_refused_at_the_start(certificates: Certificates, wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        broker_peers(config(certificates, **wrong))
    with pytest.raises(ConfigError):
        controller_peers(config(certificates, controller_ssl_certificate_location="/nowhere.pem"))


@pytest.mark.parametrize(
    ("text", "oldest", "newest"),
    [
        ("TLSv1.2,TLSv1.3", ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3),
        ("TLSv1.3", ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3),
        ("TLSv1.2", ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2),
    ],
)
def test_a_listener_has_the_enabled_versions_of_tls(
    certificates: Certificates, text: str, oldest: ssl.TLSVersion, newest: ssl.TLSVersion
) -> None:
    found = config(certificates, ssl_enabled_protocols=text)
    plain, secured = broker_listeners(found, host="127.0.0.1", port=0).all
    assert listener_tls(found, plain) is None
    tls = listener_tls(found, secured)
    assert tls is not None
    context = tls.context()
    assert (context.minimum_version, context.maximum_version) == (oldest, newest)
    assert context.verify_mode is ssl.CERT_REQUIRED
