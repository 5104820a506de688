"""The interface of a network that tests can partition.

``proxies.py`` implements it with TCP proxies on any machine, ``namespaces.py`` with network namespaces where the
machine permits them. A party is an end of the connections that tests can cut. The parties are: each broker, the
controller (all controller processes together), ZooKeeper, and the clients (all other processes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

CLIENT = "client"
CONTROLLER = "controller"
ZOOKEEPER = "zookeeper"
T = TypeVar("T")


def broker_party(broker_id: int) -> str:
    """Return the broker's name in the network, as the methods of ``Network`` expect it."""
    return f"broker-{broker_id}"


class PartyAddress(NamedTuple):
    """The addresses of a broker: the host that it advertises, the host on which it listens, and the port of both.

    Port 0 means any free port.
    """

    host: str
    bind_host: str
    port: int


class Network(Protocol):
    """The interface of a network whose connections tests can cut.

    Nothing crosses a cut, not even the close of a connection. After ``heal`` the connections continue.
    """

    @property
    def zookeeper_host(self) -> str:
        """Return the host on which ZooKeeper must listen."""

    def add_broker(self, broker_id: int) -> PartyAddress:
        """Prepare the network for a broker that is about to start; return the broker's addresses."""

    def add_zookeeper(self, caller: str, target: str) -> str:
        """Prepare the network for connections from the party ``caller`` to the ZooKeeper at ``target``.

        Return the address at which the processes of ``caller`` reach this ZooKeeper.
        """

    def inside(self, party: str, work: Callable[[], T]) -> T:
        """Run ``work`` as ``party``: the threads, processes and sockets that it creates belong to the party."""

    def cut(self, sender: str, receiver: str, *, one_way: bool = False) -> None:
        """Cut the traffic from ``sender`` to ``receiver``, and the reverse direction too unless ``one_way``."""

    def heal(self) -> None:
        """End all cuts."""

    def close(self) -> None:
        """Remove the network completely."""
