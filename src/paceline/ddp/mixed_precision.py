"""Forward and backward in low precision, weights and gradients in full.

While the model's forward runs, every parameter in it is replaced by a copy in low precision that
autograd knows: what the forward computes with the copy, backward carries on to the parameter, in
the parameter's own precision. When forward ends, however it does, the parameters are back, so that
nobody else ever sees a copy: not the optimizer, not ``state_dict``, not the reducer.

A copy stands in ``module._parameters``, in all of the model at once, since a module may read the
parameters of another without calling it (``nn.MultiheadAttention`` does).

Checkpointed parts run once more during backward, when the model's own forward is long over. The
outermost module that is called there gets its copies for the time of that call. Two things are
therefore out of reach: a checkpointed function that reads a parameter itself, with no module called
around it; and parameters that a module keeps in other places than ``_parameters``.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .._torch.autograd import NO_TASK, current_task
from .._torch.nn import flat_weights, forward_hooks, parameters_dict

__all__ = ["Caster", "_MixedPrecision", "cast_floats", "strip"]


@dataclass(frozen=True)
class _MixedPrecision:
    """Which types to compute, average and keep buffers in; None leaves things as they are.

    ``param_dtype`` is for parameters and inputs during forward and backward, ``buffer_dtype`` for
    buffers from construction on, ``reduce_dtype`` for gradients on their way between ranks. Only
    floating-point tensors are cast.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            dtype = getattr(self, field.name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{field.name} is {dtype}; give a floating-point type or None.")

    @classmethod
    def of(cls, settings: object) -> _MixedPrecision:
        """Ours for anything that has its three fields, such as torch's own."""
        if isinstance(settings, cls):
            return settings
        try:
            return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})
        except AttributeError as error:
            raise TypeError(
                f"mixed_precision is a {type(settings).__name__}; give a _MixedPrecision."
            ) from error

    @property
    def transfer_dtype(self) -> torch.dtype | None:
        """The type gradients travel in: ``reduce_dtype``, or the one they were computed in."""
        return self.reduce_dtype or self.param_dtype


