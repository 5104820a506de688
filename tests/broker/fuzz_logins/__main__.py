"""A process that feeds random and mutated bytes to everything that sparklog parses before a login.

Run as ``python -m tests.broker.fuzz_logins <target> <seed> <seconds> [<cases>]``. The targets:

- ``server``: the server end, with logins by SCRAM and OAUTHBEARER;
- ``kafka``: the end of a listener for Kafka clients, with the same logins;
- ``mechanisms``: the server's side of each mechanism, and the validator of tokens;
- ``client``: the client's side of a login and the client end, with a hostile server;
- ``connections``: the client connections of both kinds, with a hostile server on a socket;
- ``tls``: a listener with TLS on a socket.

The process prints the counts of the outcomes as JSON. It ends with an error that names the seed and the case if a case
breaks a rule; ``<seed>:<case>`` in place of the seed replays this case alone.
"""

from __future__ import annotations

import collections
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.broker.fuzz_logins.client import ClientTarget
from tests.broker.fuzz_logins.connections import ConnectionTarget
from tests.broker.fuzz_logins.correct_logins import Good
from tests.broker.fuzz_logins.kafka import KafkaTarget
from tests.broker.fuzz_logins.mechanisms import MechanismTarget
from tests.broker.fuzz_logins.server import ServerTarget
from tests.broker.fuzz_logins.tls import TlsTarget

#: The memory that a process may add after its first cases.
MAX_GROWTH_KIB = 96 * 1024


@contextmanager
def target(name: str, seed: int) -> Iterator[Callable[[random.Random], Iterator[str]]]:
    """Yield the function that runs one case of a target."""
    with tempfile.TemporaryDirectory() as directory:
        if name == "tls":
            with TlsTarget(Path(directory), "uvloop" if seed % 2 else "asyncio").running() as tls:
                yield tls.case
        else:
            kinds: dict[str, Callable[[Good], Any]] = {
                "server": ServerTarget,
                "kafka": KafkaTarget,
                "mechanisms": MechanismTarget,
                "client": ClientTarget,
                "connections": ConnectionTarget,
            }
            yield kinds[name](Good(Path(directory))).case


def _rss_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def main(name: str, seeds: str, seconds: float, cases: int) -> None:
    seed, _, only = seeds.partition(":")
    tally: collections.Counter[str] = collections.Counter()
    until_s = time.monotonic() + seconds
    before_kib = 0
    with target(name, int(seed)) as case:
        for number in range(int(only or 0), int(only) + 1 if only else cases):
            if time.monotonic() > until_s:
                break
            try:
                tally.update(case(random.Random(f"{seed}:{number}")))
            except BaseException as error:
                raise AssertionError(f"target {name}, case {seed}:{number}") from error
            tally["cases"] += 1
            if number == 2000:
                before_kib = _rss_kib()
        if before_kib:
            tally["growth in KiB"] = _rss_kib() - before_kib
            assert tally["growth in KiB"] < MAX_GROWTH_KIB, tally
    print(json.dumps(tally))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else sys.maxsize)
