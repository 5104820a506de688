"""The Spark data source ``sparklog``: batch reads and writes of topics on Arrow batches, without a loop over rows.

pyspark imports ``pyspark_sparklog`` to find it; ``source`` is the way in. Nothing here starts brokers.
"""
