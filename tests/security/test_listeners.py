"""Tests of the listeners that a broker's settings describe, and of the refusal to listen without protection."""

from __future__ import annotations

import pytest

from sparklog.config import broker_config
from sparklog.errors import ConfigError
from sparklog.model import ListenerEndpoint
from sparklog.security.listeners import (
    ClientAuth,
    Listeners,
    SecurityProtocol,
    broker_listeners,
    check_exposure,
    check_zookeeper_exposure,
    is_loopback,
)

TLS = {"ssl.certificate.location": "/broker.pem", "ssl.ca.location": "/ca.pem"}
TWO = {
    "listeners": "CLIENT://0.0.0.0:9092,BROKER://10.0.0.7:9093",
    "listener.security.protocol.map": "CLIENT:SASL_SSL,BROKER:SSL",
    "inter.broker.listener.name": "BROKER",
    **TLS,
}


def listeners_of(settings: dict[str, str], *, port: int = 9092, bind_host: str = "") -> Listeners:
    return broker_listeners(broker_config(settings), host="broker-1", port=port, bind_host=bind_host)


def test_a_broker_without_settings_has_one_plaintext_listener() -> None:
    found = listeners_of({}, bind_host="0.0.0.0")
    (only,) = found.all
    assert (only.name, only.protocol, only.host, only.port) == (
        "PLAINTEXT",
        SecurityProtocol.PLAINTEXT,
        "0.0.0.0",
        9092,
    )
    assert (only.advertised_host, found.client, found.inter_broker) == ("broker-1", only, only)
    assert found.endpoints({"PLAINTEXT": 9092}) == (), "the registration stays as in earlier releases"


def test_names_hosts_and_protocols_are_read() -> None:
    found = listeners_of(TWO)
    client, broker = found.all
    assert (client.name, client.protocol, client.host, client.port) == (
        "CLIENT",
        SecurityProtocol.SASL_SSL,
        "0.0.0.0",
        9092,
    )
    assert (broker.name, broker.protocol, broker.host, broker.port) == (
        "BROKER",
        SecurityProtocol.SSL,
        "10.0.0.7",
        9093,
    )
    assert (found.client, found.inter_broker) == (client, broker)
    assert found.endpoints({"CLIENT": 9092, "BROKER": 9093}) == (
        ListenerEndpoint("CLIENT", "SASL_SSL", "broker-1", 9092),
        ListenerEndpoint("BROKER", "SSL", "10.0.0.7", 9093),
    )


def test_advertised_listeners_replace_the_addresses() -> None:
    found = listeners_of({**TWO, "advertised.listeners": "CLIENT://kafka.example:443,BROKER://[fd00::1]:0"})
    assert found.endpoints({"CLIENT": 9092, "BROKER": 31_000}) == (
        ListenerEndpoint("CLIENT", "SASL_SSL", "kafka.example", 443),
        ListenerEndpoint("BROKER", "SSL", "fd00::1", 31_000),
    )


def test_an_unnamed_host_or_port_is_the_brokers_own() -> None:
    settings = {**TWO, "listeners": "CLIENT://:0,BROKER://:0"}
    client, broker = listeners_of(settings, port=9500, bind_host="127.0.0.1").all
    assert (client.host, client.port, client.advertised_host) == ("127.0.0.1", 9500, "broker-1")
    assert (broker.host, broker.port, broker.advertised_host) == ("127.0.0.1", 0, "broker-1"), "any free port"


def test_the_protocol_may_be_the_listeners_name() -> None:
    (only,) = listeners_of({"listeners": "ssl://127.0.0.1:9092", **TLS}).all
    assert (only.name, only.protocol, only.client_auth) == ("SSL", SecurityProtocol.SSL, ClientAuth.REQUESTED)


