"""Topics and Delta tables: the archive of a topic, reads of archive and log together, and the restore of a topic."""
