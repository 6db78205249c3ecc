"""Shared memory inside each host, gloo between hosts; the essay is in ``engine.py``."""
