"""The embedded ZooKeeper server: a Java process on the driver's host, with the jars of pyspark.

The process is independent of the driver and keeps running after it, so brokers keep their sessions. The next driver
takes the server over. A restarted server keeps the port of its first start. A file identifies the running process (pid,
start time, boot), and ZooKeeper's ``srvr`` command checks it. A lock protects the start, so two drivers never start two
servers in one directory. An ensemble is not supported: set ``zookeeper.connect`` to use an existing one.

With TLS the server has no port without TLS, and accepts only clients with a certificate that a trusted authority has
signed. The server's files are PEM files: the files that ``zoo.cfg`` names, or else the files of the clients.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

from sparklog.cluster.process import ProcessIdentity, identify, is_alive, port_taken, send_signal
from sparklog.errors import ClusterError, ConfigError
from sparklog.extras import require_spark
from sparklog.model import host_and_port
from sparklog.storage.disk import PRIVATE_DIRECTORY, RealDisk, private_opener, read_file, replace_file
from sparklog.zk.security import ZooKeeperSecurity

FORMAT_VERSION = 1
#: ZooKeeper ends a session at the first tick after its time-out. With the usual tick of one or two seconds, the
#: detection of a lost host would take that much longer.
TICK_MS = 200
_SHORTEST_SESSION_MS = 1000
START_TIMEOUT_S = 30.0
#: The maximum wait until the kernel has ended a killed process.
_KILL_S = 5.0
#: The jars of pyspark that the server needs. With all 300 jars on the class path the start would take three times as
#: long.
_JARS = re.compile(
    r"(zookeeper|zookeeper-jute|slf4j-api|log4j-(api|core|slf4j2-impl)|metrics-core|snappy-java|commons-(io|cli|lang3)"
    r"|netty-(handler|buffer|common|transport|codec|codec-base|resolver|transport-native-unix-common"
    r"|transport-native-epoll|transport-classes-epoll))-[0-9].*\.jar\Z"
)
_DISK = RealDisk()
#: The files of a server's log, and of what the Java process prints.
_LOG, _OUTPUT = "server.log", "server.out"
#: The umask of the server, so that only the server's user can read the server's files.
_UMASK = 0o077
#: The configuration of the log. Its paths are relative to the working directory of the server. Any program that reaches
#: the port can make the server log a line, and a line may quote what the program has sent. So lines and files are
#: bounded: 4,000 characters, and two files of 10 MB.
_LOG_CONFIGURATION = "log4j2.properties"
_LOGGING = f"""\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {_LOG}
appender.file.filePattern = {_LOG}.%i
appender.file.append = false
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %maxLen{{%d{{ISO8601}} %-5p %t %c{{1}}: %m %ex}}{{4000}}%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 1
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
"""
_JVM_FLAGS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-Xms32m", "-Xmx256m", "-Xss512k")
#: ZooKeeper's settings with the paths of PEM files: the file with the server's certificate and key, and the file with
#: the authorities that the server trusts.
_KEY_STORE, _TRUST_STORE = "ssl.keyStore.location", "ssl.trustStore.location"
_SYSTEM_PROPERTIES = (
    "-Djava.awt.headless=true",
    "-Dzookeeper.admin.enableServer=false",
    # The kilobytes that are preallocated for each transaction log. The default of 64 MB is meant for dedicated disks.
    "-Dzookeeper.preAllocSize=4096",
)


class _Note(msgspec.Struct, frozen=True):
    """The content of ``server.json``: the last server that was started in this directory, and its permanent address."""

    version: int
    host: str
    port: int
    process: ProcessIdentity | None = None
    #: Whether the port uses TLS.
    tls: bool = False


class EmbeddedZookeeper:
    """The control of a running ZooKeeper server.

    ``start`` starts the server or takes over a running one. ``stop`` ends it, and ``leave`` leaves it running.
    ``start_again`` replaces it after a crash.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        port: int,
        process: ProcessIdentity,
        *,
        settings: Mapping[str, str],
        security: ZooKeeperSecurity,
    ) -> None:
        self.directory = directory
        self.connect = host_and_port(host, port)
        self.process = process
        self._settings = settings
        self._security = security
        #: Whether the server was already running before ``start``.
        self.adopted = True
        self._child: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        security: ZooKeeperSecurity | None = None,
    ) -> EmbeddedZookeeper:
        """Start the server of ``directory``, or take over the running one. Block until the server responds.

        The server listens on ``host``, and clients connect to it there. If ``port`` is 0, the server uses the port of
        its first start, or any free port at the first start. ``settings`` are lines of zoo.cfg that override the
        defaults. ``security`` has the clients' settings. The server uses TLS if and only if they do.

        Raises:
            ClusterError: Java is missing, another program uses the recorded port, the server did not start (with the
                end of its output), or a running server uses TLS and ``security`` does not, or the reverse.
            ConfigError: Spark, whose jars include the server, is not installed, or a file for TLS cannot be used.
        """
        settings, security = settings or {}, security or ZooKeeperSecurity()
        # The directory is private to this user: another user who could read the lock file could hold the lock and
        # prevent a start.
        directory.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            directory.chmod(PRIVATE_DIRECTORY)
        with _lock(directory):
            note = _read_note(directory)
            if note is not None and note.process is not None and is_alive(note.process):
                if note.tls is not security.tls:
                    raise ClusterError(
                        f"the running ZooKeeper of {directory} (pid {note.process.pid}) serves"
                        f" {'only with' if note.tls else 'without'} TLS: stop the cluster before you change that"
                    )
                server = cls(directory, note.host, note.port, note.process, settings=settings, security=security)
            else:
                port = port or (note.port if note is not None else 0)
                server = cls._launch(directory, host, port, settings=settings, security=security)
            server._await_ready()
            return server

    def start_again(self) -> EmbeddedZookeeper | None:
        """Start a new server with the port and the data of this one, which has ended. Return the new server.

        If another driver has already started one, return that server. Return None if this server was stopped
        deliberately.

        Raises:
            ClusterError, ConfigError: the new server did not start, for one of the reasons that ``start`` names.
        """
        if not self.directory.is_dir():
            return None
        with _lock(self.directory):
            note = _read_note(self.directory)
            if note is None or note.process is None:
                return None
            if is_alive(note.process):
                server = type(self)(
                    self.directory,
                    note.host,
                    note.port,
                    note.process,
                    settings=self._settings,
                    security=self._security,
                )
            else:
                server = self._launch(
                    self.directory, note.host, note.port, settings=self._settings, security=self._security
                )
            server._await_ready()
            self._reap()
            return server

    @classmethod
    def _launch(
        cls, directory: Path, host: str, port: int, *, settings: Mapping[str, str], security: ZooKeeperSecurity
    ) -> EmbeddedZookeeper:
        if port and port_taken(host, port):
            raise ClusterError(
                f"port {port} on {host}, which belongs to the ZooKeeper of {directory}, is used by another program"
            )
        port = port or _free_port(host)
        data = directory / "data"
        data.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
        config = directory / "zoo.cfg"
        stores = _stores(directory, settings, security) if security.tls else {}
        _write(config, _configuration(data, host, port, {**settings, **stores}, tls=security.tls))
        _write(directory / _LOG_CONFIGURATION, _LOGGING)
        (directory / _LOG).unlink(missing_ok=True)  # ``_last_words`` must not find lines of an earlier start.
        command = [find_java(), *_JVM_FLAGS, *_SYSTEM_PROPERTIES, f"-Dlog4j2.configurationFile={_LOG_CONFIGURATION}"]
        command += ["-cp", _class_path()]
        command += ["org.apache.zookeeper.server.quorum.QuorumPeerMain", str(config)]
        with open(directory / _OUTPUT, "wb", opener=private_opener) as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                start_new_session=True,
                umask=_UMASK,
            )
        process = identify(child.pid)
        if process is None:
            child.wait()
            raise ClusterError(f"ZooKeeper did not start: {_last_words(directory)}")
        try:
            _write_note(directory, _Note(FORMAT_VERSION, host, port, process, tls=security.tls))
        except BaseException:
            # The file could not be written, for example because the disk is full. Stop the server, because it could not
            # be identified later and would keep its port in use.
            child.kill()
            child.wait()
            raise
        server = cls(directory, host, port, process, settings=settings, security=security)
        server.adopted = False
        server._child = child
        return server

    @property
    def pid(self) -> int:
        return self.process.pid

    def _await_ready(self) -> None:
        context = self._security.context() if self._security.tls else None
        host, _, port = self.connect.replace("[", "").replace("]", "").rpartition(":")
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not is_alive(self.process):
                if self._child is not None:
                    self._child.wait()
                raise ClusterError(f"ZooKeeper stopped while starting: {_last_words(self.directory)}")
            try:
                if answers(host, int(port), context=context):
                    return
            except ssl.SSLCertVerificationError as error:
                self._end_own()
                raise ClusterError(f"ZooKeeper at {self.connect}: its certificate was refused: {error}") from None
            time.sleep(0.02)
        found = f"ZooKeeper (pid {self.pid}) did not respond at {self.connect} within {START_TIMEOUT_S:g} s"
        self._end_own()
        raise ClusterError(f"{found}: {_last_words(self.directory)}")

    def _end_own(self) -> None:
        """End the server if ``start`` has started it."""
        if not self.adopted:
            self._end(timeout_s=0.0)

    def leave(self) -> None:
        """Give up the control of the server, which keeps running."""
        if self._child is not None:
            # Otherwise Popen's finalizer would warn that the child still runs, which is intended here.
            self._child.returncode = 0
            self._child = None

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Stop the server with SIGTERM, or with SIGKILL after ``timeout_s``. Its data is safe in both cases."""
        if not self.directory.is_dir():
            self._end(timeout_s=timeout_s)
            return
        with _lock(self.directory):
            self._end(timeout_s=timeout_s)
            note = _read_note(self.directory)
            # Record the stop under the lock, so that another driver does not mistake it for a crash and restart the
            # server.
            if note is not None and note.process == self.process:
                _write_note(self.directory, msgspec.structs.replace(note, process=None))

    def _end(self, *, timeout_s: float) -> None:
        send_signal(self.process, signal.SIGCONT)
        if send_signal(self.process, signal.SIGTERM) and not self._gone_within(timeout_s):
            send_signal(self.process, signal.SIGKILL)
            self._gone_within(_KILL_S)
        self._reap()

    def _reap(self) -> None:
        if self._child is not None:
            self._child.wait()
            self._child = None

    @property
    def is_alive(self) -> bool:
        return is_alive(self.process)

    @property
    def has_been_stopped(self) -> bool:
        """Return whether the server was stopped deliberately, by any process.

        Return False if the server crashed, or if another server has replaced it. If the directory of the server was
        deleted, return whether the server has ended.

        Raises:
            ClusterError: ``server.json`` cannot be read.
        """
        if not self.directory.is_dir():
            return not self.is_alive
        note = _read_note(self.directory)
        return note is None or note.process is None

    def _gone_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while is_alive(self.process):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def find_java() -> str:
    """Return the path of the program java, in JAVA_HOME or else in PATH.

    Raises:
        ClusterError: Java was not found.
    """
    home = os.environ.get("JAVA_HOME")
    if home and (found := shutil.which("java", path=str(Path(home) / "bin"))):
        return found
    if found := shutil.which("java"):
        return found
    raise ClusterError("no Java found: install Java 17 or newer, or set JAVA_HOME")


def answers(host: str, port: int, *, context: ssl.SSLContext | None = None, timeout_s: float = 1.0) -> bool:
    """Return whether a ZooKeeper server at this address serves requests. If ``context`` is given, connect with TLS.

    Raises:
        SSLCertVerificationError: the server's certificate is not trusted, or is for another host.
    """
    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((host, port), timeout=timeout_s))
            if context is not None:
                connection = stack.enter_context(context.wrap_socket(connection, server_hostname=host))
            connection.sendall(b"srvr")
            reply = b""
            while chunk := connection.recv(4096):
                reply += chunk
    except ssl.SSLCertVerificationError:
        raise
    except OSError:
        return False
    return b"Mode:" in reply


def _stores(directory: Path, settings: Mapping[str, str], security: ZooKeeperSecurity) -> dict[str, str]:
    """Return the lines of zoo.cfg for TLS. Raises ConfigError if there is no certificate, or it cannot be read."""
    trusted = settings.get(_TRUST_STORE, security.ca)
    keys = settings.get(_KEY_STORE)
    if keys is None:
        if not security.certificate:
            raise ConfigError(f"the embedded ZooKeeper with TLS needs zookeeper.ssl.keystore.location, or {_KEY_STORE}")
        keys = security.certificate
        if security.key:
            keys = str(_one_file(directory, security))
    return {
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        _KEY_STORE: keys,
        "ssl.keyStore.type": "PEM",
        _TRUST_STORE: trusted,
        "ssl.trustStore.type": "PEM",
        "ssl.clientAuth": "need",
        "ssl.enabledProtocols": "TLSv1.3,TLSv1.2",
        # The maximum number of clients that have not proved a certificate yet.
        "netty.server.outstandingHandshake.limit": "250",
        # The addresses of brokers are not in their certificates. The clients do check the server's name.
        "ssl.hostnameVerification": "false",
        "ssl.clientHostnameVerification": "false",
    }


def _one_file(directory: Path, security: ZooKeeperSecurity) -> Path:
    """Write the certificate and its key to one file, as ZooKeeper reads them."""
    path = directory / "keystore.pem"
    try:
        content = Path(security.certificate).read_bytes() + b"\n" + Path(security.key).read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS for ZooKeeper: {error.filename}: {error.strerror}") from None
    path.unlink(missing_ok=True)
    with open(path, "xb", opener=private_opener) as file:
        file.write(content)
    return path


def _configuration(data: Path, host: str, port: int, settings: Mapping[str, str], *, tls: bool) -> str:
    prefix = "secureClientPort" if tls else "clientPort"
    lines = {
        "tickTime": str(TICK_MS),
        "minSessionTimeout": str(_SHORTEST_SESSION_MS),
        "maxSessionTimeout": "600000",
        "maxClientCnxns": "0",
        "admin.enableServer": "false",
        "autopurge.snapRetainCount": "3",
        "autopurge.purgeInterval": "1",
        **settings,
        # These lines cannot be overridden, because this module relies on them.
        "4lw.commands.whitelist": "srvr,ruok,mntr",
        "dataDir": str(data),
        f"{prefix}Address": host,
        prefix: str(port),
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def _class_path() -> str:
    """Return the class path of ZooKeeper's server, with jars of Spark.

    Raises:
        ClusterError: none of Spark's jar directories has ZooKeeper's server. ConfigError: Spark is not installed.
    """
    directories = _jar_directories()
    for directory in directories:
        names = sorted(directory.glob("*.jar")) if directory.is_dir() else []
        jars = [str(jar) for jar in names if _JARS.match(jar.name)]
        if any("zookeeper-3" in jar for jar in jars):
            return ":".join(jars)
    require_spark("the embedded ZooKeeper server")
    raise ClusterError(
        f"no ZooKeeper jar in {', '.join(map(str, directories))}; pass an existing server as zookeeper.connect instead"
    )


def _jar_directories() -> list[Path]:
    """Return the directories in which Spark's jars may be.

    In ``--deploy-mode cluster`` pyspark is a zip file without jars. The jars are then in Spark's home, or on YARN in
    the container's working directory.
    """
    spec = find_spec("pyspark")
    found = [Path(spec.origin).parent / "jars"] if spec is not None and spec.origin is not None else []
    if home := os.environ.get("SPARK_HOME"):
        found.append(Path(home) / "jars")
    return [*found, Path.cwd() / "__spark_libs__"]


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    deadline = time.monotonic() + START_TIMEOUT_S + 5
    with open(directory / "lock", "ab", opener=private_opener) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"another process has been starting or stopping ZooKeeper in {directory} for too long"
                    ) from None
                time.sleep(0.05)
        yield


def _write(path: Path, text: str) -> None:
    with open(path, "w", opener=private_opener) as file:
        file.write(text)


def _read_note(directory: Path) -> _Note | None:
    path = directory / "server.json"
    try:
        note = msgspec.json.decode(read_file(_DISK, path), type=_Note)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ClusterError(f"{path}: {error}") from None
    if note.version > FORMAT_VERSION:
        raise ClusterError(
            f"{path} has format version {note.version}; this version of sparklog supports up to {FORMAT_VERSION}"
        )
    return note


def _write_note(directory: Path, note: _Note) -> None:
    """Write ``server.json`` durably, because clients find a restarted server only if it keeps the port in the file."""
    replace_file(_DISK, directory / "server.json", msgspec.json.encode(note))


def _last_words(directory: Path) -> str:
    lines: list[str] = []
    for name in (_OUTPUT, _LOG):
        with contextlib.suppress(FileNotFoundError):
            lines += (directory / name).read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-3:])[-500:] or "no output"
