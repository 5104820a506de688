"""How pyspark finds ``format("sparklog")``: it imports installed top-level modules named pyspark_* and looks here."""

from sparklog.spark.source import SparklogSource as DefaultSource

__all__ = ["DefaultSource"]
