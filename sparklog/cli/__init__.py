"""The ``sparklog`` command, with one module per group of commands. It uses the public clients."""
