"""The ``sparklog`` command, with one module per group of commands. The commands use the public clients."""
