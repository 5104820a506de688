"""A test that feeds random and mutated bytes to everything that is parsed before a login, in another process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

#: The outcomes that show that the cases get beyond the first check of each target.
OUTCOMES = {
    "server": ("logged in", "served", "SASL_AUTHENTICATION_FAILED", "ILLEGAL_SASL_STATE", "FRAME_TOO_LARGE"),
    "kafka": (
        *("logged in", "served", "SASL_AUTHENTICATION_FAILED", "ILLEGAL_SASL_STATE", "FRAME_TOO_LARGE"),
        *("API_VERSIONS answered", "SASL_HANDSHAKE answered", "SASL_AUTHENTICATE answered"),
    ),
    "mechanisms": ("SCRAM-SHA-256 logged in", "OAUTHBEARER logged in", "token accepted", "token refused"),
    "client": ("scram complete", "scram SASL_AUTHENTICATION_FAILED", "end MALFORMED_FRAME", "end read"),
    "connections": ("async logged in", "blocking logged in", "async SASL_AUTHENTICATION_FAILED"),
    "tls": ("random", "truncated", "mutated", "records", "frames"),
}
#: The cases of a run in the first tier, which takes a few seconds together.
CASES = {"server": 3000, "kafka": 3000, "mechanisms": 2500, "client": 2000, "connections": 120, "tls": 220}
#: The part of each target in a run of one hour.
HOUR_S = 3600 // len(OUTCOMES)


def fuzz(target: str, seed: int, seconds: float, *cases: int) -> dict[str, int]:
    """Run the fuzzer and return its counts."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.broker.fuzz_logins", target, str(seed), str(seconds)]
        + [str(number) for number in cases],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds + 300,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, f"{target}, seed {seed}:\n{done.stderr[-4000:]}"
    tally: dict[str, int] = json.loads(done.stdout)
    return tally


@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=pytest.mark.extended) if name == "tls" else name for name in OUTCOMES]
)
def test_bytes_before_a_login_give_typed_errors(target: str) -> None:
    tally = fuzz(target, 1, 240, CASES[target])
    assert tally["cases"] == CASES[target]
    for outcome in OUTCOMES[target]:
        assert tally.get(outcome, 0) >= 5, tally


@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("target", OUTCOMES)
def test_an_hour_of_bytes_before_a_login_gives_typed_errors(target: str) -> None:
    tally = fuzz(target, 2, HOUR_S)
    for outcome in OUTCOMES[target]:
        assert tally.get(outcome, 0) >= 20, tally
