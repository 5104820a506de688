"""Tests of printed addresses: a user can type them again, including IPv6 hosts."""

from __future__ import annotations

import re

import pytest

from sparklog.client.cluster.bootstrap import Address, parse_bootstrap
from sparklog.errors import BrokerError, ConfigError
from sparklog.model import host_and_port
from sparklog.net.blocking import BlockingConnection
from tests.cli.in_process import in_process
from tests.conftest import ROOT


@pytest.mark.parametrize(("host", "shown"), [("::1", "[::1]:1"), ("fe80::1%eth0", "[fe80::1%eth0]:1"), ("h", "h:1")])
def test_a_shown_address_can_be_parsed(host: str, shown: str) -> None:
    assert host_and_port(host, 1) == shown == str(Address(host, 1))
    assert parse_bootstrap(shown) == (Address(host, 1),)


def test_an_ipv6_address_without_brackets_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match=r"'::1:1' found; expected host:port: an IPv6 address needs brackets"):
        parse_bootstrap("::1:1")


def test_a_connection_error_names_the_address_as_typed() -> None:
    with pytest.raises(BrokerError, match=r"\[::1\]:1\b"):
        BlockingConnection("::1", 1, client_id="c", timeout_s=5.0)
    assert "[::1]:1" in in_process("topics", "list", "--bootstrap", "[::1]:1").err


def test_no_module_joins_host_and_port_by_hand() -> None:
    by_hand = re.compile(r"host\}:\{")
    found = [path for path in ROOT.glob("sparklog/**/*.py") if by_hand.search(path.read_text())]
    # These are the tests' own addresses, on IPv4.
    assert [str(path) for path in found if "testing" not in path.parts] == [str(ROOT / "sparklog" / "model.py")]
