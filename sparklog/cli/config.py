"""``sparklog config``: list the settings, describe those in effect and their sources, alter a topic's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, NamedTuple

import typer

from sparklog.cli.options import AsJson, Bootstrap, Timeout, Topic, open_admin, pairs, topic_names
from sparklog.cli.output import done, print_json, print_table
from sparklog.client.admin.admin import Admin
from sparklog.config import (
    BROKER_SETTINGS,
    TOPIC_SETTINGS,
    Setting,
    allowed,
    broker_config,
    check_topic_settings,
    default_text,
)
from sparklog.errors import BrokerError, ConfigError, ErrorCode

config = typer.Typer(help="List, describe and alter settings of topics and brokers.", no_args_is_help=True)


Unset = Annotated[
    list[str] | None, typer.Option("--unset", "-u", metavar="NAME", help="Reset to the default; repeatable.")
]


class Kind(str, Enum):
    TOPICS = "topics"
    BROKERS = "brokers"


class InForce(NamedTuple):
    """A setting in effect, with its value and the origin of the value.

    ``origin`` is the topic, the cluster (the setting was given when the brokers were started), or the built-in default.
    """

    name: str
    value: str
    origin: str


@config.command("list")
def list_settings(
    kind: Annotated[Kind | None, typer.Argument(metavar="[topics|brokers]", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List every setting with its default, allowed values and description. Needs no broker.

    Example: sparklog config list topics
    """
    tables = {Kind.TOPICS: TOPIC_SETTINGS, Kind.BROKERS: BROKER_SETTINGS}
    rows = [
        (one.value.rstrip("s"), name, default_text(setting), allowed(setting), setting.doc)
        for one in (tables if kind is None else [kind])
        for name, setting in sorted(tables[one].items())
    ]
    columns = ("of", "setting", "default", "allowed", "description")
    if as_json:
        print_json([dict(zip(("of", "name", "default", "allowed", "doc"), row, strict=True)) for row in rows])
    else:
        print_table(columns, rows, numeric=("default",))


@config.command("describe")
def describe(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", show_default=False, autocompletion=topic_names)
    ] = None,
    *,
    broker: Annotated[
        int | None, typer.Option("--broker", metavar="ID", help="Describe this broker instead of a topic.")
    ] = None,
    given: Annotated[bool, typer.Option("--given", help="Show only settings that were set, not defaults.")] = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show the settings in effect for a topic or a broker, and where each value comes from.

    Example: sparklog config describe flights --given
    """
    if (topic is None) == (broker is None):
        raise ConfigError("pass either TOPIC or --broker ID")
    with open_admin(bootstrap, timeout) as admin:
        if topic is not None:
            own = admin.describe_topic(topic).config
            found = _of_topic(own, _of_cluster(admin, None))
        else:
            found = _of_broker(_of_cluster(admin, broker))
    if given:
        found = [one for one in found if one.origin != "default"]
    if as_json:
        print_json([one._asdict() for one in found])
    else:
        print_table(("setting", "value", "from"), found)


def _of_topic(own: Mapping[str, str], cluster: Mapping[str, str]) -> list[InForce]:
    return [
        InForce(name, own[name], "topic") if name in own else _default(name, setting, cluster)
        for name, setting in sorted(TOPIC_SETTINGS.items())
    ]


def _of_broker(settings: Mapping[str, str]) -> list[InForce]:
    """Return the settings in effect of a broker: first the broker settings, then the topic defaults."""
    both = [*sorted(BROKER_SETTINGS.items()), *sorted(TOPIC_SETTINGS.items())]
    return [_default(name, setting, settings) for name, setting in both]


def _default(name: str, setting: Setting, settings: Mapping[str, str]) -> InForce:
    default = default_text(setting)
    value = settings.get(name, default)
    return InForce(name, value, "default" if value == default else "cluster")


def _of_cluster(admin: Admin, broker_id: int | None) -> Mapping[str, str]:
    """Return the settings with which a broker was started.

    Without ``broker_id``, use the first broker that responds.

    Raises:
        BrokerError: BROKER_NOT_AVAILABLE.
    """
    for broker in admin.describe_brokers():
        if broker.settings and broker_id in {None, broker.address.broker_id}:
            return broker.settings
    problem = "no broker returned" if broker_id is None else f"broker {broker_id} did not return"
    raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, f"{problem} its settings")


@config.command("alter")
def alter(
    topic: Topic,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE...]", show_default=False, help="Settings to change.")
    ] = None,
    *,
    unset: Unset = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Change a topic's settings while it is in use. All values are checked before any setting is changed.

    Broker settings are fixed when the cluster starts: edit broker.conf and restart the cluster to change them.

    Example: sparklog config alter flights retention.ms=3600000 --unset segment.ms
    """
    wanted = pairs(settings or [], what="setting")
    if not wanted and not unset:
        raise ConfigError("nothing to change: pass NAME=VALUE or --unset NAME")
    for name in [*wanted, *(unset or [])]:
        if name in BROKER_SETTINGS:
            broker_config(
                {name: wanted[name]} if name in wanted else {}
            )  # an invalid value is reported before a setting of the wrong kind
            raise ConfigError(f"{name} is a broker setting, fixed when the cluster starts (--set, broker.conf)")
    check_topic_settings([*wanted, *(unset or [])])
    with open_admin(bootstrap, timeout) as admin:
        alter_topic(admin, topic, wanted, unset=unset, as_json=as_json)


def alter_topic(
    admin: Admin, topic: str, wanted: Mapping[str, str], *, unset: Sequence[str] | None, as_json: bool
) -> None:
    """Change settings of a topic and print the result.

    Raises:
        BrokerError: UNKNOWN_TOPIC_OR_PARTITION; INVALID_CONFIG names the setting and its range.
        ClientTimeout: no success in time; the settings may still be changed.
    """
    found = admin.alter_topic(topic, wanted, unset=unset or ())
    settings = ", ".join(f"{name}={value}" for name, value in sorted(found.config.items())) or "all defaults"
    done({"topic": topic, "config": dict(found.config)}, f"{topic}: {settings}", as_json=as_json)
