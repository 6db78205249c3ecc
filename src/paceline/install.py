"""Makes torch's own names mean paceline's, so that an unmodified script runs on it, and back."""

from __future__ import annotations

import sys
from types import ModuleType, TracebackType
from typing import Any

import torch.nn.parallel.distributed
from torch.distributed.algorithms import join as torch_join

from .ddp import (
    DistributedDataParallel,
    _MixedPrecision,
    dump_environment,
    set_strict,
)
from .join import Join, Joinable, JoinHook
from .policies import BucketCaps

_torch = torch.nn.parallel.distributed

# What stands in torch, and what shall stand there.
_REPLACED: list[tuple[Any, Any]] = [
    (_torch.DistributedDataParallel, DistributedDataParallel),
    (_torch._MixedPrecision, _MixedPrecision),
    (_torch._dump_DDP_relevant_env_vars, dump_environment),
    (torch_join.Join, Join),
    (torch_join.Joinable, Joinable),
    (torch_join.JoinHook, JoinHook),
]
if hasattr(_torch, "_BucketCapacityConfig"):  # since 2.13
    _REPLACED.append((_torch._BucketCapacityConfig, BucketCaps))


class Installation:
    """One :func:`install`; as a context it ends with the block."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self in _installed:
            _installed.remove(self)
        if not _installed:
            uninstall()
        else:
            set_strict(_installed[-1].strict)


_installed: list[Installation] = []
_places: list[tuple[ModuleType, str, Any]] = []  # where torch's names stood


def install(*, strict: bool = False) -> Installation:
    """Make torch's names mean ours, everywhere they have been imported; also as a context.

    ``strict``: wrappers refuse what torch's refuse, such as unused parameters without
    ``find_unused_parameters=True``.
    """
    _installed.append(Installation(strict))
    set_strict(strict)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.split(".")[0] != "paceline":
            _replace_in(module)
    return _installed[-1]


def _replace_in(module: ModuleType) -> None:
    for name, value in list(vars(module).items()):
        for old, new in _REPLACED:
            if value is old:
                _places.append((module, name, old))
                setattr(module, name, new)


def uninstall() -> None:
    """Make torch's names mean torch's again, whatever was installed how often.

    Models that are wrapped stay as they are, and so does a module that imported a name meanwhile.
    """
    set_strict(False)
    _installed.clear()
    while _places:
        module, name, old = _places.pop()
        setattr(module, name, old)
