"""Group coordinators on this broker, and the records that groups hold back from retention."""
