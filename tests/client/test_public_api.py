"""Tests of the names of the package: few, existing, and cheap to import."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import sparklog
import sparklog.client.errors
import sparklog.errors
from sparklog.client.errors import BufferFull, ClientTimeout, LogTruncated, ProducerClosed
from sparklog.model import TopicPartition


def test_every_public_name_exists_and_is_documented() -> None:
    assert 15 <= len(sparklog.__all__) <= 32
    for name in sparklog.__all__:
        found = getattr(sparklog, name)
        assert name == "__version__" or found.__doc__, name
        assert name in dir(sparklog)


def test_every_raised_error_has_a_public_name() -> None:
    """The README mentions it as well."""
    found = [
        *vars(sparklog.client.errors).values(),
        *(error for error in vars(sparklog.errors).values() if error is not sparklog.errors.ProtocolError),
    ]
    names = {each.__name__ for each in found if isinstance(each, type) and issubclass(each, sparklog.SparklogError)}
    assert names <= set(sparklog.__all__) and {"LogTruncated", "ClientTimeout", "StorageError"} <= names
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert not {name for name in names if f"`{name}`" not in readme}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'sparklog' has no attribute 'Broker'"):
        sparklog.Broker


def test_importing_the_clients_needs_no_spark() -> None:
    code = (
        "import sys, sparklog; assert not {'pyarrow', 'pyspark', 'kazoo'} & set(sys.modules);"
        "sparklog.Admin, sparklog.Producer, sparklog.Consumer, sparklog.origin;"
        "assert not {'pyspark', 'kazoo', 'pandas', 'py4j'} & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("kind", [ClientTimeout, BufferFull, ProducerClosed])
def test_errors_survive_pickling(kind: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("what, and for how long")))
    assert type(error) is kind
    assert str(error) == "what, and for how long"


def test_a_truncated_log_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(LogTruncated(TopicPartition("t", 1), 9, (2, 5))))
    assert (error.tp, error.position, error.epoch, error.offset) == (TopicPartition("t", 1), 9, 2, 5)
    assert "t-1 was truncated" in str(error)
