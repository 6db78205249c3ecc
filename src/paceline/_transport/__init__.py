"""Moves bytes between ranks: shared memory, how ranks meet, objects without pickle.

It has not heard of gradients, nor of what a tensor means.
"""

from .agreement import Clock, agree_on, fetch, on_all, reaching_store
from .clib import Operation
from .codec import decode, encode
from .rendezvous import Neighbours, prove_hosts
from .shm import (
    DTYPE_CODES,
    KIND_CODES,
    MAX_RANKS,
    REDUCTION_CODES,
    Shm,
    byte_table,
    pointer_table,
    shortage,
    unavailable,
)
from .terms import descriptors_left
from .whole import (
    ANY_LEVEL,
    NO_LEVEL,
    OTHER_LEVEL,
    KeptFloats,
    add_terms,
    add_whole,
    has_loops,
    largest_floats,
    means_of_whole,
)

__all__ = [
    "ANY_LEVEL",
    "DTYPE_CODES",
    "KIND_CODES",
    "MAX_RANKS",
    "NO_LEVEL",
    "OTHER_LEVEL",
    "REDUCTION_CODES",
    "Clock",
    "KeptFloats",
    "Neighbours",
    "Operation",
    "Shm",
    "add_terms",
    "add_whole",
    "agree_on",
    "byte_table",
    "decode",
    "descriptors_left",
    "encode",
    "fetch",
    "has_loops",
    "largest_floats",
    "means_of_whole",
    "on_all",
    "pointer_table",
    "prove_hosts",
    "reaching_store",
    "shortage",
    "unavailable",
]
