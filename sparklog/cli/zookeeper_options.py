"""The options of commands that use ZooKeeper: its address, and the settings for TLS and login to ZooKeeper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from sparklog.cluster.options import read_settings
from sparklog.zk.security import ZooKeeperSecurity, security_of

Connect = Annotated[str, typer.Option("--zookeeper", "-z", envvar="SPARKLOG_ZOOKEEPER", metavar="HOST:PORT,.../CHROOT")]
SecretFile = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads this on Python 3.10 as well
    typer.Option(
        envvar="SPARKLOG_SECRET_FILE",
        metavar="FILE",
        help="Cluster secret. Needed if ZooKeeper requires it and it is not in the data directory or on this host.",
    ),
]
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
    """Return the ZooKeeper security settings in the file ``path``, or the defaults if ``path`` is None.

    Raises:
        ConfigError: this file, or another file that it names, cannot be used.
    """
    return security_of(read_settings(path)) if path is not None else ZooKeeperSecurity()
