"""Kafka's own command-line tools, which tests run against a cluster.

All commands run in one JVM, because the start of a JVM takes longer than a command. Python calls the main classes of
the tools through Py4J, which is a dependency of pyspark. A tool that fails calls Kafka's ``Exit.exit``. In this JVM it
raises an exception of Python, and the JVM continues.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pyspark
from py4j import java_gateway, protocol
from py4j.java_gateway import CallbackServerParameters, GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JJavaError

#: The main class of each tool, by the name of Kafka's script without ``.sh``.
CLASSES = {
    "kafka-acls": "org.apache.kafka.tools.AclCommand",
    "kafka-broker-api-versions": "org.apache.kafka.tools.BrokerApiVersionsCommand",
    "kafka-cluster": "org.apache.kafka.tools.ClusterTool",
    "kafka-configs": "kafka.admin.ConfigCommand",
    "kafka-consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-delegation-tokens": "org.apache.kafka.tools.DelegationTokenCommand",
    "kafka-delete-records": "org.apache.kafka.tools.DeleteRecordsCommand",
    "kafka-features": "org.apache.kafka.tools.FeatureCommand",
    "kafka-get-offsets": "org.apache.kafka.tools.GetOffsetShell",
    "kafka-groups": "org.apache.kafka.tools.GroupsCommand",
    "kafka-leader-election": "org.apache.kafka.tools.LeaderElectionCommand",
    "kafka-log-dirs": "org.apache.kafka.tools.LogDirsCommand",
    "kafka-producer-perf-test": "org.apache.kafka.tools.ProducerPerformance",
    "kafka-reassign-partitions": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "kafka-topics": "org.apache.kafka.tools.TopicCommand",
    "kafka-transactions": "org.apache.kafka.tools.TransactionsCommand",
}
_JVM = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
_END_TIMEOUT_S = 30


class ToolResult(NamedTuple):
    """The result of one command: its exit code, and what it has printed to its output and its error output."""

    code: int
    output: str


class _ExitProcedure:
    """The implementation of Kafka's interface ``Exit.Procedure``: it notes the exit code, and ends the command."""

    def __init__(self) -> None:
        self.code: int | None = None

    def execute(self, code: int, message: str | None) -> None:
        if self.code is None:
            self.code = code
        if code:
            raise RuntimeError(f"exit code {code}: {message}")

    class Java:
        implements = ("org.apache.kafka.common.utils.Exit$Procedure",)


class KafkaTools:
    """A JVM that runs the tools of the folder ``jars``, one command at a time. Owner: one test thread."""

    def __init__(self, jars: Path) -> None:
        # pyspark replaces Py4J's conversion of results in this process, by one that needs Spark's JVM.
        self._conversion = java_gateway.get_return_value
        java_gateway.get_return_value = protocol.get_return_value
        (py4j_jar,) = Path(pyspark.__file__).parent.glob("jars/py4j-*.jar")
        port, token, process = launch_gateway(
            classpath=str(jars / "*"),
            jarpath=str(py4j_jar),
            javaopts=_JVM,
            die_on_exit=True,
            enable_auth=True,
            return_proc=True,
        )
        self._process: subprocess.Popen[bytes] = process
        self._gateway = JavaGateway(
            gateway_parameters=GatewayParameters(port=port, auth_token=token),
            callback_server_parameters=CallbackServerParameters(port=0),
        )
        server = self._gateway.java_gateway_server
        server.resetCallbackClient(
            server.getCallbackClient().getAddress(), self._gateway.get_callback_server().get_listening_port()
        )
        jvm = self._gateway.jvm
        self._exit = _ExitProcedure()
        jvm.org.apache.kafka.common.utils.Exit.setExitProcedure(self._exit)
        # Scala keeps the stream that it finds first, so all commands write to the same one.
        self._output = jvm.java.io.ByteArrayOutputStream()
        stream = jvm.java.io.PrintStream(self._output, True)
        jvm.java.lang.System.setOut(stream)
        jvm.java.lang.System.setErr(stream)

    def __enter__(self) -> KafkaTools:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the JVM."""
        java_gateway.get_return_value = self._conversion
        self._gateway.shutdown()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_END_TIMEOUT_S)

    @property
    def jvm(self) -> Any:
        """Return the classes of this JVM, such as Kafka's clients."""
        return self._gateway.jvm

    def properties(self, values: Mapping[str, str]) -> Any:
        """Return Java properties with these values."""
        found = self.jvm.java.util.Properties()
        for name, value in values.items():
            found.put(name, value)
        return found

    def committing_listener(self, consumer: Any) -> Any:
        """Return a ``ConsumerRebalanceListener`` that calls ``commitSync`` of the consumer at each change.

        It is a proxy of Java around a method handle. Code of Python would call the consumer from another thread of the
        JVM, which the consumer refuses.
        """
        lang = self.jvm.java.lang
        of_name = lang.Class.forName

        def classes(*names: str) -> Any:
            found = self._gateway.new_array(lang.Class, len(names))
            for index, name in enumerate(names):
                found[index] = of_name(name)
            return found

        handles = lang.invoke.MethodHandles
        commit = handles.publicLookup().bind(consumer, "commitSync", lang.invoke.MethodType.methodType(lang.Void.TYPE))
        ignored = classes("java.lang.Object", "java.lang.reflect.Method", "[Ljava.lang.Object;")
        handler = lang.invoke.MethodHandleProxies.asInterfaceInstance(
            of_name("java.lang.reflect.InvocationHandler"), handles.dropArguments(commit, 0, ignored)
        )
        interfaces = classes("org.apache.kafka.clients.consumer.ConsumerRebalanceListener")
        return lang.reflect.Proxy.newProxyInstance(consumer.getClass().getClassLoader(), interfaces, handler)

    def call(self, tool: str, *arguments: str) -> ToolResult:
        """Run one command to its end."""
        self._output.reset()
        self._exit.code = None
        main: Any = self._gateway.jvm
        for part in CLASSES[tool].split("."):
            main = getattr(main, part)
        words = self._gateway.new_array(self._gateway.jvm.java.lang.String, len(arguments))
        for index, argument in enumerate(arguments):
            words[index] = argument
        uncaught = ""
        try:
            main.main(words)
        except Py4JJavaError as error:
            if self._exit.code is None:
                self._exit.code, uncaught = 1, str(error)
        return ToolResult(self._exit.code or 0, self._output.toString() + uncaught)

    def run(self, tool: str, *arguments: str) -> str:
        """Run one command, which must succeed. Return its output."""
        code, output = self.call(tool, *arguments)
        assert code == 0, f"{tool} {' '.join(arguments)} ended with {code}:\n{output}"
        return output

    def fail(self, tool: str, *arguments: str) -> str:
        """Run one command, which must fail. Return its output."""
        code, output = self.call(tool, *arguments)
        assert code != 0, f"{tool} {' '.join(arguments)} succeeded:\n{output}"
        return output
