"""A test of ``--secure`` on two hosts: each has a network, a name, a data directory and a runtime directory of its own.

The hosts are namespaces of this machine, so the test needs root. The Master and the driver run on a third host.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from cryptography import x509

from sparklog.cluster.spark_environment import PRIVATE_CHANNEL
from sparklog.errors import ClusterError
from sparklog.testing.namespaces import NamespaceNetwork
from sparklog.testing.network import CLIENT, broker_party
from tests.conftest import ROOT
from tests.ports import FirstPort

pytestmark = [
    pytest.mark.integration,
    pytest.mark.extended,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"),
]

HOSTS = (0, 1)
MASTER_PORT = FirstPort.SECURE_HOSTS + 90
READY_S = 150.0
#: What a host's processes start with: a name, the names of all hosts, and directories of their own.
ENTER = """
mount --bind "$1" /etc/hosts; hostname "$2"
if [ -n "$3" ]; then mount --bind "$3/runtime" "$4"; mount --bind "$3/data" "$5"; fi
shift 5; exec "$@"
"""
WRITE = """
import sys
from sparklog import Producer
with Producer(sys.argv[1], security=sys.argv[2], acks="all") as producer:
    print("offset", producer.send("events", b"hello").result(60).offset)
"""


class Host:
    """One host: its address and name, its directories, and the processes that the test has started on it."""

    def __init__(self, hosts: SecureHosts, party: str, name: str) -> None:
        self._hosts = hosts
        self._party = party
        self.name = name
        self.address = hosts.network._address(party)
        self.directory = hosts.directory / name
        self.processes: list[subprocess.Popen[bytes]] = []
        for part in ("runtime", "data"):
            (self.directory / part).mkdir(0o700, parents=True)

    @property
    def security(self) -> Path:
        """Return the directory of the host's keys and certificates, as this process sees it."""
        return (self._hosts.data_dir if self._party == CLIENT else self.directory / "data") / "security"

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        hosts = self._hosts
        own = "" if self._party == CLIENT else str(self.directory)
        runtime = f"/tmp/sparklog-{os.geteuid()}"
        words = (str(hosts.names), self.name, own, runtime, str(hosts.data_dir))
        environment = {
            **os.environ,
            "SPARK_LOCAL_IP": self.address,
            "SPARK_HOME": str(spark_home()),
            "SPARK_LOCAL_DIRS": str(self.directory / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
            "PYTHONPATH": str(ROOT),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_SUBMIT_ARGS": hosts.submit,
        }

        def launch() -> subprocess.Popen[bytes]:
            with (self.directory / "log").open("ab") as output:
                return subprocess.Popen(
                    ["unshare", "-u", "-m", "sh", "-ec", ENTER, "sh", *words, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=self.directory,
                    env=environment,
                    start_new_session=True,
                )

        made: subprocess.Popen[bytes] = hosts.network.inside(self._party, launch)
        self.processes.append(made)
        return made

    def spark(self, kind: str, *words: str) -> None:
        """Start a Master or a Worker."""
        daemon = f"org.apache.spark.deploy.{kind.lower()}.{kind}"
        options = ("--host", self.address, "--webui-port", "0", "--properties-file", str(self._hosts.properties))
        self.start(str(spark_home() / "bin" / "spark-class"), daemon, *options, *words)

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def running(self) -> list[int]:
        """Return the processes in the network of this host, with brokers that no process of the test has started."""
        own = network_of(Path(f"/proc/self/fd/{self._hosts.network._places[self._party].namespace}"))
        processes = Path("/proc").glob("[0-9]*")
        return [int(entry.name) for entry in processes if network_of(entry / "ns" / "net") == own]


class SecureHosts:
    """Two hosts with a Spark Worker each, and a host with the Master and the driver."""

    def __init__(self, network: NamespaceNetwork, directory: Path) -> None:
        self.network = network
        self.directory = directory
        self.data_dir = directory / "cluster"
        self.data_dir.mkdir(0o700)
        for number in HOSTS:
            network.add_broker(number)
        self.driver = Host(self, CLIENT, "driver.test")
        self.hosts = [Host(self, broker_party(number), f"host-{number}.test") for number in HOSTS]
        self.names = directory / "hosts"
        lines = [f"{host.address} {host.name}\n" for host in (self.driver, *self.hosts)]
        self.names.write_text("127.0.0.1 localhost\n" + "".join(lines))
        settings = {**PRIVATE_CHANNEL, "spark.authenticate.secret": secrets.token_hex(32)}
        self.properties = directory / "spark.conf"
        self.properties.touch(0o600)
        self.properties.write_text("".join(f"{name} {text}\n" for name, text in settings.items()))
        master = f"spark://{self.driver.address}:{MASTER_PORT}"
        self.submit = (
            f"--master {master} --total-executor-cores 2 --executor-memory 512m --properties-file {self.properties}"
            f" --conf spark.ui.enabled=false --conf spark.driver.host={self.driver.address} pyspark-shell"
        )
        self.job: subprocess.Popen[bytes] | None = None
        self.driver.spark("Master", "--port", str(MASTER_PORT))
        for host in self.hosts:
            work = str(host.directory / "work")
            host.spark("Worker", "--cores", "1", "--memory", "640m", "--work-dir", work, master)

    def start(self) -> str:
        """Start the cluster, and return the addresses of its brokers."""
        words = ("--secure", "--brokers", "2", "--data-dir", str(self.data_dir), "--port", str(FirstPort.SECURE_HOSTS))
        process = self.job = self.driver.start(sys.executable, str(ROOT / "jobs" / "cluster.py"), *words)
        deadline = time.monotonic() + READY_S
        while "bootstrap servers" not in self.driver.log():
            assert process.poll() is None and time.monotonic() < deadline, self.driver.log()[-3000:]
            time.sleep(0.1)
        return self.driver.log().split("bootstrap servers", 1)[1].split()[0]

    def command(self, *words: str) -> str:
        """Run a command of the CLI as the administrator on the driver's host, and return its output."""
        config = ("--client-config", str(self.driver.security / "client.conf"))
        return self.run("-m", "sparklog.cli.main", *config, *words)

    def run(self, *words: str) -> str:
        """Run Python on the driver's host, and return its output."""
        before = len(self.driver.log())
        process = self.driver.start(sys.executable, *words)
        code, printed = process.wait(60), self.driver.log()[before:]
        assert code == 0, printed
        return printed

    def stop(self) -> None:
        """Stop the cluster, which also ends its ZooKeeper, and then end the processes of all hosts."""
        if self.job is not None:
            self.job.terminate()
            self.job.wait(60)
        for host in (*self.hosts, self.driver):
            for process in host.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)
        for host in self.hosts:
            for pid in host.running():
                os.kill(pid, signal.SIGKILL)


def network_of(path: Path) -> int:
    """Return the number of a network namespace, or -1 if its process has ended."""
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def spark_home() -> Path:
    spec = find_spec("pyspark")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SecureHosts]:
    try:
        network = NamespaceNetwork()
    except ClusterError as reason:
        pytest.skip(str(reason))
    found = SecureHosts(network, tmp_path)
    try:
        yield found
    finally:
        found.stop()
        network.close()


