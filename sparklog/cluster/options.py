"""The options of a cluster, and the values that follow from them for a given Spark master."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import structs

from sparklog.cluster.process import host_name
from sparklog.config import broker_config
from sparklog.errors import ConfigError
from sparklog.extras import require_cryptography
from sparklog.security.listeners import broker_listeners, check_exposure, check_zookeeper_exposure, is_loopback
from sparklog.zk.security import zookeeper_security

if TYPE_CHECKING:
    from sparklog.cluster.development_security import DevelopmentSecurity

DEFAULT_PORT = 9092
#: The first port for Kafka clients, of the commands that start a cluster.
DEFAULT_KAFKA_PORT = 29_092
#: The listen address of services that only this machine needs.
LOOPBACK = "127.0.0.1"
#: The setting with which an operator says that only trusted programs reach the cluster's ports.
TRUSTED_NETWORK = {"network.trusted": "true"}
#: The default session time-out with the embedded ZooKeeper. It is short, because that server is near and responds
#: quickly.
EMBEDDED_SETTINGS = {"zookeeper.session.timeout.ms": "2000"}
#: The default replication factor of topics, if the cluster has that many brokers.
DEFAULT_REPLICATION_FACTOR = 3
#: The mode of a new data directory: other users may enter it, but not change it.
_OTHERS_ENTER = 0o755


class Sizing(NamedTuple):
    """The number of tasks that the barrier job needs."""

    tasks: int
    #: The number of slots that the barrier job leaves for other jobs of the same application.
    spare: int
    #: The number of tasks of generations after the first; 0 for the same number.
    tasks_later: int = 0


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options with which a cluster is started. ``checked`` validates them."""

    data_dir: Path
    brokers: int = 3
    #: The maximum number of new brokers per barrier task. 0 means one, or with ``log_dirs`` on several hosts one per
    #: log directory.
    brokers_per_executor: int = 0
    #: The log directories on each host, one broker per directory. If empty, they are created in ``data_dir``.
    log_dirs: tuple[Path, ...] = ()
    #: The first port to try for a new log directory.
    port: int = DEFAULT_PORT
    #: The first port to try for Kafka clients; 0 for no listener of Kafka's protocol, unless the settings have one.
    kafka_port: int = 0
    #: The advertised address. If empty, it is loopback with a local master, otherwise the name of each host.
    advertised_host: str = ""
    #: The ZooKeeper to use, ``host:port[,host:port][/chroot]``. If empty, the embedded ZooKeeper is used.
    zookeeper: str = ""
    settings: dict[str, str] = {}
    #: The lines of zoo.cfg for the embedded ZooKeeper.
    zookeeper_settings: dict[str, str] = {}
    #: Whether the driver sets up TLS, logins and ACLs itself, see ``development_security``.
    secure: bool = False
    #: The number of task slots that must remain for other jobs of the same Spark application.
    spare_slots: int = 0

    def checked(self) -> ClusterOptions:
        """Check the options. Return them with the settings that follow from other options. Idempotent.

        Raises:
            ConfigError: a value is out of range, or a setting is unknown or has an invalid value.
        """
        if self.brokers < 1:
            raise ConfigError(f"brokers={self.brokers}: expected at least 1")
        if self.brokers_per_executor < 0:
            raise ConfigError(f"brokers per executor={self.brokers_per_executor}: expected at least 1")
        if not 1 <= self.port <= 65_535:
            raise ConfigError(f"port={self.port}: expected 1 to 65535")
        if not 0 <= self.kafka_port <= 65_535:
            raise ConfigError(f"Kafka port={self.kafka_port}: expected 0 to 65535")
        if len({path.resolve() for path in self.log_dirs}) != len(self.log_dirs):
            raise ConfigError(f"log directories must differ: {', '.join(str(path) for path in self.log_dirs)}")
        settings = self._secured()
        security = zookeeper_security(broker_config(settings))
        if security.set_acl and not security.has_identity and self.zookeeper:
            raise ConfigError(
                "zookeeper.set.acl=true: set zookeeper.digest.file, or zookeeper.ssl.keystore.location, so that brokers"
                " prove an identity to ZooKeeper"
            )
        replicas = str(min(DEFAULT_REPLICATION_FACTOR, self.brokers))
        following = {"default.replication.factor": replicas, "internal.topic.replication.factor": replicas}
        if not self.zookeeper:
            following |= EMBEDDED_SETTINGS
        return structs.replace(self, settings=merged(following, settings))

    def _secured(self) -> dict[str, str]:
        """Return the settings with those of ``--secure``. Raises ConfigError if the operator sets another value."""
        if not self.secure:
            return self.settings
        own = self.security().settings()
        if other := [name for name, text in self.settings.items() if own.get(name, text) != text]:
            raise ConfigError(f"--secure sets {other[0]} itself: leave it out, or set all of the security yourself")
        return merged(own, self.settings)

    def security(self) -> DevelopmentSecurity:
        """Return the object that creates the files and settings of ``--secure``.

        Raises:
            ConfigError: the package ``cryptography`` is not installed.
        """
        require_cryptography("--secure")
        from sparklog.cluster.development_security import DevelopmentSecurity

        return DevelopmentSecurity(
            self.data_dir, advertised_host=self.advertised_host, embedded_zookeeper=not self.zookeeper
        )