def test_a_listener_between_brokers_requires_certificates() -> None:
    client, broker = listeners_of({**TWO, "listener.security.protocol.map": "CLIENT:SSL,BROKER:SSL"}).all
    assert (client.client_auth, broker.client_auth) == (ClientAuth.NONE, ClientAuth.REQUIRED)
    assert (client.authenticates, broker.authenticates) == (False, True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"listeners": "CLIENT:9092"}, "expected NAME://host:port, found 'CLIENT:9092'"),
        ({"listeners": "CLIENT://host"}, "expected NAME://host:port"),
        ({"listeners": "CLI ENT://host:1"}, "expected NAME://host:port"),
        ({"listeners": "CLIENT://::1:9092"}, "expected NAME://host:port"),
        ({"listeners": "CLIENT://host:65536"}, "expected NAME://host:port"),
        ({"listeners": "CLIENT://a:1,client://b:2"}, "listener CLIENT is named twice"),
        ({"listeners": "CLIENT://a:9092,BROKER://a:9092"}, "CLIENT and BROKER have the same port 9092"),
        ({"inter.broker.listener.name": ""}, "choose one of the listeners CLIENT, BROKER"),
        ({"inter.broker.listener.name": "INTERNAL"}, "expected one of the listeners CLIENT, BROKER"),
        ({"inter.broker.listener.name": "CLIENT"}, "brokers do not log in by SASL"),
        ({"listener.security.protocol.map": "CLIENT:SASL_SSL"}, "listener BROKER has no security protocol"),
        ({"listener.security.protocol.map": "CLIENT:TLS,BROKER:SSL"}, "with one of PLAINTEXT, SSL"),
        ({"listener.security.protocol.map": "CLIENT:SSL,CLIENT:SSL"}, "listener CLIENT is named twice"),
        ({"listener.security.protocol.map": "CLIENT:SASL_PLAINTEXT,BROKER:SSL"}, "SASL_PLAINTEXT is for loopback only"),
        ({"advertised.listeners": "OTHER://host:1"}, "OTHER is not one of the listeners"),
        ({"advertised.listeners": "CLIENT://0.0.0.0:1"}, "clients cannot connect to '0.0.0.0'"),
        ({"ssl.certificate.location": ""}, "set ssl.certificate.location"),
        ({"ssl.ca.location": ""}, "set ssl.ca.location"),
        ({"listeners": ""}, "inter.broker.listener.name is set, but listeners is not"),
        ({"kafka.listeners": "K:29092"}, "kafka.listeners: expected NAME://host:port"),
        ({"kafka.listeners": "K://a:29092"}, "listener K has no security protocol"),
        ({"kafka.listeners": "SASL_PLAINTEXT://a:29092"}, "SASL_PLAINTEXT is for loopback only"),
        ({"kafka.advertised.listeners": "K://a:1"}, "K is not set, because kafka.listeners is empty"),
        (
            {"kafka.listeners": "SSL://a:1", "kafka.advertised.listeners": "K://a:1"},
            "K is not one of the listeners SSL",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listeners_of({**TWO, **changed})
    assert reason in str(caught.value)


def test_kafka_listeners_have_addresses_of_their_own() -> None:
    found = listeners_of(
        {
            **TWO,
            "listener.security.protocol.map": "CLIENT:SASL_SSL,BROKER:SSL,APPS:SASL_SSL",
            "kafka.listeners": "APPS://0.0.0.0:29092,SSL://:0",
            "kafka.advertised.listeners": "APPS://kafka.example:443",
        }
    )
    apps, ssl = found.kafka
    assert (apps.protocol, apps.host, apps.port) == (SecurityProtocol.SASL_SSL, "0.0.0.0", 29092)
    assert (ssl.protocol, ssl.host, ssl.port) == (SecurityProtocol.SSL, "broker-1", 0)
    assert found.kafka_endpoints({"kafka:APPS": 29092, "kafka:SSL": 5000}) == (
        ListenerEndpoint("APPS", "SASL_SSL", "kafka.example", 443),
        ListenerEndpoint("SSL", "SSL", "broker-1", 5000),
    )
    assert [listener.name for listener in found.all] == ["CLIENT", "BROKER"]
    assert listeners_of({}).kafka == ()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
    + [(host, False) for host in ("", "::", "10.0.0.1", "localhost.example", "127.0.0.1.example")],
)
def test_loopback_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"listeners": "PLAINTEXT://127.0.0.1:9092"}, False),
        ({"listeners": "PLAINTEXT://10.0.0.1:9092"}, True),
        ({"listeners": "PLAINTEXT://10.0.0.1:9092", "network.trusted": "true"}, False),
        ({"listeners": "SSL://10.0.0.1:9092", **TLS}, True),
        ({"listeners": "SSL://10.0.0.1:9092", "ssl.client.auth": "requested", **TLS}, True),
        ({"listeners": "SSL://10.0.0.1:9092", "ssl.client.auth": "required", **TLS}, False),
        (TWO, False),
        ({**TWO, "listener.security.protocol.map": "CLIENT:PLAINTEXT,BROKER:SSL"}, True),
        ({**TWO, "kafka.listeners": "SASL_SSL://0.0.0.0:29092"}, False),
        ({**TWO, "kafka.listeners": "PLAINTEXT://127.0.0.1:29092"}, False),
        ({**TWO, "kafka.listeners": "PLAINTEXT://0.0.0.0:29092"}, True),
        ({**TWO, "kafka.listeners": "PLAINTEXT://0.0.0.0:29092", "network.trusted": "true"}, False),
    ],
)
def test_only_protected_listeners_leave_the_machine(settings: dict[str, str], is_refused: bool) -> None:
    config, found = broker_config(settings), listeners_of(settings)
    if is_refused:
        with pytest.raises(ConfigError, match=r"broker 1 would listen at .* set network\.trusted=true"):
            check_exposure(found, trusted=config.network_trusted, who="broker 1")
    else:
        check_exposure(found, trusted=config.network_trusted, who="broker 1")


def test_an_embedded_zookeeper_stays_on_loopback() -> None:
    check_zookeeper_exposure("127.0.0.1", trusted=False)
    check_zookeeper_exposure("host-1", trusted=True)
    with pytest.raises(ConfigError, match=r"ZooKeeper would listen at host-1 .* network\.trusted=true"):
        check_zookeeper_exposure("host-1", trusted=False)
