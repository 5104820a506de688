"""The JSON file a broker process is started with: written by its supervisor, read once.

Settings keep Kafka's keys; where the process listens, which directory it owns and who supervises it are not settings
but facts about this one process.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from sparklog.broker.lifecycle.secret_file import read_secret_file
from sparklog.config import BrokerConfig, broker_config
from sparklog.errors import ConfigError
from sparklog.protocol.proof import KeyRing

#: Exit code of a broker that was asked to restart: its supervisor starts it again at once, for this was no crash.
EXIT_RESTART = 75


class ProcessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one broker process is told; see the fields."""

    cluster_id: str
    broker_id: int
    log_dir: str
    #: Address given to clients and other brokers; ``bind_host`` is where the socket listens.
    host: str
    #: 0 takes any free port; whoever starts the process keeps the port it reports.
    port: int
    zookeeper: str
    bind_host: str = ""
    rack: str | None = None
    settings: dict[str, str] = {}
    #: Path of the supervisor's Unix socket; empty: none.
    control_socket: str = ""
    #: Name of the lease it was started under. Driver epoch 0: nobody's, and the orphan clock stands still until
    #: a supervisor has come.
    driver_epoch: int = 0
    generation: int = 0
    #: File descriptor that gets one line ``ready <port>`` and is closed when the broker serves; -1: none.
    ready_fd: int = -1
    #: Log file; empty: standard error.
    log_file: str = ""
    #: File with the cluster's secret, see ``secret_file``; empty: none, and every connection is believed.
    secret_file: str = ""

    def broker_settings(self) -> BrokerConfig:
        """Raises ConfigError as ``config.broker_config``."""
        return broker_config(self.settings)

    def keys(self) -> KeyRing:
        """Raises ConfigError as ``secret_file.read_secret_file``."""
        return read_secret_file(Path(self.secret_file)) if self.secret_file else KeyRing()


def load_process_config(path: Path) -> ProcessConfig:
    """Raises ConfigError naming the file and the field that is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessConfig)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from None
