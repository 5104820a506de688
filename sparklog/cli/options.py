"""Options that several commands share."""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Optional

import typer

from sparklog.errors import ConfigError

Bootstrap = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this on Python 3.10 as well
    typer.Option(
        "--bootstrap",
        "-b",
        envvar=["SPARKLOG_BOOTSTRAP", "SPARKLOG_BOOTSTRAP_SERVERS"],
        metavar="HOST:PORT,...",
        help="Addresses of brokers, some or all.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Give up after this.")]
Throttle = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option("--throttle", metavar="BYTES", help="A broker copies at most so much a second, as 50MB."),
]

#: Seconds. Whoever types a wrong address wants to know it now, not when the command's time is up.
FIRST_CONTACT_S = 2.5

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{rest}": factor**power
    for power, letter in enumerate("kmgt", 1)
    for rest, factor in (("", 1000), ("b", 1000), ("ib", 1024))
}


def byte_count(text: str | None, *, what: str) -> int:
    """``"50MB"`` or ``"64 KiB"`` as bytes; 0 for None. Raises ConfigError for anything else."""
    if text is None:
        return 0
    match = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?) *([a-z]*)(?:/s)?", text.strip().lower())
    if match is None or match[2] not in _UNITS or (count := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise ConfigError(f"{what} {text!r}: expected a number of bytes, as 1000000, 500kB, 50MB, 1GiB")
    return count


def servers(bootstrap: str | None) -> str:
    """The bootstrap servers. Raises ConfigError when none are named."""
    if not bootstrap:
        raise ConfigError("no brokers named: give --bootstrap host:port or set SPARKLOG_BOOTSTRAP_SERVERS")
    return bootstrap


def pairs(items: list[str], *, what: str) -> dict[str, str]:
    """``["a=1", "b=2"]`` as a mapping. Raises ConfigError for an item without ``=``."""
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"{what} {item!r}: expected name=value")
        found[name.strip()] = value.strip()
    return found


def moment(text: str) -> dt.datetime | None:
    """A point in time in ISO 8601, in local time unless it names a zone; None when the text is none."""
    try:
        return dt.datetime.fromisoformat(text.removesuffix("Z") + ("+00:00" if text.endswith("Z") else ""))
    except ValueError:
        return None
