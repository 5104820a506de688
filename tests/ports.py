"""The ports of clusters in tests with fixed ports: each has a block of one hundred, because several run at the same
time."""

from __future__ import annotations

import enum


@enum.unique
class FirstPort(enum.IntEnum):
    """The first port of a cluster's block.

    The blocks are below the ports that Linux gives to connections (32,768 to 60,999, `ip_local_port_range`) and above
    those that `sparklog/testing/reserved_ports.py` chooses from (20,000 to 29,000), so no other process uses them.
    """

    KAFKA_LISTENERS = 29_292
    DELTA_PAGE = 29_392
    SPARK_PAGE = 29_492
    GENERATIONS = 29_592
    CLUSTER_JOB = 29_692
    LOCAL_CLUSTER = 29_792
    STANDALONE_SPARK = 29_892
    CLUSTER_JOB_FAULTS = 29_992
    INCOMPLETE_STOPS = 30_092
    SPARK_ACCESS = 30_192
    TUTORIAL = 30_292
    SECURE_CLUSTER = 30_392
    SECURE_STANDALONE = 30_492
    SECURE_HOSTS = 30_592
