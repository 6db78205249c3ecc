"""Jobs that ranks leave and join."""
