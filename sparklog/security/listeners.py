"""The listeners of a broker, configured by Kafka's settings.

This module is pure.

The setting ``listeners`` has the addresses to which the broker binds its sockets. ``advertised.listeners`` has the
addresses to which clients and other brokers connect. ``listener.security.protocol.map`` has the security protocols.
Brokers and the controller connect to each other through the listener ``inter.broker.listener.name``. Without these
settings a broker has one PLAINTEXT listener at the address that its supervisor chooses.

``kafka.listeners`` and ``kafka.advertised.listeners`` have the listeners of Kafka's protocol. They share the map of
security protocols and the rules below. Only Kafka clients use them.

A listener that other machines can reach must have TLS and authentication, unless ``network.trusted`` is set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from ipaddress import ip_address
from typing import NamedTuple

from sparklog.config import BrokerConfig
from sparklog.errors import ConfigError
from sparklog.model import DEFAULT_LISTENER, KAFKA_LISTENER, MAX_LISTENERS, ListenerEndpoint, host_and_port

_NAME = re.compile(r"[A-Z0-9_-]{1,100}\Z")
_LISTENER = re.compile(r"(?P<name>[^:/]*)://(?:\[(?P<ipv6>[^\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})\Z")
#: The bind addresses that mean all addresses of the machine.
_WILDCARDS = frozenset({"", "0.0.0.0", "::"})
_TRUST = "set network.trusted=true (--trusted-network) if only trusted programs reach it"


class SecurityProtocol(Enum):
    """A security protocol of a listener, with Kafka's name."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"

    @property
    def uses_tls(self) -> bool:
        return self in {SecurityProtocol.SSL, SecurityProtocol.SASL_SSL}

    @property
    def uses_sasl(self) -> bool:
        return self in {SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL}


class ClientAuth(Enum):
    """A value of ``ssl.client.auth``: whether a TLS listener requests or requires certificates of clients."""

    NONE = "none"
    REQUESTED = "requested"
    REQUIRED = "required"


class Listener(NamedTuple):
    """A listener of a broker: its name, its security protocol, and the addresses that it binds and advertises."""

    name: str
    protocol: SecurityProtocol
    #: The address that the socket is bound to; empty for every address.
    host: str
    #: The port that the socket is bound to; 0 for any free port.
    port: int
    advertised_host: str
    #: The advertised port; 0 for the port that the socket is bound to.
    advertised_port: int
    client_auth: ClientAuth = ClientAuth.NONE

    @property
    def authenticates(self) -> bool:
        """Return whether every connection uses TLS and every client must authenticate."""
        return self.protocol is SecurityProtocol.SASL_SSL or (
            self.protocol is SecurityProtocol.SSL and self.client_auth is ClientAuth.REQUIRED
        )

    def endpoint(self, port: int) -> ListenerEndpoint:
        """Return the advertised address. ``port`` is the port that the socket is bound to."""
        return ListenerEndpoint(self.name, self.protocol.value, self.advertised_host, self.advertised_port or port)


class Listeners(NamedTuple):
    """All listeners of one broker, and the listener that other brokers and the controller use."""

    all: tuple[Listener, ...]
    inter_broker: Listener
    #: Whether the setting ``listeners`` defines these listeners.
    named: bool
    #: The listeners of Kafka's protocol.
    kafka: tuple[Listener, ...] = ()

    @property
    def client(self) -> Listener:
        """Return the first listener for clients, whose address is the broker's main address."""
        return next((listener for listener in self.all if listener is not self.inter_broker), self.inter_broker)

    def endpoints(self, ports: Mapping[str, int]) -> tuple[ListenerEndpoint, ...]:
        """Return the listeners' advertised addresses. ``ports`` has the ports of the sockets, by listener name.

        The result is empty if the settings name no listeners, because the broker's main address is then enough.
        """
        if not self.named:
            return ()
        return tuple(listener.endpoint(ports[listener.name]) for listener in self.all)

    def kafka_endpoints(self, ports: Mapping[str, int]) -> tuple[ListenerEndpoint, ...]:
        """Return the advertised addresses of the listeners of Kafka's protocol.

        ``ports`` has the ports of the sockets, by listener name with the prefix ``KAFKA_LISTENER``.
        """
        return tuple(listener.endpoint(ports[KAFKA_LISTENER + listener.name]) for listener in self.kafka)


