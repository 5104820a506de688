"""The start, run and stop of a cluster by ``jobs/cluster.py``.

ZooKeeper and Spark's JVM start in parallel, because each takes seconds. Then the main thread waits for a signal, and
another thread manages executors and brokers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sparklog.broker.lifecycle.logging_setup import LineFormatter, bounded_file
from sparklog.cluster.client_file import client_file
from sparklog.cluster.cluster_driver import ClusterDriver
from sparklog.cluster.driver_pidfile import forget_driver, note_driver
from sparklog.cluster.options import ClusterOptions, check_network, create_data_dir, zookeeper_host
from sparklog.cluster.process import identify
from sparklog.cluster.spark_access import share_secret
from sparklog.cluster.spark_environment import prepare, remove_spark_home
from sparklog.cluster.stop_request import StopRequest
from sparklog.cluster.task_slots import cause_of
from sparklog.errors import ClusterError, SparklogError
from sparklog.escaping import escaped

#: The time to wait for the registration before Spark is started. If another driver runs the cluster, the registration
#: usually fails within this time.
_REFUSAL_S = 0.5
#: The maximum wait for the end of Spark's JVM. The JVM usually ends in a fraction of this time. A JVM that hangs must
#: not delay the end of this process after the brokers have ended.
_JVM_END_S = 3.0
#: The maximum number of log lines that are kept until the driver has registered.
_LINES_KEPT = 1000
#: The rights that no file of this process gives to other users.
_OTHERS_MAY_NOT_WRITE = 0o022


def run_cluster(options: ClusterOptions, *, tell: Callable[[str], None]) -> int:
    """Run a cluster until Ctrl-C or SIGTERM; return the exit code. ``tell`` prints messages for the user."""
    stop = _StopSignals()
    try:
        options = options.checked()
        os.umask(os.umask(_OTHERS_MAY_NOT_WRITE) | _OTHERS_MAY_NOT_WRITE)
        create_data_dir(options.data_dir)
        log_file = _log_to(options)
        return _run(options, stop, tell, registered=log_file.open)
    except SparklogError as error:
        tell(f"error: {escaped(str(error))}")
        return 1
    except OSError as error:
        tell(f"error: {escaped(str(error))}")
        return 1


def _run(
    options: ClusterOptions,
    stop: _StopSignals,
    tell: Callable[[str], None],
    *,
    registered: Callable[[], None] = lambda: None,
) -> int:
    """Start the cluster, wait for its end, and return the exit code. Call ``registered`` after the registration."""
    cluster = ClusterDriver(options)
    data_dir = options.data_dir.resolve()
    master = prepare(os.environ, brokers=options.brokers, data_dir=data_dir, secure=options.secure)
    check_network(options, master)
    registering = _Registration(cluster, host=zookeeper_host(options, master), registered=registered)
    context: SparkContext | None = None
    try:
        registering.start()
        registering.join(_REFUSAL_S)
        registering.check()
        if not stop.asked.is_set():
            context = _start_spark()
            stop.install()  # Replace Spark's handler of Ctrl-C, which cancels jobs.
        registering.join()
        registering.check()
        if context is None or stop.asked.is_set():
            return 0
        if cluster.start_brokers(context, given_up=stop.asked.is_set) is None:
            return 0
        note_driver(options.data_dir, cluster.bootstrap, cluster.zookeeper, cluster.kafka_bootstrap)
        tell(_ready(cluster, options))
        while not stop.asked.wait(1.0):
            if cluster.failure:
                tell(f"error: {escaped(cluster.failure)}; brokers keep running: start the cluster again to adopt them")
                cluster.leave()
                return 1
        return 0
    except KeyboardInterrupt:
        return 130
    finally:
        stop.install()
        began = time.monotonic()
        if registering.is_alive():
            registering.join()  # It may be starting ZooKeeper, which would keep running after this process.
        left = cluster.stop()
        if context is not None:
            end_spark(context)
        remove_spark_home(options.data_dir.resolve())
        forget_driver(options.data_dir)
        if left and sys.exc_info()[0] is None:
            raise ClusterError(left)  # The exit code 0 would mean that everything has stopped.
        if left:
            tell(escaped(left))
        elif stop.asked.is_set():
            tell(f"stopped in {time.monotonic() - began:.1f} s")


def _start_spark() -> SparkContext:
    try:
        share_secret()
        return SparkContext(conf=SparkConf())
    except (Py4JError, PySparkException) as error:
        raise ClusterError(f"Spark did not start: {cause_of(error)}") from error


def active_here(spark: SparkSession) -> SparkSession:
    """Make ``spark`` the active session of the calling thread as well, and return the session.

    The JVM searches for data sources in the active session of the calling thread. By default only the thread that
    created a session has an active session.
    """
    SparkSession._get_j_spark_session_class(spark._jvm).setActiveSession(spark._jsparkSession)
    return spark


def end_spark(context: SparkContext) -> None:
    """Stop Spark and wait until its JVM has ended. Without the wait the JVM would end only after this process."""
    with contextlib.suppress(OSError):  # The JVM has already ended.
        context.stop()
    jvm = getattr(SparkContext._gateway, "proc", None)
    if jvm is None:
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        jvm.stdin.close()  # pyspark's JVM ends when its standard input is closed.
        jvm.wait(_JVM_END_S)


class _Registration(threading.Thread):
    """The thread that starts ZooKeeper and registers the driver while Spark's JVM starts."""

    def __init__(self, cluster: ClusterDriver, *, host: str, registered: Callable[[], None]) -> None:
        super().__init__(name="sparklog-seating", daemon=True)
        self._cluster = cluster
        self._host = host
        self._registered = registered
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._cluster.register(zookeeper_host=self._host)
            self._registered()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise self._error


