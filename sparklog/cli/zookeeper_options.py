"""The option with which commands that use ZooKeeper learn how to prove an identity to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from sparklog.cluster.options import read_settings
from sparklog.zk.security import ZooKeeperSecurity, security_of

ZookeeperConfig = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads this on Python 3.10 as well
    typer.Option(
        "--zookeeper-config",
        envvar="SPARKLOG_ZOOKEEPER_CONFIG",
        metavar="FILE",
        help="File with the settings zookeeper.ssl.*, zookeeper.digest.file and zookeeper.set.acl, as in broker.conf.",
    ),
]


def security_in(path: Path | None) -> ZooKeeperSecurity:
    """Return the security that the settings in ``path`` describe; the default without a file.

    Raises:
        ConfigError: the file or a file that it names cannot be used.
    """
    return security_of(read_settings(path)) if path is not None else ZooKeeperSecurity()
