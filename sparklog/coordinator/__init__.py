"""The coordinators of transactions and consumer groups. They are pure state machines: events in, effects out."""