class Caster:
    """Makes ``module`` compute as ``policy`` says, by hooks on it and on the modules in it.

    Buffers are cast at once. ``ignored_names`` are those of parameters and buffers to leave alone.
    The module owns its Caster, through the hooks. A copy of the module, or a pickle, computes in
    full precision: its hooks are asleep until :func:`strip` takes them away. One forward at a time:
    the module itself is changed meanwhile, whatever thread looks at it.
    """

    def __init__(
        self, module: nn.Module, policy: object, ignored_names: Collection[str] = ()
    ) -> None:
        self.policy = _MixedPrecision.of(policy)
        self._root: Callable[[], nn.Module | None] = weakref.ref(module)
        self._ignored_names = frozenset(ignored_names)
        self._swaps: list[_ParameterSwap] = []  # a call inside another has its own
        self._cast_buffers(module)
        if self.policy.param_dtype is not None:
            self._mark(module, self.policy.param_dtype)
            for part in module.modules():
                # First in, last out: other hooks, such as weight_norm's, see the copies too.
                part.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
                part.register_forward_hook(self._leave, always_call=True)

    def remove(self) -> None:
        """Take all hooks off; the buffers stay as they are."""
        self.restore()
        module = self._root()
        if module is not None:
            _take_off(module, lambda caster: caster is self)
            for parameter in module.parameters():
                vars(parameter).pop("_mp_param", None)
                vars(parameter).pop("_fp_param", None)

    def restore(self) -> None:
        """Put all parameters back, in the middle of a forward, too.

        A forward that fails does so by itself, except for what torch's hooks let pass: exceptions
        that are no ``Exception``, such as KeyboardInterrupt.
        """
        while self._swaps:
            self._swaps.pop().undo()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Asleep, ()

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        root = self._root()
        dtype = self.policy.param_dtype
        if root is None or dtype is None:
            return None
        if module is root:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        elif not self._is_recomputed(module):
            return None
        self._swaps.append(_ParameterSwap(module, dtype, self._ignored(root)))
        return args, kwargs

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if self._swaps and self._swaps[-1].module is module:
            self._swaps.pop().undo()

    def _is_recomputed(self, module: nn.Module) -> bool:
        """Whether this call is the outermost of a recomputation, or that same module again."""
        if self._swaps:
            return self._swaps[-1].module is module
        return current_task() != NO_TASK  # a backward pass runs on this thread

    def _ignored(self, root: nn.Module) -> frozenset[int]:
        """The ids of what is ignored; under all of its names, if it has several."""
        if not self._ignored_names:
            return frozenset()
        tensors = (
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        )
        return frozenset(id(tensor) for name, tensor in tensors if name in self._ignored_names)

    def _cast_buffers(self, module: nn.Module) -> None:
        ignored = self._ignored(module)
        for buffer in module.buffers():
            if buffer.is_floating_point() and id(buffer) not in ignored:
                buffer.data = buffer.to(self.policy.buffer_dtype)

    def _mark(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Give parameters the attributes of torch's mixed precision, which hold no data here."""
        ignored = self._ignored(module)
        for parameter in module.parameters():
            if parameter.is_floating_point() and id(parameter) not in ignored:
                full = torch.empty_like(parameter, device="meta", requires_grad=False)
                low = full.to(dtype)
                vars(parameter).update(_mp_param=low, _fp_param=full)


class _Asleep(Caster):
    """What a copy of a module has in the place of its Caster; it does nothing."""

    def __init__(self) -> None:
        self.policy = _MixedPrecision()
        self._root = lambda: None
        self._swaps = []


def strip(module: nn.Module) -> None:
    """Take off what a Caster of ``module`` has left: one it had before, or one it was copied with.

    Casters of modules within ``module`` stay.
    """
    _take_off(module, lambda caster: caster._root() in (None, module))


def _take_off(module: nn.Module, chosen: Callable[[Caster], bool]) -> None:
    for part in module.modules():
        for hooks, flags in forward_hooks(part):
            for key, hook in list(hooks.items()):
                caster = getattr(hook, "__self__", None)
                if isinstance(caster, Caster) and chosen(caster):
                    del hooks[key]
                    flags.pop(key, None)


class _ParameterSwap:
    """Low-precision copies in the place of the parameters of ``module``, until :meth:`undo`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, ignored: Collection[int]) -> None:
        self.module = module
        # nn.RNNBase notices other parameters in its forward, but keeps a list of them ever after.
        self._lists = [
            (part, flat_weights(part)) for part in module.modules() if isinstance(part, nn.RNNBase)
        ]
        copies: dict[int, Tensor] = {}  # by parameter, so that a shared one is cast once
        self._places = []
        for place, name, parameter in _parameters(module):
            if parameter.dtype != dtype and id(parameter) not in ignored:
                if id(parameter) not in copies:
                    copies[id(parameter)] = _cast(parameter, dtype)
                self._places.append((place, name, parameter, copies[id(parameter)]))
        for place, name, _, low in self._places:
            place[name] = low

    def undo(self) -> None:
        for place, name, parameter, low in self._places:
            if place.get(name) is low:  # else the forward itself has put another one there
                place[name] = parameter
        for part, lists in self._lists:
            vars(part).update(lists)


def _parameters(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield where each floating-point parameter stands: the dict, the key, the parameter."""
    for part in module.modules():
        own = parameters_dict(part)
        for name, parameter in own.items():
            if parameter is not None and parameter.is_floating_point():
                yield own, name, parameter


def _cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.enable_grad():  # a parameter requires its gradient under no_grad, too
        low = parameter.to(dtype)
    for name, note in vars(parameter).items():  # whatever users have noted on it
        vars(low).setdefault(name, note)
    return low


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with the floating-point tensors in it cast, through containers of the usual kinds.

    Containers are copied only where something in them changes.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, PackedSequence):
        return value._replace(data=cast_floats(value.data, dtype))
    if isinstance(value, dict):
        return _with_items(value, {k: cast_floats(v, dtype) for k, v in value.items()})
    if isinstance(value, (list, tuple, set, frozenset)):
        return _with_members(value, [cast_floats(member, dtype) for member in value])
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
        return _with_fields(value, found, {k: cast_floats(v, dtype) for k, v in found.items()})
    return value


def _with_items(value: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    if all(new[key] is value[key] for key in new):
        return value
    changed = copy.copy(value)  # of the same kind, with its default factory if it has one
    for key in new:
        changed[key] = new[key]
    return changed


def _with_members(value: Any, new: list[Any]) -> Any:
    if all(a is b for a, b in zip(value, new, strict=True)):
        return value
    if hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*new)
    return type(value)(new)


def _with_fields(value: Any, old: dict[str, Any], new: dict[str, Any]) -> Any:
    if all(new[name] is old[name] for name in new):
        return value
    changed = copy.copy(value)
    for name in new:
        object.__setattr__(changed, name, new[name])  # frozen ones, too
    return changed
