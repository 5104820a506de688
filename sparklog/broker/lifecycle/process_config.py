"""The JSON file with which a broker process starts: its supervisor writes it, the process reads it once.

Settings keep Kafka's keys. The address, the log directory and the supervisor are not settings, but facts about this one
process.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from sparklog.broker.lifecycle.secret_file import read_secret_file
from sparklog.config import BrokerConfig, broker_config
from sparklog.errors import ConfigError
from sparklog.protocol.proof import KeyRing

#: The exit code of a requested restart: the supervisor starts the broker again at once, because it did not crash.
EXIT_RESTART = 75


class ProcessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration of one broker process; see the fields."""

    cluster_id: str
    broker_id: int
    log_dir: str
    #: The address for clients and other brokers; the socket listens at ``bind_host``.
    host: str
    #: 0 takes any free port; the supervisor stores the port that the process reports.
    port: int
    zookeeper: str
    bind_host: str = ""
    rack: str | None = None
    settings: dict[str, str] = {}
    #: The path of the supervisor's Unix socket; empty for none.
    control_socket: str = ""
    #: The name of the lease under which the process started. Driver epoch 0 is no driver's, and the orphan clock starts
    #: only once a supervisor has connected.
    driver_epoch: int = 0
    generation: int = 0
    #: A file descriptor that gets one line ``ready <port>`` and is closed when the broker serves; -1 for none.
    ready_fd: int = -1
    #: The log file; empty for standard error.
    log_file: str = ""
    #: The file with the cluster's secret, see ``secret_file``; empty for none, and the broker trusts every connection.
    secret_file: str = ""

    def broker_settings(self) -> BrokerConfig:
        """Return the broker's settings. Raise ConfigError as ``config.broker_config`` does."""
        return broker_config(self.settings)

    def keys(self) -> KeyRing:
        """Return the cluster's secrets. Raise ConfigError as ``secret_file.read_secret_file`` does."""
        return read_secret_file(Path(self.secret_file)) if self.secret_file else KeyRing()


def load_process_config(path: Path) -> ProcessConfig:
    """Read the file. Raise ConfigError with the file and the wrong field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessConfig)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from None
