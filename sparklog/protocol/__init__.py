"""The wire, sans-IO: frames, messages and the two ends of a connection. No sockets, no clocks."""
