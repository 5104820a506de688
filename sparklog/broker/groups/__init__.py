"""Group coordinators on this broker, and the records that retention keeps because groups have not read them."""
