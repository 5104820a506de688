"""Group coordinators on this broker, and what groups keep from retention."""
