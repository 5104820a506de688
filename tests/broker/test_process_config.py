"""A test that a broker process refuses to listen on the network without TLS and authentication."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from sparklog.broker.lifecycle.process_config import ProcessConfig


def test_a_broker_does_not_listen_unprotected_on_the_network(tmp_path: Path) -> None:
    config = ProcessConfig(
        cluster_id="c", broker_id=1, log_dir=str(tmp_path), host="h", port=9092, bind_host="0.0.0.0", zookeeper="z:1"
    )
    file = tmp_path / "broker.json"
    file.write_bytes(msgspec.json.encode(config))
    ended = subprocess.run(
        [sys.executable, "-m", "sparklog.broker", "--config", str(file)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 64
    assert ended.stderr.startswith("broker 1 would listen at 0.0.0.0:9092 without TLS and authentication: set network.")
    trusted = msgspec.structs.replace(config, settings={"network.trusted": "true"})
    assert trusted.listeners().client.host == "0.0.0.0"
