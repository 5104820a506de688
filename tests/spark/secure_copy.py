"""A Spark application that copies a topic of a secure cluster: a test starts it, and kills its executors and it.

The arguments are the Master, the brokers' addresses, the CA, the file of the password, a directory, and ``once`` to
copy what exists and end.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession


def main() -> None:
    master, bootstrap, ca, password, directory, mode = sys.argv[1:]
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    secure = {
        "kafka.bootstrap.servers": bootstrap,
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-256",
        "kafka.sasl.jaas.config": f'{module} required username="admin" password="${{file:{password}}}";',
        "kafka.ssl.truststore.location": ca,
        "kafka.ssl.truststore.type": "PEM",
    }
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.eventLog.enabled", "true").config("spark.eventLog.dir", f"{directory}/events")
    builder = builder.config("spark.executor.memory", "512m").config("spark.local.dir", f"{directory}/local")
    spark = builder.getOrCreate()
    source = spark.readStream.format("sparklog").options(**secure).option("subscribe", "source")
    frame = source.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "10").load()
    writer = frame.select("value").writeStream.format("sparklog").options(**secure).option("topic", "target")
    writer = writer.option("checkpointLocation", f"{directory}/checkpoint")
    writer = writer.trigger(availableNow=True) if mode == "once" else writer.trigger(processingTime="0 seconds")
    writer.start().awaitTermination()


if __name__ == "__main__":
    main()
