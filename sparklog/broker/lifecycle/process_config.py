"""The JSON file with which a broker process starts. Its supervisor writes the file, and the process reads it once.

``settings`` has Kafka's keys. The other fields (address, log directory, supervisor) belong to this one process and are
not settings.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from sparklog.broker.lifecycle.secret_file import read_secret_file
from sparklog.config import BrokerConfig, broker_config
from sparklog.errors import ConfigError
from sparklog.protocol.proof import KeyRing
from sparklog.security.listeners import Listeners, broker_listeners, check_exposure

#: The exit code of a requested restart: the supervisor starts the broker again at once, because it did not crash.
EXIT_RESTART = 75


class ProcessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The address, log directory, supervisor and settings of one broker process."""

    cluster_id: str
    broker_id: int
    log_dir: str
    #: The host for clients and other brokers. The socket listens at ``bind_host``, or at ``host`` if ``bind_host`` is
    #: empty.
    host: str
    #: The port; 0 means any free port. The process reports this port to the supervisor, which stores the number.
    port: int
    zookeeper: str
    bind_host: str = ""
    rack: str | None = None
    settings: dict[str, str] = {}
    #: The path of the socket for the supervisor (module ``control_socket``); empty for none.
    control_socket: str = ""
    #: The name of the supervisor's lease at the start. Driver epoch 0 means that no driver started the broker. Then the
    #: time without a supervisor counts only after a supervisor has connected once.
    driver_epoch: int = 0
    generation: int = 0
    #: A file descriptor to which the process writes one line ``ready <port>`` when the broker serves, and which it then
    #: closes; -1 for none.
    ready_fd: int = -1
    #: The log file; empty for standard error.
    log_file: str = ""
    #: The path of the file with the cluster's secrets (module ``secret_file``). If the path is empty, the broker trusts
    #: every connection.
    secret_file: str = ""

    def broker_settings(self) -> BrokerConfig:
        """Return the broker's settings. Raises ConfigError if a setting is unknown or invalid."""
        return broker_config(self.settings)

    def listeners(self) -> Listeners:
        """Return the broker's listeners.

        Raises:
            ConfigError: the settings do not fit together, or the broker would listen on the network without TLS and
                authentication although the network is not trusted.
        """
        settings = self.broker_settings()
        found = broker_listeners(settings, host=self.host, port=self.port, bind_host=self.bind_host)
        check_exposure(found, trusted=settings.network_trusted, who=f"broker {self.broker_id}")
        return found

    def keys(self) -> KeyRing:
        """Return the cluster's secrets, or no secrets if there is no ``secret_file``.

        Raises ConfigError if the file cannot be used.
        """
        return read_secret_file(Path(self.secret_file)) if self.secret_file else KeyRing()


def load_process_config(path: Path) -> ProcessConfig:
    """Read the configuration in ``path``. Raises ConfigError, which names the file and the wrong field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessConfig)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from None
