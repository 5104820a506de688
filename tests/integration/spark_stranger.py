"""A client of Spark's RPC that belongs to no application: ``python spark_stranger.py HOST:PORT:ENDPOINT ...``.

Prints ``accepted`` or ``refused`` for each endpoint: first without a secret, then with the one on standard input.
"""

from __future__ import annotations

import sys
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.java_gateway import launch_gateway


def main() -> None:
    jvm = launch_gateway().jvm  # type: ignore[no-untyped-call]
    for secret in ("", sys.stdin.read()):
        rpc = _rpc(jvm, secret)
        for target in sys.argv[1:]:
            host, port, endpoint = target.split(":")
            try:
                rpc.setupEndpointRef(jvm.org.apache.spark.rpc.RpcAddress(host, int(port)), endpoint)
            except Py4JJavaError as error:
                print("refused", str(error.java_exception.getCause() or error.java_exception).replace("\n", " "))
            else:
                print("accepted")
        rpc.shutdown()


def _rpc(jvm: Any, secret: str) -> Any:
    """Create a client as Spark itself does."""
    conf = jvm.org.apache.spark.SparkConf(False)
    if secret:
        conf.set("spark.authenticate", "true").set("spark.authenticate.secret", secret)
    keys_in_file = getattr(jvm.org.apache.spark.SecurityManager, "$lessinit$greater$default$3")()
    security = jvm.org.apache.spark.SecurityManager(conf, jvm.scala.Option.empty(), keys_in_file)
    return jvm.org.apache.spark.rpc.RpcEnv.create("stranger", "127.0.0.1", 0, conf, security, True)


if __name__ == "__main__":
    main()
