"""Copies of a wrapper: pickled, unpickled and deep-copied, as torch's are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from typing_extensions import Self

from .._torch.c10d import default_group
from ..errors import ModuleStateError
from . import torch_args
from .delayed import Delayed


class Copies:
    """What a copy takes along, and what it makes anew; a part of the wrapper."""

    module: Any  # as in torch's class
    device: torch.device
    process_group: ProcessGroup
    forward_sync_buffers: bool
    parameters_to_ignore: set[str]
    _delayed: Delayed | None
    _delayed_names: tuple[list[str], str]
    _module_parameters: list[nn.Parameter]
    _log_and_throw: Callable[..., Any]
    _init_state: Callable[[], None]
    _build: Callable[..., None]

    def _check_default_group(self) -> None:
        try:
            default = self.process_group == default_group()
        except (RuntimeError, ValueError):
            default = False
        if not default:
            self._log_and_throw(
                ModuleStateError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor.",
            )

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        return self._portable_state()

    def _portable_state(self) -> dict[str, Any]:
        parts = ("replica", "_reducer", "traced", "_torch_logger", "_caster", "_delayed")
        local = ("process_group", *parts)
        state = {key: value for key, value in self.__dict__.items() if key not in local}
        state["broadcast_buffers"] = self.forward_sync_buffers
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(dict(state), default_group())

    def _restore(self, state: dict[str, Any], process_group: ProcessGroup) -> None:
        state.pop("broadcast_buffers", None)
        for name in ("lazy_bucket_allocation", "_require_manual_backward_finalization"):
            state.setdefault(name, False)  # pickled before there was such a thing
        state.setdefault("shards", None)
        self.process_group = process_group
        nn.Module.__setstate__(self, state)  # type: ignore[arg-type]
        self._module_parameters = [
            p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore
        ]
        self._init_state()
        group = torch_args.wrapped_group(process_group, self.device)
        params = dict(self.module.named_parameters(remove_duplicate=False))
        names, hooked = self._delayed_names
        named = [(name, params[name]) for name in names]
        self._delayed = Delayed(named, params[hooked], group) if named else None
        self._build(group, init_sync=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A wrapper of its own around a copy of the module, in the same group."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._restore(copy.deepcopy(self._portable_state(), memo), self.process_group)
        return twin
