"""A network that can be cut: what a cluster of processes asks of one, whichever way it is made.

``proxies.py`` makes it anywhere, ``namespaces.py`` out of the kernel's own means where the machine permits. Parties are
brokers, the controller (all its processes together), ZooKeeper, and clients: everyone else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

CLIENT = "client"
CONTROLLER = "controller"
ZOOKEEPER = "zookeeper"
T = TypeVar("T")


def broker_party(broker_id: int) -> str:
    """The name of a broker in ``cut``."""
    return f"broker-{broker_id}"


class BrokerAddress(NamedTuple):
    """Where others find a broker, and where it listens; one port for both, 0: any that is free there."""

    host: str
    bind_host: str
    port: int


class Network(Protocol):
    """Across a cut nothing is heard, not even that a connection was closed; after ``heal`` connections go on."""

    @property
    def zookeeper_host(self) -> str:
        """Where ZooKeeper is to listen."""

    def add_broker(self, broker_id: int) -> BrokerAddress:
        """Make a place for a broker that is about to start."""

    def add_zookeeper(self, caller: str, target: str) -> str:
        """Where the processes of one party find the ZooKeeper that listens at ``target``."""

    def inside(self, party: str, work: Callable[[], T]) -> T:
        """Do ``work`` at the place of ``party``: threads, processes and sockets that it makes belong there."""

    def cut(self, sender: str, receiver: str, *, one_way: bool = False) -> None:
        """``receiver`` hears no more of ``sender``, nor the other way round unless ``one_way``."""

    def heal(self) -> None:
        """All cuts end."""

    def close(self) -> None:
        """Leave nothing of it behind."""
