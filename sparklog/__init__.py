"""sparklog: a partitioned, replicated log that runs as a Spark application."""
