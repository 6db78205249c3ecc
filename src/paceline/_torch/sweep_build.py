"""Building ``sweep.cpp`` with torch's own builder of extensions, for whom ``paceline native`` asks.

The result is tried before it is put where programs look for it (``sweep.library``): a library that
builds and does something else must not average gradients.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from . import sweep
from .sweep import NativeSweeps


def build() -> Path:
    """Build the C++ part, try it, and put it where programs of this user find it.

    Takes up to a minute. Raises ``RuntimeError`` or ``OSError`` where it cannot be built.
    """
    from torch.utils.cpp_extension import load

    target = sweep.library()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        load(sweep.MODULE, [str(sweep.SOURCE)], build_directory=folder, extra_cflags=["-O2", "-g0"])
        made = Path(folder, f"{sweep.MODULE}.so")
        check(sweep.load(made))
        made.chmod(0o700)
        os.replace(made, target)  # at once: programs that start now see it whole or not at all
    sweep.loaded.cache_clear()
    return target


def check(native: NativeSweeps) -> None:
    """Raise unless ``native`` does what ``sweep.py`` says, on a few parameters."""
    params = tuple(nn.Parameter(torch.zeros(size)) for size in (3, 0, 5))
    buffer = torch.zeros(8)
    views = tuple(buffer.split([3, 0, 5]))
    places = tuple(map(Tensor.data_ptr, views))
    for value, param in enumerate(params[1:], 1):
        param.grad = torch.full_like(param, value)
    refused = not native.take(params, views, places, True)
    params[0].grad = torch.full((3,), 7.0)
    seen = native.holding(params) == [0, 1, 2] and native.trained(params) == [True] * 3
    moved = native.take(params, views, places, True) and not native.holding(params)
    native.give(params, views)
    given = all(param.grad is view for param, view in zip(params, views, strict=True))
    if not (refused and seen and moved and given and buffer.tolist() == [7.0] * 3 + [2.0] * 5):
        raise RuntimeError("the library was built, and does not do what it should; it is not used")
