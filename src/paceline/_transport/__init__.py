"""Moves bytes between ranks: shared memory, how ranks meet, objects without pickle.

It has not heard of gradients, nor of what a tensor means.
"""

from .clib import Operation
from .codec import decode, encode
from .rendezvous import Clock, fetch, prove_hosts
from .shm import (
    DTYPE_CODES,
    KIND_CODES,
    MAX_RANKS,
    REDUCTION_CODES,
    Shm,
    byte_table,
    pointer_table,
    unavailable,
)

__all__ = [
    "DTYPE_CODES",
    "KIND_CODES",
    "MAX_RANKS",
    "REDUCTION_CODES",
    "Clock",
    "Operation",
    "Shm",
    "byte_table",
    "decode",
    "encode",
    "fetch",
    "pointer_table",
    "prove_hosts",
    "unavailable",
]
