"""sparklog: a partitioned, replicated log that runs as a Spark application.

The package loads each name at its first use, so ``import sparklog`` is fast and does not need Spark. If Spark is not
installed, a call of a name that needs it raises ConfigError with the command that installs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparklog.client.admin.admin import Admin as Admin
    from sparklog.client.consumer.consumer import Consumer as Consumer
    from sparklog.client.consumer.origin import Origin as Origin
    from sparklog.client.consumer.origin import origin as origin
    from sparklog.client.errors import BufferFull as BufferFull
    from sparklog.client.errors import ClientForked as ClientForked
    from sparklog.client.errors import ClientTimeout as ClientTimeout
    from sparklog.client.errors import CommitOutcomeUnknown as CommitOutcomeUnknown
    from sparklog.client.errors import CommitRefused as CommitRefused
    from sparklog.client.errors import LocalReadUnavailable as LocalReadUnavailable
    from sparklog.client.errors import LogTruncated as LogTruncated
    from sparklog.client.errors import ProducerClosed as ProducerClosed
    from sparklog.client.errors import ProducerFenced as ProducerFenced
    from sparklog.client.errors import TransactionStateError as TransactionStateError
    from sparklog.client.producer.producer import Producer as Producer
    from sparklog.client.producer.results import RecordMetadata as RecordMetadata
    from sparklog.client.producer.results import WriteResult as WriteResult
    from sparklog.cluster.local import LocalCluster as LocalCluster
    from sparklog.errors import BrokerError as BrokerError
    from sparklog.errors import ClusterError as ClusterError
    from sparklog.errors import ConfigError as ConfigError
    from sparklog.errors import ErrorCode as ErrorCode
    from sparklog.errors import SparklogError as SparklogError
    from sparklog.errors import StorageError as StorageError
    from sparklog.model import OffsetRange as OffsetRange
    from sparklog.model import TopicPartition as TopicPartition
    from sparklog.spark.configure import configure as configure
    from sparklog.spark.read import read as read
    from sparklog.spark.read_history import locate_moment as locate_moment
    from sparklog.spark.read_history import read_history as read_history

__version__ = "0.1.0"

_HOME = {
    "Admin": "sparklog.client.admin.admin",
    "BrokerError": "sparklog.errors",
    "BufferFull": "sparklog.client.errors",
    "ClientForked": "sparklog.client.errors",
    "ClientTimeout": "sparklog.client.errors",
    "ClusterError": "sparklog.errors",
    "CommitOutcomeUnknown": "sparklog.client.errors",
    "CommitRefused": "sparklog.client.errors",
    "ConfigError": "sparklog.errors",
    "Consumer": "sparklog.client.consumer.consumer",
    "ErrorCode": "sparklog.errors",
    "LocalCluster": "sparklog.cluster.local",
    "LocalReadUnavailable": "sparklog.client.errors",
    "LogTruncated": "sparklog.client.errors",
    "OffsetRange": "sparklog.model",
    "Origin": "sparklog.client.consumer.origin",
    "Producer": "sparklog.client.producer.producer",
    "ProducerClosed": "sparklog.client.errors",
    "ProducerFenced": "sparklog.client.errors",
    "RecordMetadata": "sparklog.client.producer.results",
    "SparklogError": "sparklog.errors",
    "StorageError": "sparklog.errors",
    "TopicPartition": "sparklog.model",
    "TransactionStateError": "sparklog.client.errors",
    "WriteResult": "sparklog.client.producer.results",
    "configure": "sparklog.spark.configure",
    "locate_moment": "sparklog.spark.read_history",
    "origin": "sparklog.client.consumer.origin",
    "read": "sparklog.spark.read",
    "read_history": "sparklog.spark.read_history",
}

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604 - the table above is the only list of names


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'sparklog' has no attribute {name!r}")
    try:
        found = globals()[name] = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as missing:
        from sparklog.extras import is_spark, without_spark

        if not is_spark(missing):
            raise
        return without_spark(name)  # not cached, because Spark may be installed later, for example from a notebook
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
