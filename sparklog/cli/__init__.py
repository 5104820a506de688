"""The ``sparklog`` command: one file per group of commands. It prints and asks; the clients decide."""
