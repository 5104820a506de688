"""Tests that a cluster with default settings offers nothing to other hosts, and nothing of Spark to other users."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from pyspark import SparkConf, SparkContext

from sparklog.cluster.spark_access import exposure
from tests.integration import spark_stranger
from tests.integration.cluster_job import ClusterJob
from tests.ports import FirstPort

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(900)]

_NOBODY = 65_534
_LISTENING = "0A"
_WITHOUT_STATES = ("udp", "udp6", "raw", "raw6")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterJob]:
    """Start a cluster without arguments, except for its ports and its directory."""
    web = f"--conf spark.ui.port={FirstPort.SPARK_ACCESS + 50}"
    started = ClusterJob(tmp_path_factory.mktemp("data"), "--port", str(FirstPort.SPARK_ACCESS), submit=[web])
    try:
        started.ready()
        yield started
    finally:
        started.destroy()


def processes(job: ClusterJob) -> list[int]:
    """Return the driver and all its descendants: JVMs, executors, Python workers, brokers, ZooKeeper."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found = [job.process.pid]
    for pid in found:
        found += children.get(pid, [])
    return found


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the addresses at which a process accepts connections or datagrams from the network, which is that of
    the tests."""
    own = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the socket is closed meanwhile
            own.add(str(file.readlink()))
    found = set()
    for family in ("tcp", "tcp6", *_WITHOUT_STATES):
        table = Path("/proc/net", family)
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if f"socket:[{fields[9]}]" in own and (family in _WITHOUT_STATES or fields[3] == _LISTENING):
                address, port = fields[1].split(":")
                found.add((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """Decode the kernel's hexadecimal words of four bytes, in the byte order of this machine."""
    words = [bytes.fromhex(text[start : start + 8]) for start in range(0, len(text), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def test_every_listening_socket_is_on_loopback_or_unix(job: ClusterJob) -> None:
    found = {pid: listening(pid) for pid in processes(job)}
    ports = {port for addresses in found.values() for _, port in addresses}
    (zookeeper,) = job.zookeepers()
    assert found[zookeeper.pid], "the found processes must be those of the cluster"
    assert ports >= {FirstPort.SPARK_ACCESS, FirstPort.SPARK_ACCESS + 1, FirstPort.SPARK_ACCESS + 2}
    assert all(found[executor.pid] for executor in job.executors())
    assert {address for addresses in found.values() for address, _ in addresses} == {"127.0.0.1"}


def test_the_web_page_ends_no_job(job: ClusterJob) -> None:
    page = f"http://127.0.0.1:{FirstPort.SPARK_ACCESS + 50}/api/v1/applications"
    with urllib.request.urlopen(page) as reply:
        (application,) = msgspec.json.decode(reply.read())
    with urllib.request.urlopen(f"{page}/{application['id']}/environment") as reply:
        settings = dict(msgspec.json.decode(reply.read())["sparkProperties"])
    assert settings["spark.ui.killEnabled"] == "false"
    assert settings["spark.master.ui.decommission.allow.mode"] == "DENY"
    assert "redacted" in settings["spark.authenticate.secret"]


def test_the_secret_is_in_no_command_line_and_no_file(job: ClusterJob) -> None:
    secret = secret_of(job).encode()
    told = [pid for pid in processes(job) if secret in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert told == []
    files = [path for path in job.data_dir.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    found = []
    for path in files:
        with suppress(FileNotFoundError):  # the process ends meanwhile
            found += [path] if secret in path.read_bytes() else []
    assert found == []
    assert secret.decode() not in job.output


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_this_machine_cannot_use_sparks_ports(job: ClusterJob) -> None:
    """The same client is accepted with the secret, so the refusal has no other reason."""
    secret = secret_of(job)
    executor = job.executors()[0]
    words = Path(f"/proc/{executor.pid}/cmdline").read_text().split("\0")
    urls = [words[words.index(option) + 1] for option in ("--driver-url", "--worker-url")]
    targets = [":".join(url.removeprefix("spark://").split("@")[::-1]) for url in urls]
    assert [target.rpartition(":")[2] for target in targets] == ["CoarseGrainedScheduler", "Worker"]
    if run_as_another("-c", "import pyspark").returncode != 0:
        pytest.skip("another user cannot read this Python environment")
    environment_of_executor = f"/proc/{executor.pid}/environ"
    assert "PermissionError" in run_as_another("-c", f"open({environment_of_executor!r})").stderr
    stranger = run_as_another(spark_stranger.__file__, *targets, told=secret)
    assert stranger.returncode == 0, stranger.stderr
    without, with_secret = stranger.stdout.splitlines()[:2], stranger.stdout.splitlines()[2:]
    assert with_secret == ["accepted"] * 2, stranger.stdout
    assert [line.partition(" ")[0] for line in without] == ["refused"] * 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "Spark listens on 127.0.0.1, where other users of this machine can run programs"),
        ({"spark.authenticate": "true"}, ""),
        ({"spark.authenticate": "true", "spark.driver.bindAddress": "0.0.0.0"}, "on 0.0.0.0, where other hosts and"),
    ],
)
def test_a_session_open_to_others_is_reported(settings: dict[str, str], expected: str) -> None:
    conf = SparkConf().setMaster("local[1]").setAppName("access").set("spark.ui.enabled", "false")
    conf.setAll([("spark.driver.host", "127.0.0.1"), ("spark.driver.bindAddress", "127.0.0.1"), *settings.items()])
    context = SparkContext(conf=conf)
    try:
        found = exposure(context)
    finally:
        context.stop()
    assert expected in found if expected else found == ""


def secret_of(job: ClusterJob) -> str:
    """Return the secret from the environment of an executor, which only its user and root can read."""
    environment = Path(f"/proc/{job.executors()[0].pid}/environ").read_bytes().split(b"\0")
    (secret,) = [words.partition(b"=")[2].decode() for words in environment if words.startswith(b"_SPARK_AUTH_SECRET=")]
    assert len(secret) == 64
    return secret


def run_as_another(*arguments: str, told: str = "") -> subprocess.CompletedProcess[str]:
    """Run this Python as a user without any files, without the settings of the tests for Spark."""
    environment = {**os.environ, "TMPDIR": "/tmp", "HOME": "/tmp", "SPARK_CONF_DIR": "/nonexistent"}
    return subprocess.run(
        [sys.executable, "-B", *arguments],
        input=told,
        user=_NOBODY,
        group=_NOBODY,
        extra_groups=[],
        cwd="/",
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