def test_each_host_has_its_own_key_and_no_other(hosts: SecureHosts) -> None:
    bootstrap = hosts.start()
    assert sorted(address.partition(":")[0] for address in bootstrap.split(",")) == ["host-0.test", "host-1.test"]
    hosts.command("topics", "create", "events", "--replication-factor", "2", "--bootstrap", bootstrap)
    # The write is complete when the other broker has fetched it, so each has accepted the other's certificate.
    assert "offset 0" in hosts.run("-c", WRITE, bootstrap, str(hosts.driver.security / "client.conf"))
    assert "hello" in hosts.command("consume", "events", "--from", "earliest", "--bootstrap", bootstrap)
    keys = []
    for host in hosts.hosts:
        assert sorted(path.name for path in host.security.iterdir()) == ["broker-key.pem", "broker.pem", "ca.pem"]
        certificate = x509.load_pem_x509_certificate((host.security / "broker.pem").read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [host.name]
        keys.append((host.security / "broker-key.pem").read_text())
    assert keys[0] != keys[1]
    assert not (hosts.driver.security / "broker-key.pem").exists()
    everywhere = [path for path in hosts.directory.rglob("*") if path.is_file() and not path.is_symlink()]
    for key, host in zip(keys, hosts.hosts, strict=True):
        line = key.splitlines()[1].encode()
        assert [path for path in everywhere if line in path.read_bytes()] == [host.security / "broker-key.pem"]
    hosts.stop()
    assert hosts.job is not None and hosts.job.returncode == 0, hosts.driver.log()[-3000:]
    assert not any(host.running() for host in hosts.hosts), "no broker is left"
