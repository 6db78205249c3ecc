"""The C library ``_shm.so`` (shm.c), opened through ctypes, and the records it shares with us."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

# The numbers below are those of the enums in shm.c and shm_reduce.h.
KINDS = (
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "reduce_scatter",
    "send",
    "recv",
)
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")

DONE, AGAIN = 0, 1
TIMED_OUT, PEER_DIED, PEER_LEFT, PEER_ABORTED, ABORTED, MISMATCH = -1, -2, -3, -4, -5, -6
CLOSED, FORKED = -8, -9
GARBLED, NO_MEMORY, BAD_CALL = -10, -11, -12

RUN, SUBMIT, SUBMIT_QUIETLY = 0, 1, 2


def name_in(names: Sequence[object], number: int) -> str:
    """What ``number``, read from shared memory, stands for; it may stand for nothing."""
    return str(names[number]) if 0 <= number < len(names) else f"unknown ({number})"


class CallRecord(ctypes.Structure):
    """What one rank called, as all ranks can read it."""

    _fields_ = (
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("reduce", c_uint32),
        ("root", c_int32),
        ("count", c_uint64),
        ("offset", c_uint64),
        ("tables", c_uint32),
        ("small", c_uint32),
    )


class Operation(ctypes.Structure):
    """One operation: what is asked, what came of it, and room for the engine's own state."""

    _fields_ = (
        ("engine", c_void_p),
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("reduce", c_uint32),
        ("itemsize", c_uint32),
        ("root", c_int32),
        ("mode", c_int32),
        ("tag", c_int64),
        ("timeout_ns", c_int64),
        ("patience_ns", c_int64),
        ("count", c_uint64),
        ("input", c_void_p),
        ("output", c_void_p),
        ("src", POINTER(c_void_p)),
        ("dst", POINTER(c_void_p)),
        ("give", POINTER(c_uint64)),
        ("take", POINTER(c_uint64)),
        ("deadline", c_int64),
        ("status", c_int32),
        ("reporter", c_int32),
        ("culprits", c_uint64),
        ("sequence", c_uint64),
        ("side_a", c_int32),
        ("side_b", c_int32),
        ("source", c_int32),
        ("pad", c_int32),
        ("call_a", CallRecord),
        ("call_b", CallRecord),
        ("bytes_a", c_uint64),
        ("bytes_b", c_uint64),
        ("engine_state", ctypes.c_byte * 80),
    )
    keep: object = None  # the memory the engine uses until the operation is done
    starting = False  # the engine may not have it yet, and would say that it is done


# What is asked, up to the tables, in one stroke: setting a dozen ctypes fields takes longer than a
# small all-reduce.
_LAYOUT = struct.Struct("@PIIIIiiqqqQPP")
describe = _LAYOUT.pack_into


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "pl_op_bytes": (c_uint64, ()),
    "pl_heap_at": (c_uint64, (c_int,)),
    "pl_nonce_at": (c_uint64, ()),
    "pl_build": (c_uint64, ()),
    "pl_window": (c_uint64, (c_int, c_int, c_uint64)),
    "pl_map": (c_void_p, (c_int, c_uint64, c_int)),
    "pl_unmap": (None, (c_void_p,)),
    "pl_discard": (None, (c_void_p, c_uint64)),
    "pl_open": (
        c_void_p,
        (c_int, c_int, POINTER(c_void_p), POINTER(c_int), c_uint64, c_int, c_uint64),
    ),
    "pl_start": (c_int, (c_void_p,)),
    "pl_wait": (c_int, (c_void_p, c_int64)),
    "pl_test": (c_int, (c_void_p,)),
    "pl_poke": (None, (c_void_p,)),
    "pl_abort": (None, (c_void_p,)),
    "pl_close": (c_int, (c_void_p,)),
    "pl_free": (None, (c_void_p,)),
    "pl_position": (c_uint64, (c_void_p, c_int, POINTER(CallRecord))),
    "pl_reduces": (c_int, (c_uint32, c_uint32)),
    "pl_largest": (None, (c_void_p, c_void_p, c_void_p, c_uint64)),
    "pl_keep": (None, (c_void_p, c_void_p, c_void_p, c_uint64)),
    "pl_changed": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_uint64)),
    "pl_means_of_whole": (None, (c_void_p, c_void_p, c_void_p, c_uint64, c_double)),
    "pl_add_terms": (
        None,
        (*[c_void_p] * 6, c_uint64, c_void_p, c_double),
    ),
    "pl_add_whole": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_uint64)),
}


@functools.cache
def load() -> ctypes.CDLL | str:
    """The library, or the reason why it is not there."""
    path = Path(__file__).with_name("_shm.so")
    if not path.exists():
        return (
            "its C library was not built when paceline was installed (no C compiler, or not Linux)"
        )
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return f"its C library cannot be opened ({error})"
    if library.pl_op_bytes() != ctypes.sizeof(Operation):
        return "its C library was built from another version of paceline"
    return library
