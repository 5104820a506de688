"""The cost of TLS, SCRAM and ACLs: a secure and a plain cluster, measured in turns within one run.

Each cluster has three brokers, replication factor 3, acks=all and min.insync.replicas 2. Over TCP, Unix sockets are
off. Within the host, clients continue on a Unix socket after the login. A figure is the median over the turns, and a
ratio the median of the ratios of the pairs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from bench import values
from bench.machine import CpuTime, Others
from sparklog import Admin, Producer
from sparklog.net.blocking import BlockingConnection
from sparklog.net.client_security import ClientSecurity
from sparklog.protocol.messages import DescribeAcls, DescribeAclsReply
from sparklog.security.acls import AclFilter, Operation, ResourceType, binding
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.testing.secure_cluster import SecureCluster

_LEAST_PAIRS = 10
_SIZE = 1000
_ITERATIONS = 16_384
#: The number of users that log in in turns. A process caches the salted passwords of 16 users, so each of 17 users logs
#: in without a cached password.
_USERS = 17
_PRINCIPAL = "User:user-0"
_ACLS = 1000
#: The number of ACLs that one request creates. More could exceed the request's time limit if ZooKeeper is slow.
_AT_ONCE = 100
_ACLS_TIMEOUT_S = 120.0
#: The time in which brokers end the work on changed ACLs that all of them have read.
_SETTLE_S = 1.0
_SETTINGS = {"min.insync.replicas": "2", "log.cleaner.backoff.ms": "1000", "log.retention.check.interval.ms": "1000"}
_OVER_TCP = {"unix.sockets.enable": "false"}
#: The retention settings of the topic for tables. The topic keeps few records, so that the disk does not fill.
_KEPT = {"retention.bytes": "100000000", "segment.bytes": "16777216"}


class Turn(NamedTuple):
    """One run: its figure, its wall time, the processor time of the client and of the brokers, and the other load."""

    figure: float
    wall_s: float
    client_s: float
    brokers_s: float
    others: float = 0.0

    @property
    def processor_s(self) -> float:
        return self.client_s + self.brokers_s


class Work(NamedTuple):
    """A line of the table, and the pairs of turns, secure and plain."""

    title: str
    unit: str
    goal: float
    pairs: Sequence[tuple[Turn, Turn]]
    #: Whether a larger figure is better. The goal is then a lower bound.
    higher: bool = False
    #: What the goal limits: the ratio of the ``figure`` or of the ``processor_s``. ``alone`` is the secure figure.
    of: str = "figure"

    def ratio(self, of: str) -> float:
        """Return the median of the ratios of the pairs."""
        found: list[float] = [getattr(secure, of) / getattr(plain, of) for secure, plain in self.pairs]
        return statistics.median(found)

    @property
    def met(self) -> bool:
        reached = (
            statistics.median(pair[0].figure for pair in self.pairs) if self.of == "alone" else self.ratio(self.of)
        )
        return reached >= self.goal if self.higher else reached <= self.goal


class Users(SecureCluster):
    """A secure cluster with users, whose passwords have as many iterations as passwords from ``sparklog users``."""

    def __enter__(self) -> Users:
        super().__enter__()
        return self

    def secure(self) -> None:
        super().secure()
        self.users = [self.user(f"user-{n}", f"secret of {n}", iterations=_ITERATIONS) for n in range(_USERS)]


def text(works: Sequence[Work]) -> str:
    """Return the table in Markdown. Ratios are secure over plain."""
    rows = ["| work | unit | secure | plain | ratio | wall | client CPU | brokers' CPU | CPU | goal | met | others |"]
    rows.append("|" + "---|" * 12)
    for work in works:
        figures = (statistics.median(pair[side].figure for pair in work.pairs) for side in (0, 1))
        shown = [f"{figure:,.0f}" if figure >= 1000 else f"{figure:,.3g}" for figure in figures]
        ratios = [f"{work.ratio(of):.2f}x" for of in ("figure", "wall_s", "client_s", "brokers_s", "processor_s")]
        bound = f"{'>=' if work.higher else '<='} {work.goal:g}"
        goal = {"figure": f"{bound}x", "processor_s": f"CPU {bound}x", "alone": f"{bound} {work.unit}"}[work.of]
        others = max(turn.others for pair in work.pairs for turn in pair)
        cells = [work.title, work.unit, *shown, *ratios, goal, "yes" if work.met else "no", f"{others:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def measure_all(pairs: int, scale: float, *, quick: bool) -> list[Work]:
    """Measure every line. With ``quick``, measure one pair of tiny runs, which only shows that the runs work."""
    pairs, scale = (1, 0.02) if quick else (max(pairs, _LEAST_PAIRS), scale)
    return [*_over_tcp(pairs, scale, quick=quick), *_within_the_host(pairs, scale, quick=quick)]


def _over_tcp(pairs: int, scale: float, *, quick: bool) -> Iterator[Work]:
    with Users(settings=_SETTINGS | _OVER_TCP) as secure, ProcessCluster(settings=_SETTINGS | _OVER_TCP) as plain:
        found = _tables(secure, plain, pairs, scale, quick=quick)
        yield Work("tables of 1 kB over TCP", "records/s", 0.5, found, higher=True)


def _within_the_host(pairs: int, scale: float, *, quick: bool) -> Iterator[Work]:
    with Users(settings=_SETTINGS) as secure, ProcessCluster(settings=_SETTINGS) as plain:
        found = _tables(secure, plain, pairs, scale, quick=quick)
        yield Work("tables of 1 kB within the host", "records/s", 1.0, found, higher=True)
        _create(secure, plain, topic="single")
        count = max(1, round(2000 * scale))
        with _producer(secure) as ours, _producer(plain) as theirs:
            found = _in_turns(pairs, (secure, lambda: _singles(ours, count)), (plain, lambda: _singles(theirs, count)))
        yield Work("acks=all p50 within the host", "ms", 1.1, found)
        count = max(_USERS, round(100 * scale))
        logins = {"without": secure.users, "with": secure.users[:1]}
        for cached, goal in (("without", 40.0), ("with", 5.0)):
            users = logins[cached]
            found = _in_turns(
                pairs,
                (secure, lambda users=users: _logins(secure, users, count)),  # type: ignore[misc]
                (plain, lambda: _logins(plain, [plain.client_security], count)),
            )
            yield Work(f"connection and login {cached} cached password", "ms", goal, found, of="alone")
        yield _acls(secure, pairs, scale)


def _tables(
    secure: ProcessCluster, plain: ProcessCluster, pairs: int, scale: float, *, quick: bool
) -> list[tuple[Turn, Turn]]:
    """Measure writes of tables. Before each turn fill the free memory, whose first use can take most of a turn."""
    _create(secure, plain, topic="tables", partitions=6, config=_KEPT)
    rows = max(1, round(200_000 * scale))
    data = values.tables(rows, _SIZE)

    def write(producer: Producer) -> float:
        began = time.perf_counter()
        for result in [producer.write("tables", table) for table in data]:
            result.result()
        return rows / (time.perf_counter() - began)

    with _producer(secure) as ours, _producer(plain) as theirs:
        return _in_turns(pairs, (secure, lambda: write(ours)), (plain, lambda: write(theirs)))


def _acls(cluster: Users, pairs: int, scale: float) -> Work:
    """Measure single sends of a user with 1,000 further ACLs, against those with the needed one alone."""
    count = max(1, round(2000 * scale))
    further = AclFilter(resource_type=ResourceType.TOPIC, operation=Operation.READ)
    acls = [binding("topic", f"topic-{number}", _PRINCIPAL, "read") for number in range(_ACLS)]
    with (
        Admin(cluster.bootstrap, security=cluster.client_security, timeout_s=_ACLS_TIMEOUT_S) as admin,
        _producer(cluster, cluster.users[0]) as producer,
    ):
        admin.create_acls([binding("topic", "single", _PRINCIPAL, "write")])
        _await_acls(cluster, 1)

        def many() -> None:
            for first in range(0, _ACLS, _AT_ONCE):
                admin.create_acls(acls[first : first + _AT_ONCE])
            _await_acls(cluster, 1 + _ACLS)

        def none() -> None:
            admin.delete_acls([further])
            _await_acls(cluster, 1)

        def send() -> float:
            return _singles(producer, count)

        found = _in_turns(pairs, (cluster, send), (cluster, send), before=(many, none))
    return Work("acks=all p50, 1,000 ACLs against none", "ms", 1.02, found, of="processor_s")


def _await_acls(cluster: Users, count: int) -> None:
    """Wait until each broker has this number of ACLs, and has no work with the change any more."""
    for broker_id in cluster.slots:
        with cluster.connect(broker_id) as connection:

            def known(connection: BlockingConnection = connection) -> bool:
                reply, _ = connection.request(DescribeAcls(0))
                return isinstance(reply, DescribeAclsReply) and len(reply.acls) == count

            wait_until(known, _ACLS_TIMEOUT_S, f"{count} ACLs in broker {broker_id}")
    time.sleep(_SETTLE_S)


def _in_turns(
    pairs: int,
    secure: tuple[ProcessCluster, Callable[[], float]],
    plain: tuple[ProcessCluster, Callable[[], float]],
    before: tuple[Callable[[], object], Callable[[], object]] | None = None,
) -> list[tuple[Turn, Turn]]:
    """Run both in turns, each first in every other pair. The first pair warms both, and does not count."""
    found = []
    for number in range(pairs + 1):
        turns: dict[int, Turn] = {}
        for side in (0, 1) if number % 2 else (1, 0):
            if before is not None:
                before[side]()
            os.sync()  # without the sync, the disk is still busy with the writes of the last turn
            turns[side] = _turn(*(secure, plain)[side])
        if number:
            found.append((turns[0], turns[1]))
            print(f"  {found[-1]}", file=sys.stderr, flush=True)
    return found


def _turn(cluster: ProcessCluster, run: Callable[[], float]) -> Turn:
    brokers = CpuTime(cluster.pid(broker_id) for broker_id in cluster.slots)
    with Others() as others, CpuTime([os.getpid()]) as client, brokers:
        began = time.perf_counter()
        figure = run()
        wall_s = time.perf_counter() - began
    return Turn(figure, wall_s, client.seconds, brokers.seconds, others.cores)


def _singles(producer: Producer, count: int) -> float:
    """Send records one after the other; return the median time to the acknowledgement in ms."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        producer.send("single", b"x" * 100).result()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def _logins(cluster: ProcessCluster, users: Sequence[ClientSecurity], count: int) -> float:
    """Open connections one after the other, with the users in turns; return the median time in ms."""
    times = []
    for number in range(count):
        began = time.perf_counter()
        connection = cluster.connect(0, security=users[number % len(users)])
        times.append(time.perf_counter() - began)
        connection.close()
    return statistics.median(times) * 1000


def _create(
    *clusters: ProcessCluster, topic: str, partitions: int = 1, config: Mapping[str, str] | None = None
) -> None:
    with ExitStack() as open_:
        for cluster in clusters:
            admin = open_.enter_context(Admin(cluster.bootstrap, security=cluster.client_security))
            admin.create_topic(topic, partitions=partitions, replication_factor=3, config=config)
            admin.wait_until_in_sync([topic], timeout_s=60)


def _producer(cluster: ProcessCluster, security: ClientSecurity | None = None) -> Producer:
    return Producer(cluster.bootstrap, security=security or cluster.client_security)
