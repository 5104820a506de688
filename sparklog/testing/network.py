"""The protocol of a network that tests can cut.

``proxies.py`` implements it on any machine, ``namespaces.py`` with kernel features where the machine permits them.
Parties are each broker, the controller (all its processes together), ZooKeeper, and the clients (all others).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

CLIENT = "client"
CONTROLLER = "controller"
ZOOKEEPER = "zookeeper"
T = TypeVar("T")


def broker_party(broker_id: int) -> str:
    """Return the name of a broker for ``cut``."""
    return f"broker-{broker_id}"


class PartyAddress(NamedTuple):
    """The advertised address and the listening address of a broker; one port for both, 0: any free port."""

    host: str
    bind_host: str
    port: int


class Network(Protocol):
    """A network that can be cut.

    Nothing crosses a cut, not even the close of a connection; after ``heal`` connections continue.
    """

    @property
    def zookeeper_host(self) -> str:
        """Return the host on which ZooKeeper must listen."""

    def add_broker(self, broker_id: int) -> PartyAddress:
        """Make a place for a broker that is about to start."""

    def add_zookeeper(self, caller: str, target: str) -> str:
        """Return the address at which the processes of one party reach the ZooKeeper that listens at ``target``."""

    def inside(self, party: str, work: Callable[[], T]) -> T:
        """Run ``work`` at the place of ``party``: the threads, processes and sockets that it makes belong there."""

    def cut(self, sender: str, receiver: str, *, one_way: bool = False) -> None:
        """Cut the traffic from ``sender`` to ``receiver``, and the reverse direction unless ``one_way``."""

    def heal(self) -> None:
        """End all cuts."""

    def close(self) -> None:
        """Remove the network completely."""
