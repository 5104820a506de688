"""The distribution of the cluster's secret from the driver to the brokers.

The driver creates the secret at the first start and stores it as ``cluster.secret`` in its data directory, outside the
log directories. It passes the secret to the barrier tasks in the pickled ``GenerationSpec``, through Spark's own
channel, so it is in no command line, environment or log. Each host has a copy in the runtime directory of the brokers'
user, and its broker processes read this copy. Running brokers receive the secret over their control sockets.

A driver without the file creates a new secret, and sends it to running brokers in the same way.
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
    """Return the secret that is stored in the driver's ``data_dir``. Create a secret if there is none.

    Raises:
        ConfigError: the file cannot be read, or other users may read it.
        OSError: the file cannot be written.
    """
    path = driver_secret_file(data_dir)
    if not path.exists():
        made = path.with_name(f".{_NAME}.{secrets.token_hex(8)}")
        write_secret_file(made, KeyRing([new_secret()]))
        with contextlib.suppress(FileExistsError):  # Another driver has created the file first.
            os.link(made, path)
        made.unlink()
    return read_secret_file(path)


def keep_on_host(cluster_id: str, keys: KeyRing) -> Path:
    """Write this host's copy of the secrets, for the brokers of the host, and return its path.

    Raises:
        OSError: the file cannot be written.
        ClusterError: other users could enter the runtime directory of this user.
    """
    path = runtime_directory.secret_file(cluster_id)
    write_secret_file(path, keys)
    return path


def found_on_host(cluster_id: str) -> KeyRing:
    """Return the secrets in this host's copy. Return an empty ``KeyRing`` if there is no copy.

    Raises:
        ConfigError: the file cannot be read, or other users may read it.
    """
    path = runtime_directory.secret_file(cluster_id)
    return read_secret_file(path) if path.exists() else KeyRing()


def forget_on_host(cluster_id: str) -> None:
    """Delete this host's copy of the secrets of a cluster that never runs again. Idempotent."""
    runtime_directory.secret_file(cluster_id).unlink(missing_ok=True)
