"""Options that several commands share, and what becomes of them: a client, a moment, an answer to "really?"."""

from __future__ import annotations

import contextlib
import datetime as dt
import difflib
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Optional

import typer

from sparklog.client.admin.admin import Admin
from sparklog.client.errors import ClientTimeout
from sparklog.errors import BrokerError, ConfigError, ErrorCode, SparklogError
from sparklog.escaping import escaped

_BOOTSTRAP_VARIABLES = ["SPARKLOG_BOOTSTRAP", "SPARKLOG_BOOTSTRAP_SERVERS"]


def topic_names(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell: topics that begin so. Silent where nobody answers at once."""
    found = context.params.get("bootstrap") or _from_environment()
    if not found:
        return []
    topic, colon, _ = incomplete.partition(":")
    try:
        with Admin(found, timeout_s=1.0, first_contact_s=0.5) as admin:
            names = [] if colon else admin.list_topics()
            return [name for name in names if name.startswith(topic) and name.isprintable()]
    except SparklogError:
        return []


def group_names(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell, as ``topic_names``."""
    found = context.params.get("bootstrap") or _from_environment()
    if not found:
        return []
    try:
        with Admin(found, timeout_s=1.0, first_contact_s=0.5) as admin:
            # A name that does not print cannot be typed, and the shell would show it as it is.
            return [name for name in admin.list_groups() if name.startswith(incomplete) and name.isprintable()]
    except SparklogError:
        return []


def _from_environment() -> str:
    import os

    return next((os.environ[name] for name in _BOOTSTRAP_VARIABLES if os.environ.get(name)), "")


Bootstrap = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this on Python 3.10 as well
    typer.Option(
        "--bootstrap",
        "-b",
        envvar=_BOOTSTRAP_VARIABLES,
        metavar="HOST:PORT,...",
        help="Addresses of brokers, some or all.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Give up after this.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Throttle = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option("--throttle", metavar="BYTES", help="A broker copies at most so much a second, as 50MB."),
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, autocompletion=topic_names)]
Topics = Annotated[list[str], typer.Argument(metavar="TOPIC...", show_default=False, autocompletion=topic_names)]

#: Seconds. Whoever types a wrong address wants to know it now, not when the command's time is up.
FIRST_CONTACT_S = 2.5

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{rest}": factor**power
    for power, letter in enumerate("kmgt", 1)
    for rest, factor in (("", 1000), ("b", 1000), ("ib", 1024))
}
_SPAN_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
#: What ``point_in_time`` takes, for error messages.
TIMES = "a time as 2026-01-31T12:00 (UTC unless it names a zone), or a span as -90s, -15m, -1h, -7d"


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
        raise ConfigError("no brokers named: give --bootstrap host:port or set SPARKLOG_BOOTSTRAP")
    return bootstrap


@contextlib.contextmanager
def open_admin(bootstrap: str | None, timeout_s: float) -> Iterator[Admin]:
    """A client for one command. An error about a topic that is not there names one that is nearly called so."""
    with Admin(servers(bootstrap), timeout_s=timeout_s, first_contact_s=FIRST_CONTACT_S) as admin:
        try:
            yield admin
        except BrokerError as error:
            if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION or not (near := _nearest(admin, str(error))):
                raise
            raise BrokerError(error.code, f"{error.detail or 'no such topic'}; did you mean {near!r}?") from error


def _nearest(admin: Admin, message: str) -> str:
    """The topic that comes nearest to some word of ``message``; "" for none, or when one of the words is a topic."""
    words = re.findall(r"[A-Za-z0-9._-]+", message)
    try:
        there = admin.list_topics()
    except (BrokerError, ClientTimeout):
        return ""
    if set(words) & set(there):
        return ""  # it is the partition that is not there
    near = [match for word in words for match in difflib.get_close_matches(word, there, n=1, cutoff=0.7)]
    return near[0] if near else ""


def confirm(question: str, what: str, *, yes: bool) -> None:
    """Ask on a terminal; elsewhere ``--yes`` is the answer.

    Raises:
        typer.Abort: the answer is no.
        ConfigError: there is nobody to ask.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}: nobody is there to be asked: give --yes")
    typer.confirm(escaped(question), abort=True, err=True)


def pairs(items: list[str], *, what: str) -> dict[str, str]:
    """``["a=1", "b=2"]`` as a mapping. Raises ConfigError for an item without ``=``."""
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"{what} {item!r}: expected name=value")
        found[name.strip()] = value.strip()
    return found


def point_in_time(text: str) -> dt.datetime | None:
    """Return a time in ISO 8601, which is UTC unless it names a zone, or the time as long ago as ``-1h`` says; None for
    what is neither."""
    if span := re.fullmatch(r"-([0-9]+)([smhd])", text):
        return dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=int(span[1]) * _SPAN_S[span[2]])
    try:
        found = dt.datetime.fromisoformat(text.removesuffix("Z") + ("+00:00" if text.endswith("Z") else ""))
        return found if found.tzinfo is not None else found.replace(tzinfo=dt.timezone.utc)
    except ValueError:
        return None
