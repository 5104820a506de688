"""The ports of clusters in tests that must know theirs: one hundred for each, as several of them run at one time."""

from __future__ import annotations

import enum


@enum.unique
class FirstPort(enum.IntEnum):
    """Where a cluster begins to look for free ports.

    Below the ports that Linux gives to connections (32,768 to 60,999, `ip_local_port_range`) and above those that
    `tests/cluster/supervised_cluster.py` picks from (20,000 to 29,000): nobody else's, so the first ones are free.
    """

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
