"""The paths of the files that ``sparklog cluster --secure`` creates in the data directory."""

from __future__ import annotations

from pathlib import Path

#: The name of the directory, in the data directory, that contains the security files.
SECURITY_DIRECTORY = "security"


def client_file(data_dir: Path) -> Path:
    """Return the path of the file with the security settings of clients. The file exists only in a secure cluster."""
    return data_dir / SECURITY_DIRECTORY / "client.conf"
