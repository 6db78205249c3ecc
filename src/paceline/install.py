"""Replaces torch's classes and functions by Paceline's, so that scripts run unchanged.

Modules of torch that are not imported yet stay so (its optimizers take a second to import); their
names are replaced when they are imported.
"""

from __future__ import annotations

import importlib.machinery
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType, TracebackType
from typing import Any

import torch.distributed

from . import hooks, join, optim, policies
from ._torch import patches
from ._torch.first_use import catch_up
from .ddp import (
    DistributedDataParallel,
    Replicated,
    ReplicateState,
    _MixedPrecision,
    derived_from_torch,
    dump_environment,
    made_by_torch,
    replicate,
    set_strict,
    stand_for_torchs,
)
from .groups import quickest

_ALGORITHMS = "torch.distributed.algorithms"
_HOOKS = f"{_ALGORITHMS}.ddp_comm_hooks"
_AVERAGING = f"{_ALGORITHMS}.model_averaging"


def _of(source: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


# Where torch defines what, and what shall stand there.
_REPLACED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "torch.nn.parallel.distributed": {
            "DistributedDataParallel": DistributedDataParallel,
            "_MixedPrecision": _MixedPrecision,
            "_dump_DDP_relevant_env_vars": dump_environment,
            "_BucketCapacityConfig": policies.BucketCaps,  # since 2.13
        },
        "torch.distributed._composable.replicate": {
            "replicate": replicate,
            "DDP": Replicated,
            "_ReplicateState": ReplicateState,
        },
        f"{_ALGORITHMS}.join": _of(join, "Join", "Joinable", "JoinHook"),
        _HOOKS: _of(hooks, "DDPCommHookType", "register_ddp_comm_hook"),
        f"{_HOOKS}.default_hooks": _of(
            hooks,
            "allreduce_hook",
            "bf16_compress_hook",
            "bf16_compress_wrapper",
            "fp16_compress_hook",
            "fp16_compress_wrapper",
        ),
        f"{_HOOKS}.debugging_hooks": _of(hooks, "noop_hook"),
        f"{_HOOKS}.powerSGD_hook": _of(
            hooks, "PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"
        ),
        f"{_HOOKS}.quantization_hooks": _of(
            hooks, "quantization_perchannel_hook", "quantization_pertensor_hook"
        ),
        f"{_HOOKS}.post_localSGD_hook": _of(hooks, "PostLocalSGDState", "post_localSGD_hook"),
        f"{_HOOKS}.ddp_zero_hook": _of(
            hooks, "hook_with_zero_step", "hook_with_zero_step_interleaved"
        ),
        f"{_HOOKS}.optimizer_overlap_hooks": _of(
            hooks, "_OptimizerHookState", "_hook_then_optimizer"
        ),
        f"{_ALGORITHMS}._optimizer_overlap.optimizer_overlap": _of(hooks, "_as_overlapped_optim"),
        "torch.distributed.optim.zero_redundancy_optimizer": _of(optim, "ZeroRedundancyOptimizer"),
        "torch.distributed.optim.post_localSGD_optimizer": _of(optim, "PostLocalSGDOptimizer"),
        f"{_AVERAGING}.averagers": _of(optim, "ModelAverager", "PeriodicModelAverager"),
        f"{_AVERAGING}.hierarchical_model_averager": _of(optim, "HierarchicalModelAverager"),
        f"{_AVERAGING}.utils": _of(
            optim,
            "average_parameters",
            "average_parameters_or_parameter_groups",
            "get_params_to_average",
        ),
    }
)


class Installation:
    """One call of :func:`install`; as a context manager it is undone at the end of the block."""

    def __init__(self, strict: bool, engine: bool) -> None:
        self.strict = strict
        self.engine = engine

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
_INIT = torch.distributed.init_process_group
_OPENING = {
    "init_process_group": quickest(_INIT, lambda: any(one.engine for one in _installed)),
}
_places: list[tuple[ModuleType, str, Any]] = []  # where torch's names stood


