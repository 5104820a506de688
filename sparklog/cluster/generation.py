"""Messages between driver and barrier tasks about one generation of the barrier job. Values only.

``GenerationSpec`` is pickled with the job. While the job runs, the driver writes directives (continue, regroup, stop)
to one ZooKeeper node, and the tasks write reports (the serving brokers) to another. So neither needs a connection to
the other, and nothing depends on Spark's cancel, which kills without notice.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from sparklog.protocol.proof import Secret
from sparklog.zk import paths

DIRECTIVE = paths.DIRECTIVE
REPORT = paths.GENERATION


class Phase(Enum):
    """Action that a directive orders from the tasks of a generation."""

    RUN = "run"
    #: End the job but not the brokers: the next generation has another size.
    REGROUP = "regroup"
    #: Stop all brokers of the cluster cleanly, then end the job.
    STOP = "stop"


class Directive(msgspec.Struct, frozen=True):
    """Order of the driver to the tasks of one generation, in a ZooKeeper node. A task of an older generation ends
    immediately."""

    driver_epoch: int
    generation: int
    course: Phase
    version: int = 1


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one generation of the barrier job, with which its tasks start and supervise brokers."""

    cluster_id: str
    zookeeper: str
    driver_epoch: int
    generation: int
    #: Target number of brokers of the whole cluster.
    brokers: int
    #: Maximum number of new log directories per task; existing ones are always supervised.
    brokers_per_task: int
    #: Log directories on every host, one broker per directory; empty: ``slot-0``, ``slot-1``, ... in ``data_dir``.
    log_dirs: tuple[str, ...]
    data_dir: str
    #: First port to try for a new log directory.
    port: int
    #: Advertised address; empty: the host name of the task.
    advertised_host: str
    #: Address to listen on.
    bind_host: str
    #: Broker and topic settings with Kafka's keys.
    settings: dict[str, str]
    session_timeout_ms: int
    #: The cluster's secrets, the newest first; see ``cluster_secret``. They are never shown.
    secrets: tuple[Secret, ...] = ()
    #: Start no broker: only adopt running ones, for a stop.
    adopt_only: bool = False


class ServingBroker(msgspec.Struct, frozen=True):
    """Broker that responded to its supervisor."""

    broker_id: int
    host: str
    port: int
    pid: int
    incarnation: int
    log_dir: str
    #: Whether it was already running when this generation began.
    adopted: bool


class GenerationReport(msgspec.Struct, frozen=True):
    """Report of a generation's tasks, once each of their brokers serves or has failed."""

    driver_epoch: int
    generation: int
    brokers: tuple[ServingBroker, ...]
    #: Reasons why brokers are missing, one sentence each.
    problems: tuple[str, ...]
    version: int = 1
