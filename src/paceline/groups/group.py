# mypy: disable-error-code="override, assignment"
# (torch's stubs give its methods narrower signatures, and other ones in every version)
"""Group: process groups as plain objects.

A group is made, passed, split and ended like any other object; nothing is registered behind its
back. It *is* a ``torch.distributed.ProcessGroup``, so everything in torch that takes a group takes
it: DistributedDataParallel, fully_shard, DTensor, the functional collectives.

``collectives.py`` has what it does for its ranks and says how those methods are called;
``lineage.py`` which other groups come out of it; ``torch_calls.py`` what torch asks; this file has
what a group is, and where it ends.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import cast

import msgspec
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from .._torch import c10d, versions
from .._torch.first_use import group_is_made
from .._transport import Clock
from ..errors import AllocationSizeError, MonitoredBarrierError
from ..recorder import events
from . import objects, torch_world
from .calling import FORKED, Hooks, Timeout
from .engine import Call, Capabilities, Engine, LentEngine
from .engines.around import engine_around
from .lineage import Reopen
from .meetings import READING
from .options import GroupOptions
from .strict import Checks
from .torch_calls import TorchCalls, refuse_nan

_HEARD = 0.5  # seconds for an engine that is aborted to end what runs on its device
_ABORTED = 10.0  # seconds for the rest of it


class Group(TorchCalls):
    """A process group, as seen by one rank."""

    def __init__(
        self,
        engine: Engine,
        rank: int,
        size: int,
        *,
        options: GroupOptions,
        store: Store | None = None,
        reopen: Reopen | None = None,
        members: Sequence[int] | None = None,
        wrapped: ProcessGroup | None = None,
    ) -> None:
        super().__init__(engine, rank, size, options, store, reopen, members)
        self._lock = threading.Lock()
        self._registered = self.refuses_nan = False
        self._is_wrapper = wrapped is not None
        self._endings: OrderedDict[int, Callable[[], None]] = OrderedDict()
        self._holders: OrderedDict[int, Callable[[], None]] = OrderedDict()
        if engine.capabilities.found_by_torch:
            cast("LentEngine", engine).lend_to(self)
        self._open_board(wrapped)
        _all_here.add(self)
        group_is_made()
        if versions.IS_NEWER:
            versions.warn_of_newer(self._members[rank])

    def _open_board(self, wrapped: ProcessGroup | None = None) -> None:
        """Let calls be recorded; all wrappers of one torch group write to the same board."""
        held = weakref.ref(self if wrapped is None else wrapped)
        self.board = events.open_board(
            self if wrapped is None else wrapped,
            self._rank,
            self._size,
            shared=wrapped is not None,
            members=self._members,
            backend=self.backend,
            peers=self.capabilities.peers,
            one_process=self.capabilities.one_process,
            store=lambda: torch_world.store_of(held()),
            traffic=self.traffic,
            announced=_wants_announcing(self.capabilities),
            checked=self.capabilities.checks_agreement,
        )
        if self.board is not None:
            self.board.marks = getattr(self._engine, "marks", None)  # engines of others have none
        self.set_checks(self._checks)

    def set_checks(self, checks: Checks) -> None:
        """Set what happens if ranks make one collective from different lines of code.

        Set it to the same value on all ranks. ``"warn"``: the recorder warns once if it looks like
        a mistake. ``"strict"``: every rank raises :class:`~paceline.errors.MismatchError` before
        the result is used; this adds a small all-gather to every call. ``"off"``: nothing.
        """
        self._checks, self._strict = checks, checks == "strict" and self._size > 1
        if self.board is not None:
            self.board.checks = checks

    # -- what it is ---------------------------------------------------------------------------

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._size

    getRank, getSize = rank, size

    @property
    def capabilities(self) -> Capabilities:
        """What the group's engine can do."""
        return self._engine.capabilities

    @property
    def backend(self) -> str:
        """The engine's name: shm, gloo, nccl, hybrid, fake, threads or a third party's."""
        return self._engine.capabilities.backend

    def name(self) -> str:
        """Return the name of the engine; torch calls this method."""
        return self.backend

    _get_backend_name = name

    def getBackendName(self) -> str:
        """Return the name that torch's C++ code sees."""
        return self.capabilities.name_in_torch or self.backend

    def getGroupName(self) -> str:
        """Return the name under which the group is registered; empty if it is not."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Set the name of the group, as torch does; see also :meth:`register`."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._group_desc

    def setGroupDesc(self, description: str) -> None:
        """Set the description of the group."""
        self._group_desc = description

    @property
    def timeout(self) -> timedelta:
        """The timeout of collectives that are called without one."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Change :attr:`timeout` for later calls."""
        self._timeout = self._seconds(timeout)
        self._options = self._options.changed(timeout=self.timeout)

    _set_default_timeout = set_timeout

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in sorted(self.capabilities.devices)]

    def __repr__(self) -> str:
        state = f", {self._closed}" if self._closed else ""
        return f"Group({self.backend}, rank {self._rank} of {self._size}{state})"

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; if some do not arrive, every rank that did raises an error.

        It uses the store, so it works even if the engine hangs. The error names all missing ranks;
        ``wait_all_ranks`` is accepted and not needed (torch without it names only the first).
        Rank 0, which may hold the store, returns when all that arrived know how it ended, or after
        30 s.
        """
        clock = Clock(timedelta(seconds=self._seconds(timeout)))
        store = PrefixStore(f"monitored/{next(self._barriers)}", self._need_store("barrier"))
        store.set(str(self._rank), "here")
        missing = self._missing_at_barrier(store, clock)
        with contextlib.suppress(Exception):  # the store may have ended with the rank that holds it
            store.set(f"{self._rank} knows", "")
            if self._members[self._rank] == 0:  # this may be that rank
                reading = Clock(READING)
                for r in set(range(self._size)) - set(missing):
                    _comes(store, f"{r} knows", reading.left())
        if missing:
            raise MonitoredBarrierError(
                self._rank, "monitored_barrier", 0, missing, seconds=clock.seconds
            )

    def _missing_at_barrier(self, store: Store, clock: Clock) -> list[int]:
        """Which ranks rank 0 misses, or rank 0; its time begins when it comes."""
        if self._rank == 0:
            missing = [r for r in range(self._size) if not _comes(store, str(r), clock.left())]
            store.set("missing", msgspec.json.encode(missing).decode())
            return missing
        if _comes(store, "0", clock.left() + 2) and _comes(store, "missing", clock.seconds + 2):
            return msgspec.json.decode(store.get("missing"), type=list[int])
        return [0]

    # -- objects ------------------------------------------------------------------------------

    def all_gather_object(self, value: object) -> list[object]:
        """Return the objects of all ranks: numbers, strings, bytes, lists, dicts, tensors…"""
        return objects.all_gather_object(self, value)

    def broadcast_object(self, value: object = None, root: int = 0) -> object:
        """Return the object of the root on every rank."""
        return objects.broadcast_object(self, value, root)

    def gather_object(self, value: object, root: int = 0) -> list[object] | None:
        """Return the objects of all ranks on the root, and None on other ranks."""
        return objects.gather_object(self, value, root)

    def scatter_object(self, values: Sequence[object] | None = None, root: int = 0) -> object:
        """Return this rank's element of the root's ``values``."""
        return objects.scatter_object(self, values, root)

    # -- memory and progress ------------------------------------------------------------------

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return an uninitialized flat tensor in memory that the engine can use directly.

        ``shm`` reduces such tensors in place, without a copy. You can use it like any tensor, even
        after the group has been shut down. If the engine has no memory of its own on ``device``,
        this is an ordinary tensor.
        """
        self._alive("allocate")
        numel = self._checked_size(numel)
        own = self.capabilities.in_place_memory and device is not None and device.type == "cpu"
        if device is None or own:
            return self._engine.allocate(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def _checked_size(self, numel: int) -> int:
        try:
            size = operator.index(numel)
        except TypeError:  # a shape, or a fraction
            size = -1
        if size < 0:
            raise AllocationSizeError(self.rank(), repr(numel))
        return size

    def progress(self) -> None:
        """Advance collectives that have been started, without waiting, if the engine needs it."""
        self._engine.progress()

    def mark_device(self) -> None:
        """Record when the device reaches the next call, if the group uses a device."""
        if self.board is not None and self.board.marks is not None:
            self.board.marks.comes()

    # -- hooks --------------------------------------------------------------------------------

    def register_hooks(
        self,
        before: Callable[[Call], None] | None = None,
        after: Callable[[Call], None] | None = None,
        on_error: Callable[[Call, BaseException], None] | None = None,
    ) -> RemovableHandle:
        """Call functions around every collective of this group; ``remove()`` the result to stop.

        ``before`` runs on the calling thread after arguments were checked; an exception in it
        cancels the call. ``after`` and ``on_error`` run on the thread that sees the call complete.
        """
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = Hooks(before, after, on_error)
        return handle

    @classmethod
    def wrap(cls, inner: ProcessGroup, device: torch.device | str = "cpu") -> Group:
        """Return a Group around any torch process group; a Group is returned unchanged."""
        if isinstance(inner, Group):
            return inner
        device = torch.device(device)
        name, timeout = torch_world.facts_of(inner, device)
        return cls(
            engine_around(inner, name, device),
            inner.rank(),
            inner.size(),
            options=GroupOptions(name, timeout, device),
            members=c10d.members_of(inner),
            wrapped=inner,
        )

    # -- torch's world ------------------------------------------------------------------------

    def register(self, name: str | None = None, *, default: bool = False) -> Self:
        """Register the group with ``torch.distributed``, until :meth:`shutdown`.

        Then ``torch.distributed.all_reduce(t, group=g)``, functional collectives, and everything
        else that looks up groups by name can use it. ``default=True`` also makes it the default
        group, which DeviceMesh requires. Ranks must register a group under the same name.
        """
        self._alive("register")
        torch_world.register(self, name, default=default)
        self._registered = True
        return self

    def unregister(self) -> None:
        """Undo :meth:`register`."""
        if self._registered:
            c10d.leave(self)
            self._registered = False

    # -- the end ------------------------------------------------------------------------------

    def before_shutdown(self, callback: Callable[[], None]) -> RemovableHandle:
        """Call ``callback`` when the group is shut down, unless it was aborted.

        If it raises, :meth:`shutdown` raises that error after it has closed the group.
        """
        handle = RemovableHandle(self._endings)
        self._endings[handle.id] = callback
        return handle

    def before_end(self, let_go: Callable[[], None]) -> RemovableHandle:
        """Call ``let_go`` just before the engine is shut down or aborted, on any thread.

        Use it to release what keeps the engine busy. For example, a CUDA graph that contains NCCL
        collectives keeps them alive, and NCCL would wait for it without end. Around a process group
        of torch, it is also called when ``torch.distributed.destroy_process_group()`` ends all.
        """
        if self._is_wrapper and not self._holders:
            torch_world.before_all_end(self, Group._let_go)
        handle = RemovableHandle(self._holders)
        self._holders[handle.id] = let_go
        return handle

    def _let_go(self) -> None:
        for let_go in list(self._holders.values()):
            with contextlib.suppress(Exception):  # the group ends all the same
                let_go()

    def _abort_engine(self) -> None:
        """Abort the engine, which waits for its holders, while those may wait for what it does."""
        if not self._holders:
            self._engine.abort()
            return
        aborting = threading.Thread(target=self._engine.abort, name="paceline-abort", daemon=True)
        aborting.start()
        aborting.join(_HEARD)
        self._let_go()
        aborting.join(_ABORTED)

    def abort(self) -> None:
        """Close the group now; every thread and every rank that waits in it raises an error."""
        if self._closed == FORKED:
            return
        if (opening := self._opening) is not None:
            opening.give_up()
        self._closed = self._closed or "aborted"  # only now: whoever moves the group opens it
        self._abort_engine()

    def shutdown(self) -> None:
        """Complete collectives that this rank has started, close the group and free its memory.

        On shm, another thread that is in a collective meanwhile raises GroupClosedError. In a
        forked child this does nothing, because the group belongs to the parent.
        """
        if self._closed == FORKED:
            return
        with self._lock:
            if self._closed == "shut down":
                return
            endings = [] if self._closed else list(self._endings.values())
            self.unregister()
            self._closed = "shut down"
        with contextlib.ExitStack() as stack:
            for ending in endings:
                stack.callback(ending)
            if self.board is not None:
                self.board.close()
            self._let_go()
            self._engine.shutdown()
            self._own_watcher.close()

    finalize = shutdown  # as torch ends what get_comm gave it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        self.shutdown()

    def disown(self) -> None:
        """Make the group unusable in a forked child, which is not a rank of it."""
        if self.capabilities.peers:
            self._closed = FORKED

    def _like_this(
        self, engine: Engine, rank: int, members: Sequence[int], options: GroupOptions, store: Store
    ) -> Self:
        group = type(self)(
            engine,
            rank,
            len(members),
            options=options,
            store=store,
            reopen=self._reopen,
            members=members,
        )
        group.set_checks(self._checks)
        if self.refuses_nan:
            refuse_nan(group)
        return group

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether FSDP2 may allocate its communication buffers with :meth:`allocate`."""
        return self.capabilities.in_place_memory and device.type in self.capabilities.devices

    def allocate_tensor(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Call :meth:`allocate`, with torch's arguments."""
        return self.allocate(numel, dtype)


def _wants_announcing(can: Capabilities) -> bool:
    return not can.checks_agreement and can.may_crash_on_mismatch


_all_here: weakref.WeakSet[Group] = weakref.WeakSet()


def _disown_all() -> None:
    for group in _all_here:
        group.disown()


os.register_at_fork(after_in_child=_disown_all)


def _comes(store: Store, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except (RuntimeError, ValueError):
        return bool(store.check([key]))
    return True
