"""The producer: from records and tables to acknowledged batches, and transactions."""