def create_data_dir(data_dir: Path) -> None:
    """Create the data directory and its missing parents. No other user may write to them, whatever the umask is.

    Members of other groups may enter them, because a group may read log directories below (``log.dir.group``).
    """
    missing = [path for path in (data_dir, *data_dir.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(_OTHERS_ENTER, exist_ok=True)


def is_one_machine(master: str) -> bool:
    """Return whether all executors run on the driver's machine: with local, local[N] or local-cluster[...]."""
    return master.startswith("local")


def listen_host(options: ClusterOptions, master: str) -> str:
    """Return the address on which brokers listen.

    It is a loopback address if such an address is advertised, or if Spark runs on one machine and no address is
    advertised. Other hosts then cannot reach the cluster.
    """
    if is_loopback(options.advertised_host):
        return options.advertised_host
    return LOOPBACK if is_one_machine(master) and not options.advertised_host else "0.0.0.0"


def with_kafka(options: ClusterOptions, master: str) -> dict[str, str]:
    """Return the broker settings, with the listener for Kafka clients at ``kafka_port``.

    The listener is only for clients on this machine, except with ``--secure``. So it is left out if the brokers are on
    several hosts without ``--secure``. It is also left out if the settings have listeners of their own.
    """
    settings = options.settings
    if not options.kafka_port or "kafka.listeners" in settings:
        return settings
    if options.secure:
        listener = f"SASL_SSL://:{options.kafka_port}"
    elif is_one_machine(master) and "listeners" not in settings:
        listener = f"PLAINTEXT://{LOOPBACK}:{options.kafka_port}"
    else:
        return settings
    return merged(settings, {"kafka.listeners": listener})


def zookeeper_host(options: ClusterOptions, master: str) -> str:
    """Return the address on which the embedded ZooKeeper listens, and at which brokers connect to it."""
    return LOOPBACK if is_one_machine(master) or is_loopback(options.advertised_host) else host_name()


def check_network(options: ClusterOptions, master: str) -> None:
    """Check that the cluster would not listen on the network without TLS and authentication.

    Raises:
        ConfigError: the cluster would listen in this way. The message names the setting to change.
    """
    config = broker_config(with_kafka(options, master))
    has_open_zookeeper = options.zookeeper and not config.zookeeper_ssl and not config.network_trusted
    if options.secure and has_open_zookeeper and not is_one_machine(master):
        raise ConfigError(
            "--secure on several hosts needs a ZooKeeper with TLS, because users and ACLs are in it: set"
            " zookeeper.ssl.client.enable and its PEM files, or leave out --zookeeper for the embedded one"
        )
    advertised, bound = options.advertised_host or host_name(), listen_host(options, master)
    listeners = broker_listeners(config, host=advertised, port=options.port, bind_host=bound)
    check_exposure(listeners, trusted=config.network_trusted, who="a broker")
    if not options.zookeeper:
        # With TLS the embedded ZooKeeper accepts only clients with a certificate.
        trusted = config.network_trusted or config.zookeeper_ssl
        check_zookeeper_exposure(zookeeper_host(options, master), trusted=trusted)


def brokers_per_task(options: ClusterOptions, master: str) -> int:
    if is_in_driver(master):
        return options.brokers
    if options.brokers_per_executor:
        return options.brokers_per_executor
    # With local-cluster all executors share the directories of one machine. With other masters each host has all named
    # directories.
    return max(len(options.log_dirs), 1) if not is_one_machine(master) else 1


def is_in_driver(master: str) -> bool:
    """Return whether the driver's JVM is the executor, that is, whether the master is local or local[N]."""
    return is_one_machine(master) and not master.startswith("local-cluster")


def sizing(options: ClusterOptions, master: str) -> Sizing:
    tasks = math.ceil(options.brokers / brokers_per_task(options, master))
    # On one machine a single task can supervise all brokers, and a single slot becomes free even if user jobs occupy
    # all slots.
    return Sizing(tasks, options.spare_slots, tasks_later=1 if is_one_machine(master) else 0)


def read_settings(path: Path) -> dict[str, str]:
    """Read a file with a setting ``key = value`` on each line. Lines that begin with # are comments.

    Raises:
        ConfigError: the file cannot be read, or a line has no value or repeats a key. The error has the line number.
    """
    settings: dict[str, str] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        add_setting(settings, text, where=f"{path}, line {number}")
    return settings


def add_setting(settings: dict[str, str], text: str, *, where: str) -> None:
    """Add the setting in ``text``, ``key=value``, to ``settings``. ``where`` names the source of the text in errors.

    Raises:
        ConfigError: the text is not ``key=value`` or repeats a key.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise ConfigError(f"{where}: expected key = value, found {text!r}")
    if key in settings:
        raise ConfigError(f"{where}: {key} is set twice")
    settings[key] = value


def merged(settings: Mapping[str, str], over: Mapping[str, str]) -> dict[str, str]:
    return {**settings, **over}
