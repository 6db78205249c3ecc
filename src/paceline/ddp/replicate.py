"""replicate: a module stays what it is, and is averaged with the other ranks' copies of it.

The form torch calls composable. The module gets a subclass of its own class, made here, whose calls
go through a :class:`DistributedDataParallel` that nobody sees. That wrapper is around a *stand-in*
for the module, which has the module's own dictionaries of parameters, buffers and children (so
names are the module's, and a tensor that is replaced in one is replaced in both), no hooks, and
calls the module as its class would have. So all that a wrapper does, in eager mode and in compiled
code, holds here too, and the module's hooks run once, with the module as their argument.

As in torch, ranks meet in the first forward, and not before.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from .._torch.composable import is_fully_sharded, note_replicated, without_replicated
from .._torch.ddp import ignore
from .._torch.dynamo import folded, untraced
from .._torch.nn import share_tensors
from ..errors import ModuleStateError, ModuleTypeError, ReplicatedTwiceError
from ..groups import current_process_group
from . import torch_args
from .wrapper import DistributedDataParallel

_Model = TypeVar("_Model", bound=nn.Module)
_KEPT = "_paceline_replicated"  # where a module has its state
_numbers = itertools.count(1)
_states: WeakValueDictionary[int, ReplicateState] = WeakValueDictionary()


class _StandIn(nn.Module):
    """What the wrapper wraps: the module's tensors, and a call of it as its own class has it."""

    def __init__(self, module: nn.Module, ignored: Iterable[str]) -> None:
        super().__init__()
        share_tensors(self, module)
        self.__dict__["stands_for"] = module  # no child: it would have every name twice
        ignore(self, set(ignored))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        real: Any = self.stands_for
        return super(Replicated, real).__call__(*args, **kwargs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> _StandIn:
        """The mode is the module's, and so are its children."""
        self.__dict__["stands_for"].train(mode)
        return self


class _Unseen(DistributedDataParallel):
    """The wrapper of a replicated module."""

    def __init__(self, state: ReplicateState, stand_in: _StandIn, **options: Any) -> None:
        super().__init__(stand_in, **options)
        self._state = weakref.ref(state)

    @untraced(recursive=True)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        state = self._state()
        if state is not None:
            state.take_over_sync(self)
        return super()._pre_forward(*inputs, **kwargs)


class ReplicateState:
    """The state of a replicated module; ``replicate.state(module)`` returns it."""

    def __init__(
        self, module: nn.Module, ignored: Iterable[nn.Module], options: dict[str, Any]
    ) -> None:
        self.module = module
        self._ignored = frozenset(ignored)
        self._options = options
        self._number = torch.tensor(next(_numbers))  # by which a graph that is traced finds it
        _states[int(self._number)] = self
        self._comm_hook_args: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._sync: bool | None = None  # what the next forward is to change about averaging
        self._ddp: DistributedDataParallel | None = None

    @property
    def wrapper(self) -> DistributedDataParallel:
        """The wrapper that does the work, for its methods ``no_sync``, ``accumulate``, ``join``…

        It is created when first used, or in the first forward, which is when ranks meet: so every
        rank must do so.
        """
        if self._ddp is None:
            self._ddp = self._open()
        return self._ddp

    def _open(self) -> DistributedDataParallel:
        stand_in = _StandIn(self.module, self._ignored_names())
        wrapper = _Unseen(self, stand_in, **self._options)
        for args, kwargs in self._comm_hook_args:
            wrapper.register_comm_hook(*args, **kwargs)
        return wrapper

    def take_over_sync(self, wrapper: DistributedDataParallel) -> None:
        """Apply the last :meth:`Replicated.set_requires_gradient_sync`, from this forward on."""
        if self._sync is not None:
            wrapper.require_backward_grad_sync, self._sync = self._sync, None

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        """Call the wrapper's method of this name, now or once there is a wrapper."""
        if self._ddp is None:
            self._comm_hook_args.append((args, kwargs))
        else:
            self._ddp.register_comm_hook(*args, **kwargs)

    # -- what is left to others ---------------------------------------------------------------

    def managed(self) -> set[Tensor]:
        """Return the parameters and buffers of the module that this state averages."""
        left_out = self._ignored_names()
        return {tensor for name, tensor in _named_tensors(self.module) if name not in left_out}

    def _ignored_names(self) -> set[str]:
        """Names in ignored modules, in those that are sharded, and in those with their own state.

        By what they name: a parameter that is shared with an ignored module is ignored everywhere.
        """
        out: set[Tensor] = set()
        for inner in self.module.modules():
            if inner in self._ignored or is_fully_sharded(inner):
                out.update(tensor for _, tensor in _named_tensors(inner))
            elif inner is not self.module and (state := replicate.state(inner)) is not None:
                out |= state.managed()
        names = {name for name, tensor in _named_tensors(self.module) if tensor in out}
        return names | torch_args.ignored_names(self.module)

    # -- torch's names ------------------------------------------------------------------------

    @property
    def has_initialized(self) -> bool:
        """Whether the wrapper has been created."""
        return self._ddp is not None

    @property
    def _ddp_weakref(self) -> Callable[[], DistributedDataParallel | None]:
        return weakref.ref(self.wrapper)

    @property
    def _no_sync(self) -> bool:
        if self._sync is not None:
            return not self._sync
        return self._ddp is not None and not self._ddp.require_backward_grad_sync

    @property
    def _param_names(self) -> list[str]:
        left_out = self._ignored_names()
        return [name for name, _ in self.module.named_parameters() if name not in left_out]

    @property
    def _param_list(self) -> list[nn.Parameter]:
        named = dict(self.module.named_parameters())
        return [named[name] for name in self._param_names]


@folded
def open_when_traced(number: Tensor) -> bool:
    """Let ranks meet while ``torch.compile`` traces the first forward, which breaks no graph."""
    return _states[int(number)].wrapper is not None


class Replicated:
    """Base class that replicated modules get in addition to their own class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An ordinary module: ``model[:2]`` of a replicated Sequential makes one."""
        return _own_class(cls)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__[_KEPT]
        if torch.compiler.is_compiling():
            open_when_traced(state._number)
            return state._ddp.forward(*args, **kwargs)
        return state.wrapper.forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Set the mode; ``eval()`` raises a failure of the last pass on a GPU."""
        ddp = self.__dict__[_KEPT]._ddp
        if ddp is not None and not mode:
            ddp.replica.hear()
        return super().train(mode)  # type: ignore[misc]

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether gradients are averaged from the next forward on, or accumulated locally."""
        self.__dict__[_KEPT]._sync = bool(requires_gradient_sync)

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        """Let ``hook(state, bucket)`` average the buckets, like the wrapper's method."""
        self.__dict__[_KEPT].register_comm_hook(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy of the module is an ordinary module."""
        parts = super().__reduce_ex__(protocol)
        if isinstance(parts, str):
            return parts
        cls, own = type(self), _own_class(type(self))
        make, args, *rest = parts
        args = tuple(own if arg is cls else arg for arg in args)
        if args == (own,):  # made with __newobj__, of which pickle wants the very class
            make, args = copyreg._reconstructor, (own, object, None)  # type: ignore[attr-defined]
        if rest and isinstance(rest[0], dict):
            rest[0] = _ordinary(rest[0])
        return make, args, *rest


class Replicate:
    """The type of ``paceline.replicate``."""

    def __call__(
        self,
        module: _Model,
        ignored_modules: Iterable[nn.Module] | None = None,
        *,
        device_id: int | torch.device | None = None,
        **options: Any,
    ) -> _Model:
        """Average the module's gradients over ranks from now on; returns the same object.

        ``options`` are the keywords of :class:`DistributedDataParallel`. What is in
        ``ignored_modules`` is left alone, and so is what is in modules that are replicated, or
        sharded, on their own. With ``device_id`` inputs are moved there, unless it is the CPU.
        Names of parameters and buffers and all methods stay as they were; the class becomes a
        subclass that has ``set_requires_gradient_sync`` and ``register_comm_hook`` as well. Ranks
        meet in the first forward. A copy of the module is an ordinary module.
        """
        _refuse(module)
        state = ReplicateState(module, ignored_modules or (), _checked(options, device_id))
        note_replicated(module)
        module.__dict__[_KEPT] = state
        own: Any = type(module)
        module.__class__ = _replicated_class(own)
        return module

    def state(self, module: nn.Module) -> ReplicateState | None:
        """Return the :class:`ReplicateState` of a replicated module, or None."""
        return module.__dict__.get(_KEPT)


replicate = Replicate()


# -- what can be replicated -------------------------------------------------------------------


def _refuse(module: object) -> None:
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise ModuleTypeError(
            f"replicate: expected a module of ordinary Python, got {type(module).__name__}."
        )
    if replicate.state(module) is not None:
        raise ReplicatedTwiceError(_own_class(type(module)).__name__)
    if is_fully_sharded(module):
        raise ModuleStateError(
            "Cannot apply `replicate()` on a Module already managed by `fully_shard`.",
            "Replicate other parts of the model.",
        )


def _checked(options: dict[str, Any], device_id: object) -> dict[str, Any]:
    """Keywords for the wrapper; what is wrong in them is said now and not in the first forward."""
    known = list(inspect.signature(DistributedDataParallel.__init__).parameters)[2:]
    for name in options:
        if name not in known:
            raise ModuleTypeError(
                f"replicate() got an unexpected keyword argument {name!r}.",
                f"It takes ignored_modules, device_id, {', '.join(known)}.",
            )
    if device_id is not None:
        if not isinstance(device_id, int | torch.device):
            raise ModuleStateError(
                f"Expected device_id to be int or torch.device, but got {type(device_id)}."
            )
        on_cpu = isinstance(device_id, torch.device) and device_id.type == "cpu"
        options["device_ids"] = None if on_cpu else [device_id]
    if options.get("process_group") is None and options.get("device_mesh") is None:
        options["process_group"] = current_process_group()  # of now; None: torch's at that time
    return options


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


# -- classes ----------------------------------------------------------------------------------


@functools.cache
def _replicated_class(own: type) -> Any:
    return type(f"DDP{own.__name__}", (Replicated, own), {"__module__": own.__module__})


def _own_class(replicated: type) -> type[nn.Module]:
    """The class a module had before it was replicated."""
    found: type[nn.Module] = (
        replicated.__mro__[2] if issubclass(replicated, Replicated) else replicated
    )
    return found


def _ordinary(attributes: dict[str, Any]) -> dict[str, Any]:
    """What a copy takes over."""
    kept = {key: value for key, value in attributes.items() if key != _KEPT}
    without_replicated(kept)
    return kept
