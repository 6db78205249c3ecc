"""Random numbers that follow from a shard, not from the rank that computes it.

Dropout, augmentation and whatever else draws from the *global* random numbers of torch, Python and
numpy has, inside :func:`keyed_random`, the numbers of its shard: the same on every rank, on the CPU
and on any CUDA device, and again when the shard is computed again. Generators that a program made
for itself (``torch.Generator()``, ``numpy.random.default_rng()``) are its own affair.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .shards import Shard

__all__ = ["keyed_random"]


class _ThreadTurns:
    """A lock for one thread at a time, which may take it repeatedly."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock, self._process = threading.RLock(), os.getpid()

    def taken(self) -> AbstractContextManager[object]:
        """The lock to hold. In a forked child a new one: who held the old one is not there."""
        if self._process != os.getpid():
            self._begin()
        return self._lock


_turns = _ThreadTurns()


@contextmanager
def keyed_random(
    shard: Shard, devices: Iterable[torch.device | str | int] = (), *, purpose: str = "training"
) -> Iterator[None]:
    """Inside this context random numbers are those of ``shard``; after it, the old ones continue.

    This covers torch on the CPU and on ``devices``, Python's ``random``, and ``numpy.random`` if
    numpy has been imported. Their states are restored at the end, also after an exception. Another
    ``purpose`` gives other numbers for the same shard.

    The generators belong to the process. If ranks are threads of one process, their blocks run one
    after the other; so a block must not wait for another thread's block.
    """
    with _turns.taken():
        yield from _keyed(shard.key(purpose), devices)


def _keyed(key: bytes, devices: Iterable[torch.device | str | int]) -> Iterator[None]:
    generators = [torch.default_generator, *_generators_of(devices)]
    states = [generator.get_state() for generator in generators]
    python = random.getstate()
    with _numpy.keyed(key):
        try:
            for generator in generators:
                generator.manual_seed(int.from_bytes(key[:8], "little"))
            random.seed(int.from_bytes(key, "little"))
            yield
        finally:
            random.setstate(python)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _generators_of(devices: Iterable[torch.device | str | int]) -> Iterator[torch.Generator]:
    """The global generator of each device that has one of its own."""
    for device in {torch.device(device) for device in devices}:
        if device.type not in ("cpu", "meta"):
            module: Any = torch.get_device_module(device)
            module.init()
            index = module.current_device() if device.index is None else device.index
            yield module.default_generators[index]


class _NumpyNumbers:
    """Puts another bit generator under numpy's functions, and theirs back.

    To copy a state takes numpy 80 us, and to set one as long: more than all the rest here. The
    functions have one thing that is not in the bit generator, though: half of a pair of normal
    numbers, which may be left over. If the generator is where it was left the last time, there is
    none, and no state needs to be copied.
    """

    _BYTES = 624 * 4 + 4  # of MT19937's state

    def __init__(self) -> None:
        self._spare: list[Any] = []  # to make one takes 200 us
        self._left_at = b""

    @contextmanager
    def keyed(self, key: bytes) -> Iterator[None]:
        if "numpy" not in sys.modules:
            yield
            return
        # numpy loads its random numbers when they are first used. In the block that would be too
        # late: it would find them seeded by the operating system.
        numbers: Any = importlib.import_module("numpy.random")
        outer = numbers.get_bit_generator()
        spare = self._spare.pop() if self._spare else numbers.MT19937(0)
        at = self._position(numbers, outer)
        state = None if at and at == self._left_at else numbers.get_state(legacy=False)
        try:
            numbers.set_bit_generator(spare)
            numbers.seed(int.from_bytes(key[8:12], "little"))
            yield
        finally:
            numbers.set_bit_generator(outer)
            self._spare.append(spare)
            left_over = state is not None and state["has_gauss"]
            if left_over:
                numbers.set_state(state)
            self._left_at = b"" if left_over else at

    def _position(self, numbers: Any, bits: Any) -> bytes:
        if type(bits) is not numbers.MT19937:
            return b""
        return ctypes.string_at(bits.ctypes.state_address, self._BYTES)


_numpy = _NumpyNumbers()