class _StopSignals:
    """Handlers that set an event on Ctrl-C and SIGTERM.

    A second signal ends the process without a clean stop, and the brokers keep running.
    """

    def __init__(self) -> None:
        self.asked = StopRequest()
        self.install()

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._caught)
        signal.signal(signal.SIGTERM, self._caught)

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        if self.asked.is_set():
            _write_to_stderr(b"\nleaving without stopping the brokers: start the cluster again to adopt or stop them\n")
            os._exit(128 + number)
        self.asked.set()
        _write_to_stderr(b"\nstopping the cluster (a second signal leaves at once, and the brokers keep running)\n")


def _write_to_stderr(words: bytes) -> None:
    """Write to standard error from a signal handler.

    The handler must not call ``tell``, because the signal may have interrupted a call of it. If standard error cannot
    be written at once, nothing is written.
    """
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, words)


def _ready(cluster: ClusterDriver, options: ClusterOptions) -> str:
    report = cluster.report
    assert report is not None
    adopted = sum(broker.adopted for broker in report.brokers)
    lines = [
        f"sparklog is ready after {_process_age_s():.1f} s"
        + (f" ({adopted} of {len(report.brokers)} brokers were already running)" if adopted else ""),
        "",
        f"  bootstrap servers  {cluster.bootstrap}",
        *([f"  for Kafka clients  {cluster.kafka_bootstrap}"] if cluster.kafka_bootstrap else ()),
        f"  ZooKeeper          {cluster.zookeeper}",
        f"  data directory     {options.data_dir.resolve()}",
        *([f"  client file        {client_file(options.data_dir.resolve())}"] if options.secure else ()),
        f"  first topic        {_command()}{_client_config(options)} topics create events --partitions 6"
        f" --bootstrap {cluster.bootstrap}",
        "",
        "Ctrl-C stops it.",
    ]
    return "\n".join(lines)


def _client_config(options: ClusterOptions) -> str:
    """Return the option with which a command logs in to this cluster, after a space; empty if it need not."""
    return f" --client-config {os.path.relpath(client_file(options.data_dir))}" if options.secure else ""


def _command() -> str:
    """Return the path of this environment's sparklog program, as the user can type it in the current directory."""
    beside = os.path.join(os.path.dirname(sys.executable), "sparklog")  # noqa: PTH118, PTH120  as a user types it
    return os.path.relpath(beside) if os.path.exists(beside) else "sparklog"  # noqa: PTH110


def _process_age_s() -> float:
    """Return the seconds since this process started, including the time of its imports."""
    own = identify(os.getpid())
    with open("/proc/uptime") as file:  # noqa: PTH123
        uptime_s = float(file.read().split()[0])
    return uptime_s - own.start_time / os.sysconf("SC_CLK_TCK") if own is not None else 0.0


class _DriverLog(logging.Handler):
    """A log handler that writes ``driver.log`` after ``open``.

    Until this process is the cluster's driver, another driver may be writing the file. So lines are kept until
    ``open``, which writes the last of them first.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._kept = deque[logging.LogRecord](maxlen=_LINES_KEPT)
        self._file: logging.Handler | None = None
        self.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def open(self) -> None:
        """Open the log file and write the lines that were kept until now.

        Raises OSError if the file cannot be opened.
        """
        file = bounded_file(str(self._path))
        file.setFormatter(self.formatter)
        self.acquire()
        while self._kept:
            file.emit(self._kept.popleft())
        self._file = file
        self.release()

    def emit(self, record: logging.LogRecord) -> None:
        if self._file is not None:
            self._file.emit(record)
        else:
            self._kept.append(record)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def _log_to(options: ClusterOptions) -> _DriverLog:
    """Log warnings and events of generations and brokers to the terminal, and all lines to ``driver.log``."""
    everything = _DriverLog(options.data_dir / "driver.log")
    terminal = logging.StreamHandler()
    terminal.setFormatter(LineFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    terminal.addFilter(lambda record: record.levelno >= logging.WARNING or record.name == "sparklog.cluster.barrier")
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(everything)
    root.addHandler(terminal)
    for noisy in ("py4j", "kazoo", "sparklog.zk.kazoo"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    return everything
