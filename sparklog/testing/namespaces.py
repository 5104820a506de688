"""A network that tests can partition, made of Linux network namespaces: each party has its own namespace.

One namespace with a bridge is the switch. A veth pair connects each party to the switch. The clients have no namespace
of their own: their veth pair ends in the namespace of this process. All addresses are configured in advance, without
ARP. To cut a direction, the sender gets an unused hardware address for the receiver, so that the packets are lost
silently. (A blackhole route would return an error to the sender.) After a cut, TCP retransmits; the longer the cut, the
longer this takes.

Only the link in the namespace of this process has a name. The namespaces exist as long as open files and processes
refer to them. So the kernel removes the namespaces and the link when this process and its children have ended, even
after SIGKILL.

Needs Linux, root and ``ip`` (iproute2).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from sparklog.errors import ClusterError
from sparklog.testing.network import CLIENT, CONTROLLER, ZOOKEEPER, PartyAddress, T, broker_party

_CLONE_NEWNET = 0x40000000
#: The address range for network benchmarks (RFC 2544), which is otherwise unused. The third byte distinguishes
#: clusters.
_ADDRESSES = "198.18"
_NOBODY = "02:73:6c:ff:ff:ff"
_IP_TIMEOUT_S = 10.0


class _Place(NamedTuple):
    """The place of a party: its namespace, as an open file, and its link to the switch."""

    namespace: int
    link: str
    number: int

    @property
    def hardware_address(self) -> str:
        return f"02:73:6c:00:00:{self.number:02x}"


class NamespaceNetwork:
    """A ``Network`` of namespaces.

    Not thread-safe: use it from one thread, which closes the network at the end. On a machine that does not permit
    namespaces, the constructor raises ClusterError with the reason.
    """

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise ClusterError(f"network namespaces are Linux's; this is {sys.platform}")
        if shutil.which("ip") is None:
            raise ClusterError("network namespaces need `ip` (iproute2), which is not installed")
        #: The name of the link in the namespace of this process.
        self.link = f"sl{secrets.token_hex(4)}"
        self._open: list[int] = []
        self._places: dict[str, _Place] = {}
        self._cuts: set[tuple[str, str]] = set()
        try:
            self._subnet = _free_subnet()
            home = self._keep(_own_namespace)
            self._switch = self._new_namespace()
            self._in(self._switch, lambda: _ip("link add switch type bridge", "link set switch up"))
            self._add(CLIENT, home, self.link)
            for party in (ZOOKEEPER, CONTROLLER):
                self._add(party, self._new_namespace(), "eth0")
        except BaseException:
            self.close()
            raise

    @property
    def zookeeper_host(self) -> str:
        return self._address(ZOOKEEPER)

    def add_broker(self, broker_id: int) -> PartyAddress:
        party = broker_party(broker_id)
        self._add(party, self._new_namespace(), "eth0")
        return PartyAddress(self._address(party), self._address(party), 0)

    def add_zookeeper(self, caller: str, target: str) -> str:
        return target

    def inside(self, party: str, work: Callable[[], T]) -> T:
        return self._in(self._places[party].namespace, work)

    def cut(self, sender: str, receiver: str, *, one_way: bool = False) -> None:
        for pair in [(sender, receiver)] if one_way else [(sender, receiver), (receiver, sender)]:
            self._cuts.add(pair)
            self._point(*pair, _NOBODY)

    def heal(self) -> None:
        for sender, receiver in self._cuts:
            self._point(sender, receiver, self._places[receiver].hardware_address)
        self._cuts.clear()

    def close(self) -> None:
        """Remove the network. A process that still runs in a namespace stays in it, without any link."""
        try:
            if CLIENT in self._places:
                _ip(f"link del {self.link}")
        finally:
            self._places.clear()
            for namespace in self._open:
                os.close(namespace)
            self._open.clear()

    # --- parties ---

    def _add(self, party: str, namespace: int, link: str) -> None:
        """Connect a party to the switch, and exchange addresses between this party and all others."""
        place = _Place(namespace, link, len(self._places) + 1)
        end = f"type veth peer name {link} address {place.hardware_address} netns {_path(namespace)}"
        port = f"port{place.number}"
        self._in(self._switch, lambda: _ip(f"link add {port} {end}", f"link set {port} master switch up"))
        others = list(self._places)
        self._places[party] = place
        up = ["link set lo up"] if party != CLIENT else []
        up += [f"addr add {self._address(party)}/24 dev {link}", f"link set {link} up"]
        self.inside(party, lambda: _ip(*up))
        for other in others:
            self._point(party, other, self._places[other].hardware_address)
            self._point(other, party, place.hardware_address)

    def _address(self, party: str) -> str:
        return f"{self._subnet}.{self._places[party].number}"

    def _point(self, sender: str, receiver: str, hardware_address: str) -> None:
        link = self._places[sender].link
        order = f"neigh replace {self._address(receiver)} lladdr {hardware_address} dev {link} nud permanent"
        self.inside(sender, lambda: _ip(order))

    # --- namespaces ---

    def _new_namespace(self) -> int:
        def make() -> int:
            _call("unshare", _CLONE_NEWNET)
            return _own_namespace()

        return self._keep(lambda: _in_a_thread(make))

    def _keep(self, namespace: Callable[[], int]) -> int:
        self._open.append(namespace())
        return self._open[-1]

    @staticmethod
    def _in(namespace: int, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread that has entered the namespace; return the result.

        Child processes inherit the namespace.
        """

        def enter() -> T:
            _call("setns", namespace, _CLONE_NEWNET)
            return work()

        return _in_a_thread(enter)


def _in_a_thread(work: Callable[[], T]) -> T:
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="namespace")
    thread.start()
    thread.join()
    return done.result()


def _call(function: str, *arguments: int) -> None:
    """Call a function of the C library that returns 0 on success. Python offers these functions only since 3.12."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        reason = os.strerror(ctypes.get_errno())
        raise ClusterError(f"this process may not make and enter network namespaces: {function}: {reason}")


def _own_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _path(namespace: int) -> str:
    return f"/proc/{os.getpid()}/fd/{namespace}"


def _free_subnet() -> str:
    taken = _ip("-o -4 addr show")
    for number in range(os.getpid() % 256, os.getpid() % 256 + 256):
        subnet = f"{_ADDRESSES}.{number % 256}"
        if f" {subnet}." not in taken:
            return subnet
    raise ClusterError(f"all networks of {_ADDRESSES}.0.0/16 are taken on this machine")


def _ip(*orders: str) -> str:
    """Run ``ip`` once for each list of arguments; return the output."""
    said = []
    for order in orders:
        done = subprocess.run(
            ["ip", *order.split()], capture_output=True, text=True, timeout=_IP_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise ClusterError(f"ip {order}: {done.stderr.strip()}")
        said.append(done.stdout)
    return "".join(said)
