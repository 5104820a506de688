"""The producer: it writes records and tables to topics, also in transactions."""
