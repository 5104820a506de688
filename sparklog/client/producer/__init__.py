"""The producer: it writes records and tables to topics, with or without transactions."""
