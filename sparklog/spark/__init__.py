"""The Spark data source ``sparklog``: reads and writes of topics as Arrow batches, without loops over rows.

pyspark finds it by importing ``pyspark_sparklog``. ``source`` has the class that Spark instantiates. This package does
not start brokers.
"""
