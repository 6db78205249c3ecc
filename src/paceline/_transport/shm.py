"""Shared memory between the ranks of one host: segments, operations, and what went wrong.

``shm.c`` has the engine and says how it works. This file owns its memory and its descriptors,
starts operations on raw pointers, and turns what the engine reports into errors.

A rank's segment is a nameless file in memory (``memfd``): nothing ever lies in ``/dev/shm``, and
the kernel frees it with the last process that maps it, however that process ends. It is made as
large as the machine's memory, but only pages that are used exist.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import addressof
from datetime import timedelta
from importlib import metadata

import torch
from torch import Tensor
from torch.distributed import Store

from ..errors import (
    CollectiveArgumentError,
    CollectiveTimeoutError,
    EngineUnavailableError,
    ForkedError,
    GarbledMemoryError,
    GroupClosedError,
    MessageMemoryError,
    MismatchError,
    OptionValueError,
    PacelineError,
    PeerDiedError,
    PeerLeftError,
    RendezvousError,
)
from . import clib, terms
from .clib import AGAIN, RUN, SUBMIT, SUBMIT_QUIETLY, describe
from .heap import Heap
from .rendezvous import NONCE_BYTES, Neighbours, Rendezvous
from .terms import Wish

MAX_RANKS = 64
PATIENCE_NS = 100_000_000  # how long a call stays in C before Python may handle a signal

# In the order of the enum in shm_reduce.h; the engine can reduce the first _REDUCIBLE of them
# and moves all.
DTYPES: tuple[torch.dtype, ...] = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
KIND_CODES = {kind: code for code, kind in enumerate(clib.KINDS)}
REDUCTION_CODES = {name: code for code, name in enumerate(clib.REDUCTIONS)}


def unavailable() -> str:
    """Why shared memory cannot be used on this machine; empty when it can."""
    loaded = clib.load()
    if isinstance(loaded, str):
        return loaded
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    return ""


def _functions() -> ctypes.CDLL:
    loaded = clib.load()
    if isinstance(loaded, str):
        raise EngineUnavailableError("shm", loaded)
    return loaded


def shortage(size: int) -> str:
    """Why this process cannot share memory with ``size`` ranks; empty when it can."""
    if reason := unavailable():
        return reason
    if size > MAX_RANKS:
        return f"there are {size} ranks, and it takes {MAX_RANKS}"
    return terms.shortage(_functions().pl_heap_at(size), size)


def _wish(size: int, window: object) -> Wish:
    """What this rank can do and was asked to do."""
    if reason := shortage(size):
        return Wish("", 0, 0, 0, reason)
    if type(window) is not int or not 0 <= window < 1 << 63:
        return Wish("", 0, 0, 0, f"window={window!r} was given, which is not a number of bytes")
    calls = _functions()
    build = f"{metadata.version('paceline')}, library {calls.pl_build():016x}"
    cores, heap = len(os.sched_getaffinity(0)), terms.heap_limit(calls.pl_heap_at(size), size)
    return Wish(build, cores, heap, window)


class Segment:
    """This rank's memory, mapped as long as the engine or a tensor uses it."""

    def __init__(self, size: int, heap: int, nonce: bytes) -> None:
        calls = _functions()
        self.fd = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        start = calls.pl_heap_at(size)
        self.bytes = start + heap
        try:
            os.ftruncate(self.fd, self.bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self.address = map_segment(self.fd, self.bytes, own=True)
        except BaseException:
            os.close(self.fd)
            raise
        # From here on the descriptor is the mapping's, which closes it: see shm_life.h.
        self.heap = Heap(start, self.bytes, functools.partial(_discard, self.address))
        ctypes.memmove(self.address + calls.pl_nonce_at(), nonce, NONCE_BYTES)
        self._unmap = weakref.finalize(self, calls.pl_unmap, self.address)
        self._unmap.atexit = False

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor in this segment, with arbitrary contents; None when there is no room."""
        size = numel * dtype.itemsize
        if size == 0:
            return torch.empty(0, dtype=dtype)
        start = self.heap.take(size)
        if start is None:
            return None
        memory = (ctypes.c_byte * size).from_address(self.address + start)
        memory.segment = self  # type: ignore[attr-defined]  # the mapping outlives its tensors
        weakref.finalize(memory, self.heap.give_back, start).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=numel)


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # else a rank could cut memory off under others


def check_segment(fd: int, size: int, owner: int) -> None:
    """Make sure that the memory of a rank is as large as agreed, and stays so."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memory of ours
        seals = 0
    if seals & _SEALS != _SEALS or os.fstat(fd).st_size != size:
        raise RendezvousError(
            f"what rank {owner} gave as its memory is not {size} sealed bytes", "Retry."
        )


def _discard(address: int, start: int, size: int) -> None:
    """Give pages back to the system; fewer than a megabyte are soon used again."""
    page = mmap.PAGESIZE
    first, last = -(-start // page) * page, (start + size) // page * page
    if last - first >= 1 << 20:
        _functions().pl_discard(address + first, last - first)


def map_segment(fd: int, size: int, *, own: bool = False) -> int:
    """Map a segment and return its address."""
    address = _functions().pl_map(fd, size, own)
    if not address:
        raise EngineUnavailableError(
            "shm", f"{size} bytes of shared memory cannot be mapped (address space: ulimit -v)"
        )
    return int(address)


class _Resources:
    """What an engine holds of the system; released once, by whoever comes first."""

    def __init__(self, segment: Segment, met: Neighbours) -> None:
        self.calls = _functions()
        self.segment: Segment | None = segment
        self.met = met
        self.peers: dict[int, int] = {}
        self.engine: int | None = None  # None: closed, or not open yet
        self.forked = False
        self.operations: dict[int, clib.Operation] = {}  # started and not seen to end
        self._memory: int | None = None  # of the engine, until nobody can call with it
        _all_here.add(self)

    def open(self, rank: int, size: int, window: int) -> None:
        segment = self.segment
        assert segment is not None
        self.map_peers(segment.bytes)
        bases = [self.peers.get(r, segment.address) for r in range(size)]
        watches = [self.met.watches.get(r, -1) for r in range(size)]
        self.engine = self._memory = self.calls.pl_open(
            rank,
            size,
            (ctypes.c_void_p * size)(*bases),
            (ctypes.c_int * size)(*watches),
            segment.bytes,
            len(os.sched_getaffinity(0)),
            window,
        )
        if not self.engine:
            raise EngineUnavailableError("shm", "the engine has no memory for itself", rank)

    def map_peers(self, size: int) -> None:
        at = self.calls.pl_nonce_at()
        for r, fd in list(self.met.segments.items()):
            check_segment(fd, size, r)
            self.peers[r] = address = map_segment(fd, size)
            if ctypes.string_at(address + at, NONCE_BYTES) != self.met.nonces[r]:
                raise RendezvousError(f"the memory of rank {r} is not its own", "Retry.")
            os.close(self.met.segments.pop(r))  # the mapping stays

    def release(self, *, at_once: bool) -> None:
        engine, self.engine = self.engine, None
        if engine is None and self._memory is not None:
            return  # another thread closes it, or it is closed
        if engine is not None:
            try:
                self._end_operations(engine, at_once)
            finally:  # an interrupt, too, ends in an engine that is closed
                closed = self.calls.pl_close(engine)
            if not closed:
                return
        self.operations.clear()
        for address in self.peers.values():
            self.calls.pl_unmap(address)
        self.peers.clear()
        self.met.close()
        self.segment = None  # tensors that outlive the group hold it

    def _end_operations(self, engine: int, at_once: bool) -> None:
        under_way = list(self.operations.values())
        if at_once and under_way:
            self.calls.pl_abort(engine)
        for operation in under_way:
            while self.calls.pl_wait(addressof(operation), PATIENCE_NS) == AGAIN:
                pass

    def free(self) -> None:
        """Give everything back, the engine's own memory too: no thread can call with it now."""
        self.release(at_once=True)
        memory, self._memory = self._memory, None
        if memory is not None:
            self.calls.pl_free(memory)

    def disown(self) -> None:
        """In a forked child: all this is the parent's. The memory is taken care of in C."""
        self.engine, self.forked = None, True
        self.operations.clear()
        self.peers.clear()
        self.met.close()  # or they would keep the parent alive in the eyes of its peers


_all_here: weakref.WeakSet[_Resources] = weakref.WeakSet()


def _bury_copies() -> None:
    """A forked child has this rank's memory but is not this rank: its copies are dead."""
    for resources in _all_here:
        resources.disown()


os.register_at_fork(after_in_child=_bury_copies)


class Shm:
    """This rank's end of a shared-memory group: operations on raw pointers."""

    def __init__(
        self, rank: int, size: int, segment: Segment, met: Neighbours, window: int
    ) -> None:
        self._calls = _functions()
        self.rank, self.size = rank, size
        self._lock = threading.Lock()
        self._spare: list[clib.Operation] = []
        self._resources = resources = _Resources(segment, met)
        # An engine that is dropped, or alive at exit, must not leave the others waiting. Only when
        # it is dropped can no thread be about to call with it.
        weakref.finalize(self, resources.free).atexit = False
        self._at_exit = weakref.finalize(self, resources.release, at_once=True)
        resources.open(rank, size, window)
        self._start, self._wait = self._calls.pl_start, self._calls.pl_wait

    @classmethod
    def open(
        cls, store: Store, rank: int, size: int, timeout: timedelta, *, window: int = 0
    ) -> Shm:
        """Meet the other ranks and map their memory; every rank calls it.

        It succeeds on every rank, or raises on every rank.
        """
        if size > MAX_RANKS:
            raise EngineUnavailableError("shm", f"{size} ranks, and it takes {MAX_RANKS}", rank)
        with Rendezvous(store, rank, size, timeout) as meeting:
            agreed = terms.settle(meeting.exchange(_wish(size, window)), rank)
            step = _functions().pl_window(size, agreed.cores, agreed.window)
            if not step:
                least = f"0, or from {64 * size} (64 bytes for each rank) to {1 << 20} bytes"
                raise OptionValueError("shm", "window", str(window), least, rank)
            segments: list[Segment] = []

            def memory() -> int:
                segments.append(Segment(size, agreed.heap, meeting.nonce))
                return segments[0].fd

            hosts = meeting.reach(memory)
            if len(hosts) > 1:
                away = ", ".join(str(r) for part in hosts if rank not in part for r in part)
                reason = f"rank {away} is not on this host"
                raise EngineUnavailableError("shm", reason, rank)
            return meeting.conclude(lambda met: cls._join(rank, size, segments[0], met, step))

    @classmethod
    def _join(cls, rank: int, size: int, segment: Segment, met: Neighbours, window: int) -> Shm:
        if strangers := sorted(set(range(size)) - set(met.segments) - {rank}):
            names = ", ".join(map(str, strangers))
            raise EngineUnavailableError("shm", f"it does not reach rank {names}", rank)
        return cls(rank, size, segment, met, window)

    # -- operations ---------------------------------------------------------------------------

    def run(
        self,
        kind: int,
        dtype: int,
        reduction: int,
        itemsize: int,
        root: int,
        tag: int,
        count: int,
        source: int,
        target: int,
        timeout: float,
        operation: clib.Operation | None = None,
    ) -> clib.Operation:
        """Do one operation here and now; raises what went wrong."""
        engine = self._resources.engine or self._alive(kind)
        spare = operation is None
        if operation is None:
            try:
                operation = self._spare.pop()
            except IndexError:  # another thread may have taken the last one
                operation = clib.Operation()
        # fmt: off
        describe(
            operation, 0,
            engine, kind, dtype, reduction, itemsize, root, RUN,
            tag, int(timeout * 1e9), PATIENCE_NS, count, source, target,
        )
        # fmt: on
        address = addressof(operation)
        try:
            if status := self._start(address):
                self._finish(operation, status)
        except BaseException:
            self._give_up(operation)
            raise
        if spare:
            self._spare.append(operation)
        return operation

    def start(
        self,
        keep: object,
        quietly: bool,
        kind: int,
        dtype: int,
        reduction: int,
        itemsize: int,
        root: int,
        tag: int,
        count: int,
        source: int,
        target: int,
        timeout: float,
        operation: clib.Operation | None = None,
    ) -> clib.Operation | None:
        """Start one operation; the engine's thread sees to it. None when it is done already.

        ``quietly``: the thread is left alone, and whoever waits or pokes moves it along.

        The memory behind the pointers stays with the engine until :meth:`wait` has returned or
        raised; ``keep`` is what must live that long.
        """
        engine = self._resources.engine or self._alive(kind)
        spare = operation is None
        if operation is None:
            try:
                operation = self._spare.pop()
            except IndexError:  # another thread may have taken the last one
                operation = clib.Operation()
        operation.keep = keep if spare else (keep, operation.keep)
        # fmt: off
        describe(
            operation, 0,
            engine, kind, dtype, reduction, itemsize, root,
            SUBMIT_QUIETLY if quietly else SUBMIT,
            tag, int(timeout * 1e9), 0, count, source, target,
        )
        # fmt: on
        address, under_way = addressof(operation), self._resources.operations
        if len(under_way) >= 64:
            self._forget_finished()
        operation.starting = True
        under_way[address] = operation
        status = self._start(address)
        operation.starting = False
        if status == AGAIN:
            return operation
        under_way.pop(address, None)
        operation.keep = None
        if status:  # it came too late
            raise self._error(operation, status)
        if spare:
            self._spare.append(operation)
        return None

    def _forget_finished(self) -> None:
        """Let go of operations that nobody waited for."""
        with self._lock:
            # With the operations: another thread may drop one that it has waited for.
            for address, operation in list(self._resources.operations.items()):
                if not operation.starting and self._calls.pl_test(address):
                    self._resources.operations.pop(address, None)

    def wait(self, operation: clib.Operation, seconds: float | None = None) -> bool:
        """Block until a submitted operation is done; raises what went wrong with it.

        With ``seconds``, False when it is not done by then; it goes on.
        """
        left = None if seconds is None else int(seconds * 1e9)
        address = addressof(operation)
        while True:
            patience = PATIENCE_NS if left is None else min(PATIENCE_NS, left)
            status = self._wait(address, patience)
            if status != AGAIN:
                break
            if left is not None:
                left -= patience
                if left <= 0:
                    return False
        self._resources.operations.pop(address, None)
        if status:
            raise self._error(operation, status)
        return True

    def done(self, operation: clib.Operation) -> bool:
        """Whether a submitted operation has ended, well or badly."""
        if addressof(operation) not in self._resources.operations:
            return True
        return bool(self._calls.pl_test(addressof(operation)))

    def poke(self) -> None:
        """Move the oldest collective along as far as it goes without waiting."""
        engine = self._resources.engine
        if engine is not None:
            self._calls.pl_poke(engine)

    def _finish(self, operation: clib.Operation, status: int) -> None:
        """Wait until an operation that was started here has ended."""
        while status == AGAIN:
            status = self._wait(addressof(operation), PATIENCE_NS)
        if status:
            raise self._error(operation, status)

    def _give_up(self, operation: clib.Operation) -> None:
        """After an interrupt: stop the operation on this rank and on the others."""
        address = addressof(operation)
        if not self._calls.pl_test(address):
            self._calls.pl_abort(operation.engine)
            while self._wait(address, PATIENCE_NS) == AGAIN:
                pass

    def _alive(self, kind: int) -> int:
        engine = self._resources.engine
        if engine is None:
            raise self._gone(clib.KINDS[kind], 0)
        return engine

    def _gone(self, operation: str, sequence: int) -> GroupClosedError:
        error = ForkedError if self._resources.forked else GroupClosedError
        return error(self.rank, operation, sequence, (self.rank,))

    # -- what went wrong ----------------------------------------------------------------------

    def _error(self, operation: clib.Operation, status: int) -> PacelineError:
        name, sequence = clib.KINDS[operation.kind], operation.sequence
        ranks = [r for r in range(self.size) if operation.culprits >> r & 1]
        here = (self.rank, name, sequence, ranks)
        if status == clib.MISMATCH:
            return self._mismatch(operation)
        if status == clib.PEER_DIED:
            return PeerDiedError(*here, reporter=operation.reporter)
        if status == clib.GARBLED:
            return GarbledMemoryError(*here, reporter=operation.reporter)
        if status in (clib.NO_MEMORY, clib.BAD_CALL):
            return self._impossible(operation, status)
        if status in (clib.PEER_LEFT, clib.PEER_ABORTED):
            return PeerLeftError(*here, aborted=status == clib.PEER_ABORTED)
        if status == clib.TIMED_OUT:
            behind = () if name in ("send", "recv") else [self._position(r) for r in ranks]
            return CollectiveTimeoutError(
                *here,
                seconds=operation.timeout_ns / 1e9,
                reporter=operation.reporter,
                behind=behind,
            )
        if status == clib.ABORTED and self._resources.engine is not None:
            return GroupClosedError(self.rank, name, sequence, (self.rank,), aborted=True)
        return self._gone(name, sequence)

    def _impossible(self, operation: clib.Operation, status: int) -> PacelineError:
        name = clib.KINDS[operation.kind]
        if status == clib.NO_MEMORY:
            return MessageMemoryError(self.rank, name, operation.sequence, (self.rank,))
        found = f"count {operation.count}, root {operation.root}, reduction {operation.reduce}"
        expected = f"a count, a root below {self.size} and a reduction that its type has"
        return CollectiveArgumentError(self.rank, name, "description", expected, found)

    def _mismatch(self, operation: clib.Operation) -> MismatchError:
        def tell(call: clib.CallRecord, size: int) -> str:
            name = clib.name_in(clib.KINDS, call.kind)
            dtype = clib.name_in(DTYPES, call.dtype)
            if name == "barrier":
                return "barrier()"
            if name in ("send", "recv"):
                return f"{name}({size} bytes of {dtype})"
            parts = [f"{call.count} x {dtype}"]
            if operation.bytes_a or operation.bytes_b:
                parts.append(f"{size} bytes between the two")
            if name in ("all_reduce", "reduce", "reduce_scatter"):
                parts.append(clib.name_in(clib.REDUCTIONS, call.reduce).upper())
            if name in ("reduce", "broadcast", "gather", "scatter"):
                parts.append(f"root {call.root}")
            return f"{name}({', '.join(parts)})"

        return MismatchError(
            self.rank,
            operation.sequence,
            operation.side_a,
            tell(operation.call_a, operation.bytes_a),
            operation.side_b,
            tell(operation.call_b, operation.bytes_b),
        )

    def _position(self, rank: int) -> str:
        call, engine = clib.CallRecord(), self._resources.engine
        if engine is None:
            return f"rank {rank}"
        sequence = self._calls.pl_position(engine, rank, ctypes.byref(call))
        if sequence == 0:
            return f"rank {rank} has not called anything yet"
        return f"rank {rank} in operation {sequence} ({clib.name_in(clib.KINDS, call.kind)})"

    # -- memory and the end -------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor that every rank of the group can reduce where it lies; contents arbitrary."""
        segment = self._resources.segment
        if segment is None or self._resources.engine is None:
            raise self._gone("allocate", 0)
        tensor = segment.allocate(numel, dtype)
        if tensor is None:
            used = segment.heap.used
            raise MemoryError(
                f"rank {self.rank}: no room for {numel} x {dtype} in shared memory "
                f"({used} bytes are in use); free tensors that allocate() returned"
            )
        return tensor

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        """Whether the engine has a loop for this."""
        return bool(self._calls.pl_reduces(DTYPE_CODES[dtype], REDUCTION_CODES[reduction]))

    def abort(self) -> None:
        """Free every thread and every rank that waits in this group; safe from any thread."""
        engine = self._resources.engine
        if engine is not None:
            self._calls.pl_abort(engine)

    def close(self) -> None:
        """Leave the group: wait for what this rank started, then give everything back.

        A thread that is in :meth:`run` meanwhile is freed with a GroupClosedError.
        """
        self._resources.release(at_once=False)
        self._at_exit.detach()


def pointer_table(pointers: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    """Pointers, one for each rank, as an operation takes them."""
    return (ctypes.c_void_p * len(pointers))(*pointers)


def byte_table(sizes: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    """Sizes in bytes, one for each rank, as an operation takes them."""
    return (ctypes.c_uint64 * len(sizes))(*sizes)
