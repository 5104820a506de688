"""The file with a cluster's secrets on a host: one hexadecimal secret in each line, the newest first.

Only the user of the brokers may read the file (mode 0600). The file is outside the log directories, so copies of log
directories do not contain it.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from sparklog.errors import ConfigError
from sparklog.protocol.proof import SECRET_BYTES, KeyRing, Secret


def new_secret() -> Secret:
    return Secret(secrets.token_bytes(SECRET_BYTES))


def read_secret_file(path: Path) -> KeyRing:
    """Return the cluster's secrets in the file ``path``.

    Raises:
        ConfigError: the file cannot be read, holds no secret, or other users may read or write it.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(4096).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"secret file {path}: {error.strerror}") from None
    if found.st_mode & 0o077 or found.st_uid not in {os.geteuid(), 0}:
        raise ConfigError(
            f"secret file {path}: owner {found.st_uid}, mode {stat.filemode(found.st_mode)} found;"
            f" only user {os.geteuid()} may read it: chmod 600"
        )
    keys = KeyRing(Secret.from_hex(line) for line in text.split())
    if not keys:
        raise ConfigError(f"secret file {path}: it is empty")
    return keys


def write_secret_file(path: Path, keys: KeyRing) -> None:
    """Write ``keys`` to ``path`` atomically, as a file that only this user can read."""
    written = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write("".join(f"{secret.hex()}\n" for secret in keys.secrets))
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
