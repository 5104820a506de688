"""What driver and barrier tasks tell each other about one generation of the barrier job. Values only.

``GenerationSpec`` travels pickled with the job. While it runs, the driver speaks through one ZooKeeper node (a
directive: go on, regroup, stop) and the tasks answer through another (who serves where), so that neither needs a
connection to the other and nothing depends on Spark's cancel, which kills without a word.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from sparklog.protocol.proof import Secret
from sparklog.zk import paths

DIRECTIVE = paths.DIRECTIVE
REPORT = paths.GENERATION


class Phase(Enum):
    """What the tasks of a generation are to do."""

    RUN = "run"
    #: End the job, leave the brokers alone: the next generation has another size.
    REGROUP = "regroup"
    #: Stop all brokers of the cluster in order, then end the job.
    STOP = "stop"


class Directive(msgspec.Struct, frozen=True):
    """The driver's word. A task whose own generation is older than this one's ends at once."""

    driver_epoch: int
    generation: int
    course: Phase
    version: int = 1


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One generation: what each of its tasks has to know."""

    cluster_id: str
    zookeeper: str
    driver_epoch: int
    generation: int
    #: Brokers wanted in the whole cluster.
    brokers: int
    #: New log directories a task may open; those that exist are supervised however many they are.
    brokers_per_task: int
    #: Log directories of every host, one broker each; empty: ``slot-0``, ``slot-1``, ... below ``data_dir``.
    log_dirs: tuple[str, ...]
    data_dir: str
    #: First port to try for a new log directory.
    port: int
    #: Address given to clients; empty: the task's host finds its own name.
    advertised_host: str
    #: Address to listen on.
    bind_host: str
    #: Broker and topic settings by Kafka's keys.
    settings: dict[str, str]
    session_timeout_ms: int
    #: The cluster's secrets, the newest first; see ``cluster_secret``. They are never shown.
    secrets: tuple[Secret, ...] = ()
    #: Start nothing: only take hold of what runs, for a stop.
    adopt_only: bool = False


class ServingBroker(msgspec.Struct, frozen=True):
    """A broker that answered its supervisor."""

    broker_id: int
    host: str
    port: int
    pid: int
    incarnation: int
    log_dir: str
    #: It ran already when this generation began.
    adopted: bool


class GenerationReport(msgspec.Struct, frozen=True):
    """What a generation's tasks found, once each of their brokers serves or has failed."""

    driver_epoch: int
    generation: int
    brokers: tuple[ServingBroker, ...]
    #: One sentence each: why a broker is not there.
    problems: tuple[str, ...]
    version: int = 1