def install(*, strict: bool = False, names: bool = True, engine: bool = False) -> Installation:
    """Replace torch's classes and functions by Paceline's in all imported modules.

    Modules of torch that are imported later are handled too. Subclasses, partials, dict entries,
    default arguments and wrapped models that exist already keep using torch; a warning names the
    subclasses and the wrapped models. The result can be used as a context manager.

    With ``strict`` wrappers raise where torch's would, such as for unused parameters without
    ``find_unused_parameters=True``. With ``engine``, ``init_process_group("gloo")`` opens the
    fastest engine of this machine, as ``"paceline"`` does, and rank 0 prints which one. With
    ``names=False`` nothing else is replaced.
    """
    _installed.append(Installation(strict, engine))
    set_strict(strict)
    meant = {id(old): (old, getattr(module, name)) for module, name, old in _places}
    if names:
        stand_for_torchs(DistributedDataParallel, True)
        _warn_of_what_stays_torchs()
    if engine:
        meant.update(_meant_by(sys.modules[_INIT.__module__], _OPENING))
    for source in _REPLACED if names else ():
        if source in sys.modules:
            meant.update(_meant_by(sys.modules[source], _REPLACED[source]))
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.split(".")[0] != "paceline":
            _replace_in(module, meant)
    if names and _on_import not in sys.meta_path:
        sys.meta_path.insert(0, _on_import)
    catch_up()
    return _installed[-1]


def _warn_of_what_stays_torchs() -> None:
    """Warn of objects that torch's wrapper has made already; they keep using torch."""
    made = made_by_torch() if torch.distributed.is_initialized() else []
    parts = [f"models that torch has wrapped already ({', '.join(made)})"] if made else []
    if derived := derived_from_torch():
        parts.append(f"classes derived from torch's wrapper ({', '.join(derived)})")
    if parts:
        warnings.warn(
            f"paceline.install() was called late: {' and '.join(parts)} stay torch's. "
            "All ranks must use the same kind, or they wait for each other forever. Call it "
            "before such classes and models are made, or start with paceline run --drop-in.",
            stacklevel=3,
        )


def uninstall() -> None:
    """Undo all calls of :func:`install`.

    It also undoes the changes to ``torch.compile`` that the first group made, until the next group
    is created, and, in a process that uses a GPU, those to autograd's engine, until the next
    forward of a wrapped model. Models that are wrapped stay as they are. So do names that a module
    outside torch has imported since.
    """
    set_strict(False)
    stand_for_torchs(DistributedDataParallel, False)
    _installed.clear()
    if _on_import in sys.meta_path:
        sys.meta_path.remove(_on_import)
    ours = [(getattr(module, name), old) for module, name, old in _places]
    torchs = {id(new): (new, old) for new, old in ours}
    while _places:
        module, name, old = _places.pop()
        setattr(module, name, old)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.split(".")[0] == "torch":
            _replace_in(module, torchs)
    _places.clear()
    patches.take_back()


def _meant_by(source: ModuleType, ours: Mapping[str, Any]) -> dict[int, tuple[Any, Any]]:
    """Return the objects of a torch module to be replaced, by id, with their replacements."""
    pairs = [(vars(source)[name], new) for name, new in ours.items() if name in vars(source)]
    return {id(old): (old, new) for old, new in pairs if old is not new}


def _replace_in(module: ModuleType, meant: Mapping[int, tuple[Any, Any]]) -> None:
    for name, value in list(vars(module).items()):
        old, new = meant.get(id(value), (None, None))
        if old is not None and value is old:
            _places.append((module, name, old))
            setattr(module, name, new)


class _OnImport:
    """Replaces names in the modules of ``_REPLACED`` once they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _REPLACED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Replacing(spec.loader)  # type: ignore[assignment]
        return spec


class _Replacing:
    """A loader that replaces names after another loader has executed the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if _installed:
            _replace_in(module, _meant_by(module, _REPLACED[module.__name__]))


_on_import = _OnImport()
