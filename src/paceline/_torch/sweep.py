"""What is done to ``.grad`` of many parameters in every pass: in Python, or in C++ if it was built.

To read ``.grad`` in Python makes an object for each gradient, and to copy one is a call of torch's.
With hundreds of small parameters that is most of what a pass costs. ``sweep.cpp`` does the same
without the objects. It needs torch's headers and a compiler, so it is no part of an installation:
``paceline native`` builds it, for this torch and this Python (``sweep_build.py``), and the user's
programs have it from then on. Nobody builds it unasked: a first step must not take a minute.

Both ways give the same bits, so ranks need not agree on one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import stat
import sys
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("sweep.cpp")
"""What is built, with torch's C++ headers; it uses what extensions use, and ``mutable_grad``."""

MODULE = "paceline_sweep"
"""The name of what was built; Python finds its entry by it."""


class NativeSweeps(Protocol):
    """The functions of ``sweep.cpp``; those of this file say what they are for."""

    def holding(self, params: tuple[Tensor, ...]) -> list[int]: ...

    def trained(self, params: tuple[Tensor, ...]) -> list[bool]: ...

    def take(
        self,
        params: tuple[Tensor, ...],
        views: tuple[Tensor, ...],
        places: tuple[int, ...],
        same_dtype: bool,
    ) -> bool: ...

    def give(self, params: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None: ...


def holding(params: tuple[Tensor, ...]) -> list[int]:
    """The places of those parameters that have a gradient."""
    if (native := loaded()) is not None:
        return native.holding(params)
    return [n for n, param in enumerate(params) if param.grad is not None]


def trained(params: tuple[Tensor, ...]) -> list[bool]:
    """By parameter, whether it requires a gradient."""
    if (native := loaded()) is not None:
        return native.trained(params)
    return [param.requires_grad for param in params]


def take(
    params: tuple[Tensor, ...],
    views: tuple[Tensor, ...],
    places: tuple[int, ...],
    *,
    same_dtype: bool,
) -> bool:
    """Copy all gradients to ``views``, and let ``.grad`` be None.

    False, and nothing is done, unless the C++ part is there and that is a plain copy: none is
    missing, sparse, of a class of its own or part of a graph; their dtypes are those of the views,
    if ``same_dtype``; and the views lie at ``places``.
    """
    native = loaded()
    return native is not None and native.take(params, views, places, same_dtype)


def give(params: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
    """Let ``.grad`` be that of ``grads``, which has been ``.grad`` before: whether it fits is not
    asked again.
    """
    if (native := loaded()) is not None:
        native.give(params, grads)
        return
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


# -- what was built -----------------------------------------------------------------------------


@functools.cache
def loaded() -> NativeSweeps | None:
    """The C++ part, if ``paceline native`` has built it for this torch and this Python."""
    if os.environ.get("PACELINE_NATIVE") == "0":
        return None
    path = library()
    if not path.exists():
        return None
    try:
        _refuse_others(path)
        return load(path)
    except (ImportError, OSError) as error:
        text = "%s is not used: %s. Build it again with: paceline native"
        logging.getLogger(__name__).warning(text, path, error)
        return None


def library() -> Path:
    """Where the C++ part is kept, built for this torch and this Python or not yet."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    about = (torch.__version__, torch.version.git_version, torch.compiled_with_cxx11_abi())
    runs_on = (sys.implementation.cache_tag, platform.machine(), platform.libc_ver())
    text = SOURCE.read_text() + repr((about, runs_on))
    name = f"torch-{torch.__version__}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return Path(root, "paceline", "native", name, f"{MODULE}.so")


def load(path: Path) -> NativeSweeps:
    """Open a library that was built of ``sweep.cpp``."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return cast("NativeSweeps", module)


def _refuse_others(path: Path) -> None:
    """Code that another user could have put there is not run."""
    for place in (path, path.parent):
        found = place.stat()
        if found.st_uid not in (os.geteuid(), 0):
            raise PermissionError(f"{place} belongs to user {found.st_uid}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{place} may be written to by other users")
