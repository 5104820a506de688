"""``sparklog brokers``: what runs where."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sparklog.cli.options import AsJson, Bootstrap, Timeout, servers
from sparklog.cli.output import human_bytes, note, print_json, print_table
from sparklog.client.admin import Admin
from sparklog.client.descriptions import BrokerDescription, ClusterDescription


def brokers(bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """Show the live brokers: address, state, partitions led, replicas, size.

    Example: sparklog brokers --json
    """
    with Admin(servers(bootstrap), timeout_s=timeout) as admin:
        cluster = admin.describe_cluster()
        found = admin.describe_brokers()
    if as_json:
        print_json(_plain(cluster, found))
        return
    rows = [
        (
            broker.address.broker_id,
            f"{broker.address.host}:{broker.address.port}",
            broker.address.rack,
            broker.state,
            broker.pid or None,
            broker.leaders,
            len(broker.replicas),
            human_bytes(broker.size_bytes),
        )
        for broker in found
    ]
    columns = ("broker", "address", "rack", "state", "pid", "leads", "replicas", "size")
    print_table(columns, rows, title=f"cluster {cluster.cluster_id}", numeric=("broker", "pid", "leads", "replicas"))
    for broker in found:
        if broker.error:
            note(f"sparklog: broker {broker.address.broker_id}: {broker.error}")


def _plain(cluster: ClusterDescription, found: list[BrokerDescription]) -> dict[str, Any]:
    return {
        "cluster_id": cluster.cluster_id,
        "controller_epoch": cluster.controller_epoch,
        "brokers": [
            {
                **asdict(broker.address),
                "state": broker.state,
                "pid": broker.pid,
                "version": broker.version,
                "log_dir": broker.log_dir,
                "leaders": broker.leaders,
                "replicas": len(broker.replicas),
                "size_bytes": broker.size_bytes,
                "counters": dict(broker.counters),
                "error": broker.error,
            }
            for broker in found
        ],
    }