def is_loopback(host: str) -> bool:
    """Return whether only programs on the same machine can reach a socket that is bound to ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def broker_listeners(config: BrokerConfig, *, host: str, port: int, bind_host: str = "") -> Listeners:
    """Return the listeners of a broker with these settings.

    ``host`` and ``port`` are the broker's main address. ``bind_host`` is the address to bind to if it differs from
    ``host``. The settings take precedence: these arguments apply only where the settings leave a host empty, or where
    the port of the first client listener is 0.

    Raises:
        ConfigError: a setting has the wrong syntax, or the settings contradict each other.
    """
    protocols = _protocols(config.listener_security_protocol_map)
    bound = _parse("listeners", config.listeners)
    advertised = _parse("advertised.listeners", config.advertised_listeners)
    if len(bound) > MAX_LISTENERS:
        raise ConfigError(f"listeners: expected at most {MAX_LISTENERS}, found {len(bound)}")
    if not bound:
        given = (config.advertised_listeners and "advertised.listeners") or (
            config.inter_broker_listener_name and "inter.broker.listener.name"
        )
        if given:
            raise ConfigError(f"{given} is set, but listeners is not: set listeners")
        only = Listener(DEFAULT_LISTENER, SecurityProtocol.PLAINTEXT, bind_host or host, port, host, 0)
        return Listeners((only,), only, named=False, kafka=_kafka_listeners(config, host=host, bind_host=bind_host))
    if unknown := [name for name in advertised if name not in bound]:
        raise ConfigError(f"advertised.listeners: {unknown[0]} is not one of the listeners {', '.join(bound)}")
    inter_broker = _inter_broker_name(config.inter_broker_listener_name, tuple(bound))
    main = next((name for name in bound if name != inter_broker), inter_broker)
    found = []
    for name, (own_host, own_port) in bound.items():
        protocol = _protocol(name, protocols)
        shown_host, shown_port = advertised.get(name, ("", 0))
        found.append(
            Listener(
                name,
                protocol,
                own_host or bind_host or host,
                own_port or (port if name == main else 0),
                shown_host or (host if own_host in _WILDCARDS else own_host),
                shown_port,
                _client_auth(config, protocol, is_inter_broker=name == inter_broker, alone=len(bound) == 1),
            )
        )
    chosen = next(listener for listener in found if listener.name == inter_broker)
    if chosen.protocol.uses_sasl:
        raise ConfigError(
            f"listener {chosen.name}: brokers do not log in by SASL: set inter.broker.listener.name to a"
            " listener with SSL"
        )
    _check(found, config)
    kafka = _kafka_listeners(config, host=host, bind_host=bind_host)
    return Listeners(tuple(found), chosen, named=True, kafka=kafka)


def _kafka_listeners(config: BrokerConfig, *, host: str, bind_host: str) -> tuple[Listener, ...]:
    """Return the listeners of Kafka's protocol. Raises ConfigError."""
    protocols = _protocols(config.listener_security_protocol_map)
    bound = _parse("kafka.listeners", config.kafka_listeners)
    advertised = _parse("kafka.advertised.listeners", config.kafka_advertised_listeners)
    if len(bound) > MAX_LISTENERS:
        raise ConfigError(f"kafka.listeners: expected at most {MAX_LISTENERS}, found {len(bound)}")
    if unknown := [name for name in advertised if name not in bound]:
        found = f"one of the listeners {', '.join(bound)}" if bound else "set, because kafka.listeners is empty"
        raise ConfigError(f"kafka.advertised.listeners: {unknown[0]} is not {found}")
    listeners = []
    for name, (own_host, port) in bound.items():
        protocol = _protocol(name, protocols)
        shown_host, shown_port = advertised.get(name, ("", 0))
        client_auth = _client_auth(config, protocol, is_inter_broker=False, alone=False)
        shown = shown_host or (host if own_host in _WILDCARDS else own_host)
        listeners.append(Listener(name, protocol, own_host or bind_host or host, port, shown, shown_port, client_auth))
    _check(listeners, config)
    return tuple(listeners)


class InterBroker(NamedTuple):
    """The listener through which brokers and the controller connect to brokers: its name and security protocol."""

    name: str = DEFAULT_LISTENER
    protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT

    @property
    def has_certificates(self) -> bool:
        """Return whether brokers and the controller authenticate by TLS certificates.

        Otherwise they authenticate by the cluster's secret.
        """
        return self.protocol is SecurityProtocol.SSL


def inter_broker_listener(config: BrokerConfig) -> InterBroker:
    """Return the listener for brokers and the controller.

    Raises ConfigError if a setting has the wrong syntax, or the settings contradict each other.
    """
    names = tuple(_parse("listeners", config.listeners))
    if not names:
        return InterBroker()
    name = _inter_broker_name(config.inter_broker_listener_name, names)
    return InterBroker(name, _protocol(name, _protocols(config.listener_security_protocol_map)))


def check_exposure(listeners: Listeners, *, trusted: bool, who: str) -> None:
    """Refuse listeners that other machines can reach without TLS and authentication, unless ``trusted`` is set.

    ``trusted`` says that only trusted programs reach the network. ``who`` names the process in the error.

    Raises:
        ConfigError: there is an exposed listener. The message names the settings to change.
    """
    named = [("listeners", listener) for listener in listeners.all]
    named += [("kafka.listeners", listener) for listener in listeners.kafka]
    for setting, listener in named:
        if trusted or listener.authenticates or is_loopback(listener.host):
            continue
        address = host_and_port(listener.host or "0.0.0.0", listener.port)
        raise ConfigError(
            f"{who} would listen at {address} without TLS and authentication: {_TRUST}, or set {setting} to SSL with"
            " ssl.client.auth=required or to SASL_SSL"
        )


