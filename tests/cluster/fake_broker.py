"""A process that speaks the broker's end of the control protocol and does nothing else.

Run as ``fake_broker.py [behaviour] --config <file>``. Behaviours: ``serve`` (default); ``fail`` exits immediately with
an error; ``deaf`` accepts connections and never responds; ``slow`` serves, and takes some time to catch up; ``late``
and ``loading`` serve when their directory has a file ``begin``. Before that, ``late`` does not listen, and ``loading``
reports that it loads.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path


def main() -> None:
    behaviour = sys.argv[1] if not sys.argv[1].startswith("-") else "serve"
    config = json.loads(Path(sys.argv[-1]).read_text())
    if behaviour == "fail":
        sys.exit("the disk of this broker is made of cheese")
    while behaviour == "late" and not Path(config["log_dir"], "begin").exists():
        time.sleep(0.01)
    path = config["control_socket"]
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    broker = FakeBroker(config, slow=behaviour == "slow", loading=behaviour == "loading")
    while True:
        connection, _ = listener.accept()
        if behaviour != "deaf":
            threading.Thread(target=broker.converse, args=(connection,), daemon=True).start()
        else:
            broker.kept.append(connection)


class FakeBroker:
    def __init__(self, config: dict[str, object], *, slow: bool, loading: bool) -> None:
        self.config = config
        self.loading = loading
        self.highest = (config["driver_epoch"], config["generation"])
        self.quiesced = False
        self.lag = 3 if slow else 0
        self.kept: list[socket.socket] = []

    def converse(self, connection: socket.socket) -> None:
        held = None
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                command = json.loads(line)
                name = (command.get("driver_epoch"), command.get("generation"))
                if command["op"] == "hello" and name >= self.highest:
                    self.highest = held = name
                obeys = held == self.highest
                if not obeys:
                    answer: dict[str, object] = {"ok": False, "superseded_by": list(self.highest)}
                else:
                    answer = {"ok": True, **self.status()}
                if obeys and command["op"] == "quiesce":
                    self.quiesced = True
                lines.write(json.dumps(answer) + "\n")
                lines.flush()
                # stands for a RestartBroker request, which this socket does not accept
                if obeys and command["op"] == "stop":
                    os._exit(75)
                if obeys and command["op"] == "finish":
                    note = Path(str(self.config["log_dir"])) / "clean"
                    note.write_text(f"quiesced {self.quiesced}")
                    os._exit(0)

    def status(self) -> dict[str, object]:
        self.loading = self.loading and not Path(str(self.config["log_dir"]), "begin").exists()
        self.lag = max(self.lag - 1, 0) if self.quiesced else self.lag
        return {
            "broker_id": self.config["broker_id"],
            "incarnation": -1 if self.loading else 7,
            "pid": os.getpid(),
            "port": self.config["port"],
            "state": "loading" if self.loading else "running",
            "lagging": self.lag,
        }


if __name__ == "__main__":
    main()
