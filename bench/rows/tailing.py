"""The cost of additional groups for the brokers: a writer sends 1 kB records at 100 MB/s, and 1 or 3 groups read them.

Writer and readers are separate processes. The writer never stops. One group always reads. Two further groups join and
leave in turns, each time as new groups. A figure is the brokers' processor time per written byte between two changes.
So both numbers of groups are measured within one run, seconds apart, and slow changes of the machine's load affect
both.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from bench.kafka import wait_for
from bench.machine import CpuTime
from bench.measure import Contestant, Figures, Lost, Ratio, Row
from bench.paced import Place
from bench.sides import Bench, Side
from bench.values import objects, tables
from sparklog import Consumer, Producer

_SIZE = 1000
_STEP = 2_000
_MORE = 2
#: For a quick run: MB/s, the number of turns, and the seconds of a turn.
_QUICK = (10, 2, 0.3)
_TURNS, _TURN_S = 12, 3.0
#: MB/s. On two cores Kafka and its client cannot reach sparklog's rate. The row compares the cost of a byte.
_MB_S = {"sparklog": 100, "kafka": 40}
_CALM_S = 0.5
_COMMIT_MS = 1000
_SILENT_S = 30.0
_spawn = mp.get_context("spawn")


class Board:
    """Shared state of the processes of a run. Counts are numbers of records."""

    def __init__(self) -> None:
        self.wanted: Any = _spawn.Value("i", 0)
        self.ended: Any = _spawn.Event()
        self.written: Any = _spawn.Value("q", 0)
        self.read: Any = [_spawn.Value("q", 0) for _ in range(1 + _MORE)]
        #: The turn that each reader is ready for.
        self.ready: Any = [_spawn.Value("i", -1) for _ in range(1 + _MORE)]


class Spent(NamedTuple):
    """The result of one turn: the processor time of all brokers, and the records written meanwhile."""

    cpu_s: float
    records: int

    @property
    def per_byte(self) -> float:
        return self.cpu_s / (self.records * _SIZE)


def one_run(bench: Bench, side: Side, *, groups: bool) -> Figures:
    rate, turns, turn_s = _QUICK if bench.quick else (_MB_S[side.name], _TURNS, _TURN_S)
    found: dict[int, list[Spent]] = {0: [], _MORE: []}
    with ExitStack() as ends:
        topic = ends.enter_context(bench.topic(side, partitions=6))
        board, place = Board(), Place(side.name, side.bootstrap, topic)
        for number in range(1 + _MORE):
            _start(ends, _follow, (place, board, number, groups))
        wait_for(lambda: board.ready[0].value == 0, _SILENT_S, "the first reader")
        writer = _start(ends, _flow, (place, board, rate))
        wait_for(lambda: board.read[0].value > 0, _SILENT_S, "the first record")
        # A turn in which a reader was too busy to follow, perhaps because of other programs, is repeated.
        for turn in range(1, 2 * turns + 1):
            more = min(found, key=lambda number: len(found[number]))
            spent = _turn(side, board, turn, more, turn_s)
            if spent is not None:
                found[more].append(spent)
            if sum(map(len, found.values())) == turns:
                break
        else:
            raise Lost(f"{side.name}: readers do not follow {rate} MB/s")
        board.ended.set()
        writer.join(_SILENT_S)
        wait_for(lambda: board.read[0].value >= board.written.value, _SILENT_S, "the first reader to have all")
        if writer.exitcode or board.read[0].value != board.written.value:
            raise Lost(f"{side.name}: {board.read[0].value:,} records read, {board.written.value:,} written")
    few, many = (sum(one.cpu_s for one in found[n]) / sum(one.records for one in found[n]) for n in (0, _MORE))
    more_s = (many - few) / _MORE / _SIZE * 1e8
    few_s = few / _SIZE * 1e8
    flowed = sum(one.records for one in (*found[0], *found[_MORE])) * _SIZE / 1e6
    return {
        "cores": more_s,
        "percent": 100 * more_s / few_s,
        "base_cores": few_s,
        "mb_s": flowed / (turns * turn_s),
    }


def _turn(side: Side, board: Board, turn: int, more: int, turn_s: float) -> Spent | None:
    """Run one turn. Return None if a reader has not read all written records."""
    board.wanted.value = turn if more else -turn
    wait_for(lambda: all(one.value == turn for one in board.ready[1:]), _SILENT_S, "readers to join or leave")
    time.sleep(_CALM_S)
    read = [one.value for one in board.read]
    before = board.written.value
    with CpuTime(side.pids()) as cpu:
        time.sleep(turn_s)
        written = board.written.value - before
        counts = [one.value - was for one, was in zip(board.read, read, strict=True)]
    for count in counts[: 1 + more]:
        if abs(count - written) > 0.25 * written + 4 * _STEP:
            return None
    return Spent(cpu.seconds, written)


def _start(ends: ExitStack, work: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    process = _spawn.Process(target=work, args=arguments, daemon=True)
    process.start()
    ends.callback(_end, process)
    return process


def _end(process: Any) -> None:
    process.terminate()
    process.join(_SILENT_S)


# --- separate processes ---


def _flow(place: Place, board: Board, mb_per_s: float) -> None:
    """Write at a steady rate until the end is requested. The process fails if a counted record is not acknowledged."""
    pause_s = _STEP * _SIZE / (mb_per_s * 1e6)
    due = time.monotonic()
    with ExitStack() as ends:
        write = _writer(place, ends)
        while not board.ended.is_set():
            write()
            board.written.value += _STEP
            due = max(due + pause_s, time.monotonic() - 1.0)
            time.sleep(max(0.0, due - time.monotonic()))


def _writer(place: Place, ends: ExitStack) -> Callable[[], object]:
    if place.side == "kafka":
        from bench.kafka_clients import confluent_producer

        theirs = confluent_producer(place.bootstrap, **{"linger.ms": 5})
        values = objects(_STEP, _SIZE)

        def produce() -> None:
            for value in values:
                while True:
                    try:
                        theirs.produce(place.topic, value)
                        break
                    except BufferError:
                        theirs.poll(0.01)
            theirs.poll(0)

        def flush() -> None:
            if theirs.flush(_SILENT_S):
                raise TimeoutError("confluent-kafka: not everything was acknowledged")

        ends.callback(flush)
        return produce
    ours = ends.enter_context(Producer(place.bootstrap))
    table = tables(_STEP, _SIZE)[0]
    return lambda: ours.write(place.topic, table)


def _follow(place: Place, board: Board, number: int, groups: bool) -> None:
    """Follow the stream: reader 0 always, the others while ``wanted`` is positive, in each turn as a new group."""
    turn = 0
    while not board.ended.is_set() or number == 0:
        wanted = board.wanted.value
        if number == 0 or wanted > turn:
            turn = 0 if number == 0 else wanted
            _follow_once(place, board, number, turn, groups)
        else:
            turn = abs(wanted)
            board.ready[number].value = turn
            time.sleep(0.01)


def _follow_once(place: Place, board: Board, number: int, turn: int, groups: bool) -> None:
    group = f"bench-{uuid.uuid4().hex}"
    with ExitStack() as ends:
        poll = _reader(place, group if groups else None, ends)
        poll()
        board.ready[number].value = turn
        while number == 0 or abs(board.wanted.value) == turn:
            board.read[number].value += poll()


def _reader(place: Place, group: str | None, ends: ExitStack) -> Callable[[], int]:
    """Return when the reader is at the end of the topic."""
    if place.side == "kafka":
        from bench.kafka_clients import confluent_consumer

        settings = {"auto.offset.reset": "latest", "auto.commit.interval.ms": _COMMIT_MS, "enable.auto.commit": True}
        theirs = confluent_consumer(place.bootstrap, place.topic, **settings)
        ends.callback(theirs.close)
        wait_for(lambda: theirs.poll(0.1) is not None or bool(theirs.assignment()), _SILENT_S, "an assignment")
        return lambda: len(theirs.consume(500, 0.1))
    if group is None:
        ours = ends.enter_context(Consumer(place.bootstrap, place.topic, start="latest"))
    else:
        ours = Consumer(place.bootstrap, [place.topic], group=group, start="latest", auto_commit_interval_ms=_COMMIT_MS)
        ends.callback(ours.close)
        wait_for(lambda: ours.poll(0.05) is not None and bool(ours.positions()), _SILENT_S, "an assignment")
    return lambda: sum(batch.num_rows for batch in ours.poll(0.1))


@contextmanager
def open_tailing(bench: Bench) -> Iterator[list[Contestant]]:
    contestants = [
        Contestant("sparklog", functools.partial(one_run, bench, bench.ours, groups=True)),
        Contestant("no group", functools.partial(one_run, bench, bench.ours, groups=False)),
    ]
    if bench.kafka is not None:
        contestants.append(Contestant("kafka", functools.partial(one_run, bench, bench.kafka, groups=True)))
    yield contestants


ROWS = (
    Row(
        "tailing",
        (
            Ratio(
                "one more group at the end of a topic: broker CPU, of what writing and one group take",
                "%",
                ("sparklog", "percent"),
                goal=10.0,
                lower=True,
            ),
            Ratio("the same of a reader without a group", "%", ("no group", "percent"), lower=True),
            Ratio(
                "one more group, broker CPU at 100 MB/s",
                "cores",
                ("sparklog", "cores"),
                (("kafka", "cores"),),
                lower=True,
            ),
        ),
        open_tailing,
        warm_up=False,
        at_most=3,
    ),
)