def check_zookeeper_exposure(host: str, *, trusted: bool) -> None:
    """Refuse an embedded ZooKeeper that other machines can reach without TLS, unless ``trusted`` is set.

    ``trusted`` says that only trusted programs reach the network.

    Raises:
        ConfigError: other machines could reach ZooKeeper. The message names the settings to change.
    """
    if not trusted and not is_loopback(host):
        raise ConfigError(
            f"the embedded ZooKeeper would listen at {host} without TLS and authentication: {_TRUST}, or set"
            " zookeeper.ssl.client.enable and its PEM files, or name a ZooKeeper of your own with --zookeeper"
        )


def _parse(setting: str, text: str) -> dict[str, tuple[str, int]]:
    """Return the (host, port) of each listener in the text, by name, in order. Raises ConfigError."""
    found: dict[str, tuple[str, int]] = {}
    ports: dict[int, str] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        match = _LISTENER.match(part)
        name = match["name"].upper() if match else ""
        if match is None or not _NAME.match(name) or int(match["port"]) > 65_535:
            raise ConfigError(f"{setting}: expected NAME://host:port, found {part!r}")
        port = int(match["port"])
        if name in found:
            raise ConfigError(f"{setting}: listener {name} is named twice")
        if port in ports and setting in {"listeners", "kafka.listeners"}:
            raise ConfigError(f"{setting}: {ports[port]} and {name} have the same port {port}")
        found[name] = (match["ipv6"] or match["host"] or "", port)
        if port:
            ports[port] = name
    return found


def _protocols(text: str) -> dict[str, SecurityProtocol]:
    found: dict[str, SecurityProtocol] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, colon, protocol = (word.strip().upper() for word in part.partition(":"))
        if not colon or not _NAME.match(name) or protocol not in SecurityProtocol.__members__:
            raise ConfigError(
                f"listener.security.protocol.map: expected NAME:PROTOCOL with one of"
                f" {', '.join(SecurityProtocol.__members__)}, found {part!r}"
            )
        if name in found:
            raise ConfigError(f"listener.security.protocol.map: listener {name} is named twice")
        found[name] = SecurityProtocol[protocol]
    return found


def _protocol(name: str, protocols: Mapping[str, SecurityProtocol]) -> SecurityProtocol:
    if name in protocols:
        return protocols[name]
    if name in SecurityProtocol.__members__:
        return SecurityProtocol[name]
    raise ConfigError(
        f"listener {name} has no security protocol: add it to listener.security.protocol.map, such as {name}:SSL"
    )


def _inter_broker_name(text: str, names: tuple[str, ...]) -> str:
    chosen = text.upper()
    if not chosen and len(names) > 1:
        raise ConfigError(f"inter.broker.listener.name: choose one of the listeners {', '.join(names)}")
    if chosen and chosen not in names:
        raise ConfigError(f"inter.broker.listener.name={chosen}: expected one of the listeners {', '.join(names)}")
    return chosen or names[0]


def _client_auth(config: BrokerConfig, protocol: SecurityProtocol, *, is_inter_broker: bool, alone: bool) -> ClientAuth:
    """Return the policy of a listener for certificates of clients.

    ``ssl.client.auth`` does not apply to SASL_SSL, as in Kafka. Brokers always present a certificate. So the listener
    between brokers requires one, or only requests it if clients use the same listener.
    """
    if protocol is not SecurityProtocol.SSL:
        return ClientAuth.NONE
    chosen = ClientAuth(config.ssl_client_auth)
    if is_inter_broker and not alone:
        return ClientAuth.REQUIRED
    return ClientAuth.REQUESTED if is_inter_broker and chosen is ClientAuth.NONE else chosen


def _check(listeners: list[Listener], config: BrokerConfig) -> None:
    """Check that the settings do not contradict each other. Raises ConfigError."""
    for listener in listeners:
        if listener.protocol is SecurityProtocol.SASL_PLAINTEXT and not is_loopback(listener.host):
            raise ConfigError(
                f"listener {listener.name}: SASL_PLAINTEXT is for loopback only, found"
                f" {host_and_port(listener.host, listener.port)}: use SASL_SSL"
            )
        if listener.protocol.uses_tls and not config.ssl_certificate_location:
            raise ConfigError(
                f"listener {listener.name} uses {listener.protocol.value}: set ssl.certificate.location to a PEM file"
            )
        if listener.client_auth is not ClientAuth.NONE and not config.ssl_ca_location:
            raise ConfigError(
                f"listener {listener.name} checks the certificates of its clients: set ssl.ca.location to a PEM file"
            )
        if listener.advertised_host in _WILDCARDS:
            raise ConfigError(f"listener {listener.name}: clients cannot connect to {listener.advertised_host!r}")
