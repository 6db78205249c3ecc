"""Works of groups that others wrote in Python.

torch's C++ always passes ``wait`` a timeout (zero for none), asks the work of an all-reduce for its
future, and takes the future's value for the result. So do we; a work without a future is waited
for, and one without a ``wait`` has a future.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future

from ...._torch.c10d import FutureBase, source_rank
from ...._torch.streams import devices_holding
from ....errors import UnsupportedError
from ...work import Watcher, Work, wait_for


class ForeignWork(Work):
    """The work of a group written in Python; what it may lack is said above."""

    def __init__(
        self,
        inner: Any,
        outputs: Sequence[Tensor],
        watcher: Watcher,
        backend: str,
        *,
        reduced: bool,
    ) -> None:
        super().__init__(outputs)
        self._devices = devices_holding(outputs)
        self._inner, self._completer, self._reduced = inner, watcher, reduced
        self._waits = _has(inner, "wait")
        self._future = _future_of(inner) if reduced or not self._waits else None
        if self._future is None and not self._waits:
            kind = type(inner).__name__
            raise UnsupportedError(
                backend,
                f"waiting for its {kind}, which overrides neither wait nor get_future",
                f"Write {kind}.wait(timeout).",
            )
        if reduced and self._future is not None:
            self._turn = threading.RLock()

    @torch.no_grad()
    def _block(self, seconds: float | None) -> bool:
        if self._future is not None:
            if not _comes(self._future, seconds):
                return False
            value = self._future.wait()
            if self._reduced:
                self._take(value)
        return not self._waits or wait_for(self._inner, seconds)

    def _take(self, value: Any) -> None:
        """Copy a result that is not where it was asked for; a future may hold anything else."""
        while isinstance(value, list | tuple) and value:
            value = value[0]
        wanted = self._outputs[0]
        if not isinstance(value, Tensor) or value.numel() != as_real(wanted).numel():
            return
        if value.data_ptr() != wanted.data_ptr():
            target = as_real(wanted)
            target.copy_(value.view_as(target))

    def _poll(self) -> bool:
        if self._future is not None:
            return self._future.done()
        return bool(getattr(self._inner, "is_completed", bool)())

    def _watcher(self) -> Watcher:
        return self._completer

    def source_rank(self) -> int:
        return int(source_rank(self._inner))


def overrides(thing: Any, base: type, name: str) -> bool:
    """Whether a class in Python, or the object itself, has another method than torch's ``base``."""
    own = name in getattr(thing, "__dict__", ())
    return own or getattr(type(thing), name, None) is not getattr(base, name, None)


def _has(work: Any, name: str) -> bool:
    """Whether a work has a method that does something; torch's own ``wait`` waits for ever."""
    if not isinstance(work, TorchWork):
        return hasattr(work, name)
    return type(work) is TorchWork or overrides(work, TorchWork, name)


def _future_of(work: Any) -> Future[Any] | None:
    if not _has(work, "get_future"):
        return None
    try:
        future = work.get_future()
    except NotImplementedError:
        return None
    except RuntimeError as error:
        if "getFuture not implemented" in str(error):  # torch's word, of a work around another
            return None
        raise
    return future if isinstance(future, FutureBase) else None  # type: ignore[return-value]


def _comes(future: Future[Any], seconds: float | None) -> bool:
    """Wait for ``future``, which cannot be told how long."""
    if seconds is None or future.done():
        return True
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(seconds)


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which every engine can add."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
