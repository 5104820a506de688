"""The cluster's secret on its way from the driver to the brokers.

The driver makes it on the first start and keeps it as ``cluster.secret`` in its data directory, beside the log
directories and in none of them. It hands it to the barrier tasks within the pickled ``GenerationSpec``, through Spark's
own channel: on no command line, in no environment, in no log. Each host keeps a copy in the runtime directory of the
brokers' user, where its broker processes read it; brokers that run already are told it over their control sockets.

A driver that finds no file makes a new secret, and the brokers that it adopts learn it the same way.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from sparklog.broker.lifecycle.secret_file import new_secret, read_secret_file, write_secret_file
from sparklog.cluster import runtime_directory
from sparklog.protocol.proof import KeyRing

_NAME = "cluster.secret"


def driver_secret_file(data_dir: Path) -> Path:
    return data_dir / _NAME


def driver_keys(data_dir: Path) -> KeyRing:
    """Return the secret that the driver keeps in ``data_dir``, made now if there is none.

    Raises:
        ConfigError: the file cannot be read, or other users may read it.
        OSError: it cannot be written.
    """
    path = driver_secret_file(data_dir)
    if not path.exists():
        made = path.with_name(f".{_NAME}.{secrets.token_hex(8)}")
        write_secret_file(made, KeyRing([new_secret()]))
        with contextlib.suppress(FileExistsError):  # of a driver that was faster
            os.link(made, path)
        made.unlink()
    return read_secret_file(path)


def keep_on_host(cluster_id: str, keys: KeyRing) -> Path:
    """Write this host's copy and return its path. Raises ClusterError as ``runtime_directory``, and OSError."""
    path = runtime_directory.secret_file(cluster_id)
    write_secret_file(path, keys)
    return path


def found_on_host(cluster_id: str) -> KeyRing:
    """Return the secrets in this host's copy, none where there is no copy. Raises ConfigError as ``driver_keys``."""
    path = runtime_directory.secret_file(cluster_id)
    return read_secret_file(path) if path.exists() else KeyRing()
