"""The process's random numbers outside of shards: torch's, Python's and numpy's global ones.

They are read at the beginning of every step. To copy numpy's state takes longer than all the rest,
so it is copied only when it has changed: its bits are compared where they lie. What is not in them
is half of a pair of normal numbers, which may be left over; with one, the state is copied anew.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch

_BYTES = 624 * 4 + 4  # of MT19937's state


class GlobalRandom:
    """Random numbers of this process, on the CPU and on ``devices``."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]
        self._numpy: tuple[bytes, tuple[Any, ...]] = (b"", ())

    def state(self) -> dict[str, Any]:
        """Where they stand, as plain data and tensors."""
        found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if "numpy" in sys.modules:
            found["numpy"] = self._numpy_state()
        found.update((str(device), torch.cuda.get_rng_state(device)) for device in self._devices)
        return found

    def _numpy_state(self) -> tuple[Any, ...]:
        numbers: Any = importlib.import_module("numpy.random")
        bits, known = numbers.get_bit_generator(), type(numbers.get_bit_generator())
        at = b""
        if known is numbers.MT19937:
            at = ctypes.string_at(bits.ctypes.state_address, _BYTES)
        before, state = self._numpy
        if not at or at != before or state[3]:
            kind, key, *more = numbers.get_state()
            state = (kind, torch.from_numpy(key.view("int32").copy()), *more)
            self._numpy = at, state
        return state

    def set(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if "numpy" in state:
            kind, key, *more = state["numpy"]
            numbers: Any = importlib.import_module("numpy.random")
            numbers.set_state((kind, key.numpy().view("uint32"), *more))
        for device in self._devices:
            torch.cuda.set_rng_state(state[str(device)], device)
