"""The messages between the driver and the tasks of one generation, that is, of one run of the barrier job.

``GenerationSpec`` is pickled with the job. While the job runs, the driver writes directives (continue, regroup, stop)
to one ZooKeeper node, and the tasks write reports (the serving brokers) to another. So the driver and the tasks need no
connection to each other, and no Spark job has to be cancelled, which would kill its tasks without notice.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from sparklog.protocol.proof import Secret
from sparklog.zk import paths

DIRECTIVE = paths.DIRECTIVE
REPORT = paths.GENERATION


class Phase(Enum):
    """The orders that the driver can give to the tasks of a generation."""

    RUN = "run"
    #: End the job but not the brokers, because the next generation has another number of tasks.
    REGROUP = "regroup"
    #: Stop all brokers of the cluster cleanly, then end the job.
    STOP = "stop"


class Directive(msgspec.Struct, frozen=True):
    """An order of the driver to the tasks of one generation, stored in a ZooKeeper node.

    A task of an older generation ends when it reads a directive for a newer one.
    """

    driver_epoch: int
    generation: int
    course: Phase
    version: int = 1


class Enrolment(msgspec.Struct, frozen=True):
    """The part of a generation's spec from which the tasks get the certificates of their hosts; see ``enrolment``."""

    cluster_id: str
    #: The directory of the certificates and keys on every host.
    directory: str
    #: The certificate of the CA (PEM).
    ca: str
    #: The certificates that the driver has signed after the previous generation (PEM). Each fits the key of one host.
    certificates: tuple[str, ...]


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings with which the tasks of one run of the barrier job (a generation) start and supervise brokers."""

    cluster_id: str
    zookeeper: str
    driver_epoch: int
    generation: int
    #: The number of brokers that the whole cluster should have.
    brokers: int
    #: The number of log directories per task. Tasks create new directories only up to this number, but supervise all
    #: existing directories.
    brokers_per_task: int
    #: The log directories on every host, one broker per directory. If empty, they are ``slot-0``, ``slot-1``, ... in
    #: ``data_dir``.
    log_dirs: tuple[str, ...]
    data_dir: str
    #: The first port to try for a new log directory.
    port: int
    #: The advertised address. If empty, it is the host name of the task.
    advertised_host: str
    #: The address on which brokers listen.
    bind_host: str
    #: Broker and topic settings with Kafka's keys.
    settings: dict[str, str]
    session_timeout_ms: int
    #: The cluster's secrets, the newest first; see ``cluster_secret``. They are never logged or printed.
    secrets: tuple[Secret, ...] = ()
    #: How hosts get certificates, with ``--secure`` on several hosts.
    enrolment: Enrolment | None = None
    #: Whether to start no broker, but only adopt running ones in order to stop them.
    adopt_only: bool = False


class ServingBroker(msgspec.Struct, frozen=True):
    """A broker that serves requests, with its address and process, as its supervisor knows it."""

    broker_id: int
    host: str
    port: int
    pid: int
    incarnation: int
    log_dir: str
    #: Whether the broker was already running when this generation began.
    adopted: bool
    #: The addresses for Kafka clients, separated by commas.
    kafka: str = ""


class GenerationReport(msgspec.Struct, frozen=True):
    """The report of the tasks of one generation, written when each of their brokers serves or has failed."""

    driver_epoch: int
    generation: int
    brokers: tuple[ServingBroker, ...]
    #: The reasons why brokers are missing, one sentence each.
    problems: tuple[str, ...]
    version: int = 1
