"""The module by which pyspark finds ``format("sparklog")``: pyspark imports installed modules named pyspark_*."""

from sparklog.spark.source import SparklogSource as DefaultSource

__all__ = ["DefaultSource"]
