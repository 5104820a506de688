"""Topics and Delta tables: the archive, one history over both stores, and the way back."""
