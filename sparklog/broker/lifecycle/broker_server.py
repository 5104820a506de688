"""The sockets through which a broker is reached: its listeners, and local reads for readers on the same host."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence

from sparklog.broker.kafka.api_table import kafka_handlers
from sparklog.broker.kafka.call import NativeHandlers
from sparklog.broker.kafka.kafka_protocol import KafkaProtocol
from sparklog.broker.lifecycle.broker import Broker
from sparklog.broker.lifecycle.process_config import ProcessConfig
from sparklog.broker.lifecycle.request_table import handlers_of_tokens, request_handlers
from sparklog.broker.requests.dispatch import ConnectionHandler
from sparklog.broker.requests.local_reads import LocalReads, readers_socket
from sparklog.model import KAFKA_LISTENER, ListenerEndpoint, Principal, host_and_port
from sparklog.net.authentication import ListenerSecurity
from sparklog.net.descriptors import boot_id
from sparklog.net.peer_security import listener_tls
from sparklog.net.server import Server, serve
from sparklog.protocol.messages import HelloReply
from sparklog.security.delegation_tokens import DelegationToken
from sparklog.security.listeners import Listener, SecurityProtocol
from sparklog.storage.open_files import descriptors_for_clients

_log = logging.getLogger(__name__)

#: A tenth of the connections, but at most 1,000, is reserved for brokers and the controller. In a cluster of a hundred
#: brokers, each broker opens about four connections to each other broker.
_KEPT_PART, _MOST_KEPT = 10, 1000
#: The time between the revocation of a credential and the end of its connections. In this time a user who changed a
#: password gets the reply.
_REVOKED_S = 0.2
#: The number of ports that are tried for a Kafka listener, from the configured one on. Brokers of one host share the
#: settings of the cluster, so each of them takes the first free port.
_KAFKA_PORTS = 100
_LAST_PORT = 65_535


class BrokerServer:
    """The server of one broker: the sockets of its listeners, and the server of local reads.

    Not thread-safe: use it on the broker's event loop, from ``open`` to ``close``.
    """

    def __init__(self, config: ProcessConfig, broker: Broker) -> None:
        self._config = config
        self._listeners = config.listeners()
        #: The ports of the listeners' sockets, by listener name.
        self._ports: dict[str, int] = {}
        self._broker = broker
        self._context = broker.context
        self._local_reads: LocalReads | None = None
        self._server: Server | None = None

    @property
    def port(self) -> int:
        """Return the TCP port of the first listener for clients; -1 until the server listens."""
        return self._server.port if self._server is not None else -1

    @property
    def host(self) -> str:
        """Return the host of the broker's main address: the advertised host of the first listener for clients."""
        return self._listeners.client.advertised_host

    @property
    def advertised_port(self) -> int:
        """Return the port of the broker's main address: the advertised port of the first listener for clients.

        The result is -1 if the settings name no advertised port and the server does not listen yet.
        """
        return self._listeners.client.advertised_port or self.port

    @property
    def endpoints(self) -> tuple[ListenerEndpoint, ...]:
        """Return the advertised addresses of all named listeners. Call this only while the server listens.

        The result is empty if the settings name no listeners.
        """
        return self._listeners.endpoints(self._ports)

    @property
    def kafka_endpoints(self) -> tuple[ListenerEndpoint, ...]:
        """Return the advertised addresses for Kafka clients. Call this only while the server listens."""
        return self._listeners.kafka_endpoints(self._ports)

    @property
    def kafka_addresses(self) -> str:
        """Return the advertised addresses for Kafka clients, separated by commas.

        Call this only while the server listens.
        """
        return ",".join(host_and_port(endpoint.host, endpoint.port) for endpoint in self.kafka_endpoints)

    async def open(self) -> None:
        """Listen for clients, for other brokers and for the controller.

        Raises:
            OSError: the server cannot listen at one of its TCP addresses.
            ConfigError: a PEM file cannot be used.
        """
        settings, context = self._context.config, self._context
        listeners = self._listeners.all
        broker = self._broker
        self._open_local_reads(listeners)
        handlers = request_handlers(broker)
        handlers, of_tokens = (
            broker.quotas.limited(table, broker.fetches, broker.slices)
            for table in (handlers, handlers_of_tokens(broker, handlers))
        )
        max_connections = min(settings.max_connections, descriptors_for_clients())
        main = self._listeners.client
        self._server = server = await serve(
            lambda connection: ConnectionHandler(
                handlers, context.counters, connection, broker.connection_lost, of_tokens
            ),
            host=main.host,
            port=main.port,
            describe=self._describe,
            max_frame_bytes=settings.max_frame_bytes,
            max_in_flight=settings.max_in_flight,
            queued_max_bytes=settings.queued_max_bytes,
            max_connections=max_connections,
            kept_connections=min(_MOST_KEPT, max(1, max_connections // _KEPT_PART)),
            idle_s=settings.connections_max_idle_ms / 1000,
            within_host=settings.unix_sockets,
            credentials=context.credentials,
            security=self._security(main),
            connection_limits=broker.quotas.connections,
        )
        self._broker.users.revoked_listeners.append(self._on_user_revoked)
        self._broker.tokens.revoked_listeners.append(self._on_token_revoked)
        self._ports[main.name] = server.port
        for listener in listeners:
            if listener is not main:
                self._ports[listener.name] = await server.listen(listener.host, listener.port, self._security(listener))
        if self._listeners.kafka:
            await self._listen_for_kafka(server, NativeHandlers(handlers, of_tokens))

    def _open_local_reads(self, listeners: Sequence[Listener]) -> None:
        """Give segment files to readers on this host.

        Readers need a ticket unless any client could fetch all records.
        """
        broker, tickets = self._broker, self._broker.local_read_tickets
        plain = any(listener.protocol is SecurityProtocol.PLAINTEXT for listener in listeners)
        tickets.required = broker.authorizer is not None or not plain
        if self._config.control_socket:
            path = readers_socket(self._config.control_socket)
            self._local_reads = LocalReads(self._context, broker.partitions, broker.quotas, tickets, path)
            self._local_reads.open()
            tickets.socket = self._local_reads.address

    async def _listen_for_kafka(self, server: Server, natives: NativeHandlers) -> None:
        """Listen for Kafka clients. Raises the same errors as ``open``."""
        context, broker = self._context, self._broker
        protocol = KafkaProtocol(
            kafka_handlers(broker),
            natives,
            max_frame_bytes=context.config.max_frame_bytes,
            counters=context.counters,
            on_lost=broker.connection_lost,
            quotas=broker.quotas,
            slices=broker.slices,
        )
        directory = broker.partitions.directory
        for listener in self._listeners.kafka:
            name = KAFKA_LISTENER + listener.name
            security = self._security(listener)._replace(name=name)
            ports = _kafka_ports(listener, directory.meta.kafka_ports.get(listener.name, 0))
            for port in ports:
                try:
                    self._ports[name] = await server.listen(listener.host, port, security, protocol)
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or port == ports[-1]:
                        raise
            _log.info("Kafka clients: listener %s at %s:%d", listener.name, listener.host, self._ports[name])
        found = {listener.name: self._ports[KAFKA_LISTENER + listener.name] for listener in self._listeners.kafka}
        await asyncio.to_thread(directory.note_kafka_ports, found)
        server.offer_to_kafka_clients(self.kafka_addresses)

    def _describe(self, cid: int, version: int) -> HelloReply:
        context, tickets = self._context, self._broker.local_read_tickets
        return HelloReply(
            cid,
            version,
            context.broker_id,
            context.incarnation,
            context.cluster_id,
            context.config.max_frame_bytes,
            boot_id=boot_id(),
            local_socket="" if tickets.required else tickets.socket,
        )

    def _on_user_revoked(self, principal: Principal) -> None:
        assert self._server is not None
        asyncio.get_running_loop().call_later(_REVOKED_S, self._end_user, principal)

    def _end_user(self, principal: Principal) -> None:
        assert self._server is not None
        self._server.close_connections(principal)
        self._broker.local_read_tickets.end(principal)
        if not self._broker.users.has(principal.name):  # It may have created tokens until now.
            work = self._broker.tokens.end_tokens_of(principal)
            self._context.spawn(work, f"end the tokens of {principal}")

    def _on_token_revoked(self, token: DelegationToken) -> None:
        assert self._server is not None
        asyncio.get_running_loop().call_later(_REVOKED_S, self._end_token, token)

    def _end_token(self, token: DelegationToken) -> None:
        assert self._server is not None
        self._server.close_connections(token.owner, token_id=token.token_id)
        self._broker.local_read_tickets.end(token.owner, token.token_id)

    def _security(self, listener: Listener) -> ListenerSecurity:
        logins = self._broker.logins if listener.protocol.uses_sasl else None
        tls = listener_tls(self._context.config, listener)
        return ListenerSecurity(listener.name, logins, tls, self._broker.logins)

    def close_local_reads(self) -> None:
        """Stop giving segment files to readers on this host."""
        self._broker.local_read_tickets.socket = ""
        if self._local_reads is not None:
            self._local_reads.close()

    async def close(self) -> None:
        """Stop listening, and close all connections of clients."""
        if self._server is not None:
            await self._server.close()


def _kafka_ports(listener: Listener, earlier: int) -> list[int]:
    """Return the ports to try for a listener, in order. ``earlier`` is its port in the broker's last run, or 0.

    If the settings choose a single port or any free port, return only this choice. Clients that connect to an
    advertised port must find the broker there.
    """
    if listener.advertised_port or not listener.port:
        return [listener.port]
    last = min(listener.port + _KAFKA_PORTS - 1, _LAST_PORT)
    ports = list(range(listener.port, last + 1))
    return [earlier, *(port for port in ports if port != earlier)] if earlier in ports else ports
