"""Tests of what follows from arguments, settings files and Spark masters."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from sparklog.cluster.options import (
    DEFAULT_KAFKA_PORT,
    TRUSTED_NETWORK,
    ClusterOptions,
    Sizing,
    brokers_per_task,
    check_network,
    merged,
    read_settings,
    sizing,
    with_kafka,
)
from sparklog.cluster.spark_environment import prepare, remove_spark_home, submitted_master
from sparklog.cluster.task_slots import most_slots, too_few_slots
from sparklog.config import broker_config
from sparklog.errors import ConfigError
from tests.conftest import ROOT

ZOOKEEPER_TLS = {"zookeeper.ssl.client.enable": "true", "zookeeper.ssl.truststore.location": "/pem/ca.pem"}


def options(**changes: object) -> ClusterOptions:
    return ClusterOptions(**{"data_dir": Path("data"), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "master", "tasks", "per_task"),
    [
        ({}, "local-cluster[3,2,1024]", 3, 1),
        ({}, "local[4]", 1, 3),
        ({}, "local", 1, 3),
        ({"brokers_per_executor": 2}, "local-cluster[3,2,1024]", 2, 2),
        ({"log_dirs": (Path("a"), Path("b")), "brokers": 5}, "spark://host:7077", 3, 2),
        ({"log_dirs": (Path("a"), Path("b"), Path("c"))}, "local-cluster[3,2,1024]", 3, 1),
    ],
)
def test_tasks_follow_from_brokers_and_master(
    changes: dict[str, object], master: str, tasks: int, per_task: int
) -> None:
    chosen = options(**changes)
    assert sizing(chosen, master).tasks == tasks
    assert brokers_per_task(chosen, master) == per_task


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"brokers": 0}, "brokers=0"),
        ({"port": 70_000}, "port=70000"),
        ({"kafka_port": -1}, "Kafka port=-1"),
        ({"log_dirs": (Path("a"), Path("./a"))}, "must differ"),
        ({"settings": {"num.partition": "1"}}, "did you mean 'num.partitions'"),
    ],
)
def test_options_out_of_range_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes).checked()


@pytest.mark.parametrize(
    ("changes", "master", "refused"),
    [
        ({}, "local[4]", ""),
        ({}, "local-cluster[3,2,1024]", ""),
        ({"advertised_host": "127.0.0.1"}, "spark://host:7077", ""),
        ({"advertised_host": "host-1"}, "local[4]", "a broker would listen at 0.0.0.0:9092"),
        ({"zookeeper": "zk:2181"}, "yarn", "a broker would listen at 0.0.0.0:9092"),
        ({"settings": {"listeners": "PLAINTEXT://127.0.0.1:9092"}}, "yarn", "the embedded ZooKeeper would listen at"),
        ({"settings": TRUSTED_NETWORK}, "yarn", ""),
        ({"settings": {"listeners": "PLAINTEXT://127.0.0.1:9092", **ZOOKEEPER_TLS}}, "yarn", ""),
    ],
)
def test_a_cluster_on_an_untrusted_network_is_refused(changes: dict[str, object], master: str, refused: str) -> None:
    if not refused:
        check_network(options(**changes), master)
        return
    with pytest.raises(ConfigError, match=re.escape(refused)) as caught:
        check_network(options(**changes), master)
    assert "set network.trusted=true (--trusted-network)" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "master", "listener"),
    [
        ({}, "local-cluster[3,2,1024]", "PLAINTEXT://127.0.0.1:29092"),
        ({"advertised_host": "host-1"}, "local[4]", "PLAINTEXT://127.0.0.1:29092"),
        ({"kafka_port": 0}, "local[4]", None),
        ({"settings": TRUSTED_NETWORK}, "yarn", None),
        ({"settings": {"listeners": "PLAINTEXT://127.0.0.1:9092"}}, "local[4]", None),
        ({"settings": {"kafka.listeners": "PLAINTEXT://127.0.0.1:1"}}, "yarn", "PLAINTEXT://127.0.0.1:1"),
        ({"secure": True}, "yarn", "SASL_SSL://:29092"),
    ],
)
def test_kafka_clients_of_one_machine_or_with_a_login_are_served(
    changes: dict[str, object], master: str, listener: str | None
) -> None:
    chosen = options(**{"kafka_port": DEFAULT_KAFKA_PORT, **changes})
    assert with_kafka(chosen, master).get("kafka.listeners") == listener


def test_only_an_embedded_zookeeper_gets_short_sessions() -> None:
    def session_ms(checked: ClusterOptions) -> int:
        return broker_config(checked.settings).session_timeout_ms

    shipped = read_settings(ROOT / "conf" / "broker.conf")
    assert session_ms(options(settings=shipped).checked()) == 2000
    assert session_ms(options(settings=shipped, zookeeper="zk:2181").checked()) == 6000
    assert session_ms(options(settings={"zookeeper.session.timeout.ms": "9000"}).checked()) == 9000


def test_the_shipped_settings_are_valid_and_overridden() -> None:
    settings = merged(read_settings(ROOT / "conf" / "broker.conf"), {"num.partitions": "7"})
    assert broker_config(settings).num_partitions == 7


def test_an_invalid_settings_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("# fine\nnum.partitions 3\n")
    with pytest.raises(ConfigError, match=r"broker\.conf, line 2: expected key = value, found 'num\.partitions 3'"):
        read_settings(file)


def test_an_error_about_too_few_slots_names_the_remedy() -> None:
    text = too_few_slots(2, Sizing(tasks=3, spare=1), brokers=3, master="local-cluster[1,2,1024]")
    assert "3 brokers need 3 task slots at the same time and 1 for user jobs, 4 in all" in text
    assert "local-cluster[1,2,1024] has 2" in text
    assert "local-cluster[4,1,1024]" in text
    assert "local[2]" in too_few_slots(1, Sizing(1, 1), brokers=3, master="local[1]")
    assert "spark.cores.max" in too_few_slots(1, Sizing(3, 0), brokers=3, master="spark://h:7077")


@pytest.mark.parametrize(
    ("master", "slots"),
    [
        ("local", 1),
        ("local[3]", 3),
        ("local[ 2 , 4 ]", 2),
        ("local-cluster[3,2,1024]", 6),
        ("local[*]", sys.maxsize),
        ("spark://host:7077", sys.maxsize),
    ],
)
def test_a_master_may_name_its_slots(master: str, slots: int) -> None:
    assert most_slots(master) == slots


@pytest.mark.parametrize(
    ("arguments", "master"),
    [
        ("pyspark-shell", None),
        ("--master local[2] pyspark-shell", "local[2]"),
        ("--master=local[2] --conf spark.master=local[3] pyspark-shell", "local[2]"),
        ("--conf spark.master=local[3] pyspark-shell", "local[3]"),
        ("--name --master --conf a=b pyspark-shell", None),
    ],
)
def test_the_users_master_is_recognized(arguments: str, master: str | None) -> None:
    assert submitted_master({"PYSPARK_SUBMIT_ARGS": arguments}) == master


def test_the_users_master_is_recognized_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text("# spark.master no\nspark.master   spark://h:7077\n")
    assert submitted_master({"SPARK_CONF_DIR": str(tmp_path)}) == "spark://h:7077"


def test_defaults_precede_the_users_options(tmp_path: Path) -> None:
    environment = {"PYSPARK_SUBMIT_ARGS": "--conf spark.app.name=mine pyspark-shell"}
    assert prepare(environment, brokers=4, data_dir=tmp_path) == "local-cluster[4,2,1024]"
    arguments = environment["PYSPARK_SUBMIT_ARGS"]
    assert "spark.master=local-cluster[4,2,1024]" in arguments
    assert arguments.index("spark.app.name=sparklog") < arguments.index("spark.app.name=mine")
    home = Path(environment["SPARK_HOME"])
    assert (home / "bin" / "spark-submit").is_file()
    assert (home / "work").is_dir()
    assert not (home / "work").is_symlink()
    remove_spark_home(tmp_path)
    assert not home.exists()


def test_a_users_own_master_keeps_spark_home(tmp_path: Path) -> None:
    environment = {"PYSPARK_SUBMIT_ARGS": "--master spark://h:7077 pyspark-shell"}
    assert prepare(environment, brokers=3, data_dir=tmp_path) == "spark://h:7077"
    assert "SPARK_HOME" not in environment
    assert "spark.master=" not in environment["PYSPARK_SUBMIT_ARGS"]
