"""Backward hooks of modules and tensors inside a graph.

Dynamo refuses a module with full backward hooks (it wants compiled autograd for them), and a
backward pass that is itself traced drops parameters' hooks without a word. :func:`keep_hooks` puts
two *gates* around such a module: identity functions whose backward is one operator each, which
calls the module's hooks with real tensors, in eager Python, when the graph runs. So their side
effects are kept and what they return replaces the gradients. The price is a copy of the gradients
that pass a gate.

:func:`on_gradient` is ``tensor.register_hook`` for a tensor that is made inside the graph; the hook
it takes comes from :func:`gradient_hook`, outside the graph.
:func:`refuse_hooks` is for whoever traces a backward pass: it names every hook that would be lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import Self

from .._torch import opaque
from .._torch.nn import (
    backward_hooks,
    backward_pre_hooks,
    has_global_backward_hooks,
    has_old_backward_hooks,
)
from .._torch.tensors import hooks_of as tensor_hooks
from .._torch.tensors import late_hooks_of
from ..errors import HookRefusedError, HookResultError, UnsupportedError
from . import operators

Gradients = tuple["Tensor | None", ...]


# -- what runs when gradients pass ----------------------------------------------------------------


class Passage(Protocol):
    """What happens to gradients on their way through a gate."""

    def leave(self, call: int, gradients: Gradients, unentered: int) -> Gradients:
        """Gradients come in from behind the module; those that go on into it.

        ``unentered``: how many inputs it has, when none of them will get a gradient; else -1.
        """

    def enter(self, call: int, gradients: Gradients) -> Gradients:
        """Gradients have passed the module; those that go on to what is before it."""


class PassageGate(opaque.GraphInput):  # type: ignore[misc]
    """A passage as a graph sees it: an input, whatever is behind it."""

    def __init__(self, passage: Passage) -> None:
        self.passage = passage


class ModulePassage:
    """Calls a module's hooks as eager mode does."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._module = module
        self.before: dict[int, Any] = {}
        self.after: dict[int, Any] = {}
        self._outputs: dict[int, Gradients] = {}  # by call, until the gradients have passed

    def take(self) -> None:
        """Take the hooks over from the module."""
        module, self._outputs = self._module, {}
        before, after = backward_pre_hooks(module), backward_hooks(module)
        self.before, self.after = dict(before), dict(after)
        before.clear()
        after.clear()

    def give_back(self) -> None:
        """Give them back to it."""
        backward_pre_hooks(self._module).update(self.before)
        backward_hooks(self._module).update(self.after)

    def leave(self, call: int, gradients: Gradients, unentered: int) -> Gradients:
        for hook in list(self.before.values()):
            result = hook(self._module, gradients)
            gradients = _replaced(self.name, "backward pre-hook", result, gradients)
        self._outputs[call] = gradients
        if unentered >= 0:
            self.enter(call, (None,) * unentered)
        return gradients

    def enter(self, call: int, gradients: Gradients) -> Gradients:
        outputs = self._outputs.pop(call)
        for hook in list(self.after.values()):
            result = hook(self._module, gradients, outputs)
            gradients = _replaced(self.name, "full backward hook", result, gradients)
        return gradients


class TensorPassage:
    """Calls one hook with one gradient."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self._hook = hook

    def leave(self, call: int, gradients: Gradients, unentered: int) -> Gradients:
        result = self._hook(gradients[0])  # type: ignore[arg-type]
        return gradients if result is None else (result,)

    def enter(self, call: int, gradients: Gradients) -> Gradients:
        return gradients


def _replaced(module: str, hook: str, result: Any, gradients: Gradients) -> Gradients:
    if result is None:
        return gradients
    new = (result,) if isinstance(result, Tensor) else tuple(result)
    if len(new) != len(gradients):
        raise HookResultError(module, hook, len(gradients), len(new))
    return new


# -- the operators --------------------------------------------------------------------------------

_calls = itertools.count(1)


def _begin(gate: PassageGate) -> Tensor:
    return torch.tensor(next(_calls))


def _leave(
    call: Tensor,
    places: list[int],
    size: int,
    unentered: int,
    grads: list[Tensor],
    gate: PassageGate,
) -> list[Tensor]:
    number = int(call.item())
    return _passed(lambda given: gate.passage.leave(number, given, unentered), places, size, grads)


def _enter(
    call: Tensor,
    places: list[int],
    size: int,
    unentered: int,
    grads: list[Tensor],
    gate: PassageGate,
) -> list[Tensor]:
    number = int(call.item())
    return _passed(lambda given: gate.passage.enter(number, given), places, size, grads)


def _passed(
    hooks: Callable[[Gradients], Gradients], places: list[int], size: int, grads: list[Tensor]
) -> list[Tensor]:
    """Call ``hooks`` with a gradient, or None, for each argument; new tensors of the results."""
    given: list[Tensor | None] = [None] * size
    for place, grad in zip(places, grads, strict=True):
        given[place] = grad
    with torch.no_grad():
        results = hooks(tuple(given))
        taken = [results[place] for place in places]
        return [
            torch.zeros_like(grad) if new is None else new.clone().to(grad.dtype).view_as(grad)
            for new, grad in zip(taken, grads, strict=True)
        ]


@cache
def _offer() -> None:
    """Define the operators, or raise that this torch cannot have them."""
    if reason := opaque.missing():
        raise UnsupportedError("torch.compile", "hooks inside a graph", f"{reason}.")
    name = opaque.name_as_input(PassageGate, {}, lambda gate: [])
    arguments = (
        "(Tensor call, int[] places, int size, int unentered, Tensor[] grads, "
        f"{name} gate) -> Tensor[]"
    )
    for operator, schema, kernel, shapes in (
        (
            "begin",
            f"({name} gate) -> Tensor",
            _begin,
            lambda gate: torch.empty((), dtype=torch.long),
        ),
        ("leave", arguments, _leave, _shapes),
        ("enter", arguments, _enter, _shapes),
    ):
        operators.define(operator, schema, kernel, shapes, in_order=True)


def _shapes(
    call: Tensor, places: Any, size: int, unentered: int, grads: list[Tensor], gate: Any
) -> list[Tensor]:
    return [torch.empty_like(grad) for grad in grads]


class _Passing(torch.autograd.Function):
    """The identity function of a gate."""

    @staticmethod
    def forward(ctx: Any, gate: PassageGate, call: Tensor, where: Any, *tensors: Tensor) -> Any:
        ctx.gate, ctx.where = gate, where
        ctx.save_for_backward(call)
        return tuple(t.view_as(t) for t in tensors)


class _Leaving(_Passing):
    """The outputs of a module; its backward comes before the module's."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (call,) = ctx.saved_tensors
        new = torch.ops.paceline.leave(call, *ctx.where, list(grads), ctx.gate)
        return None, None, None, *new


class _Entering(_Passing):
    """The inputs of a module; its backward comes after the module's."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (call,) = ctx.saved_tensors
        new = torch.ops.paceline.enter(call, *ctx.where, list(grads), ctx.gate)
        return None, None, None, *new


def _places(values: Sequence[Any]) -> list[int]:
    return [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.requires_grad]


def _through(
    function: Any, gate: PassageGate, call: Tensor, values: Sequence[Any], unentered: int = -1
) -> list[Any]:
    """``values`` with those that need a gradient passed through ``function``."""
    places, result = _places(values), list(values)
    if places:
        where = (places, len(values), unentered)
        passed = function.apply(gate, call, where, *[values[i] for i in places])
        for place, tensor in zip(places, passed, strict=True):
            result[place] = tensor
    return result


# -- modules --------------------------------------------------------------------------------------


class _GatedForward:
    """A module's forward between its gates."""

    def __init__(self, passage: ModulePassage, forward: Callable[..., Any]) -> None:
        self.passage = passage
        self.gate = PassageGate(passage)
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        call = torch.ops.paceline.begin(self.gate)
        unentered = -1 if _places(args) else len(args)
        result = self.forward(*_through(_Entering, self.gate, call, args), **kwargs)
        if isinstance(result, Tensor):
            return _through(_Leaving, self.gate, call, (result,), unentered)[0]
        if isinstance(result, list | tuple):
            passed = _through(_Leaving, self.gate, call, result, unentered)
            return type(result)(*passed) if hasattr(result, "_fields") else type(result)(passed)
        return result


@dataclass(eq=False)
class KeptHooks:
    """What :func:`keep_hooks` did to a model; ``remove`` undoes it."""

    gated: dict[nn.Module, _GatedForward]
    own: dict[nn.Module, Any]  # forwards that belong to one object, not to its class

    def remove(self) -> None:
        """Give the modules their hooks and their forward back."""
        for module, gated in self.gated.items():
            del module.__dict__["forward"]
            if module in self.own:
                module.__dict__["forward"] = self.own[module]
            gated.passage.give_back()
        self.gated.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def keep_hooks(model: nn.Module) -> KeptHooks:
    """Make compiled code call the full backward hooks and pre-hooks of all modules of ``model``.

    Until ``remove()``, identity functions around each module ("gates") call the hooks, in eager
    mode and in compiled code. Hooks that a gate cannot call (``register_backward_hook``, global
    hooks) raise an error.
    """
    _offer()
    refuse_hooks(model, gated=True)
    kept = KeptHooks({}, {})
    for name, module in model.named_modules():
        if backward_hooks(module) or backward_pre_hooks(module):
            gated = kept.gated[module] = _gated(name or type(module).__name__, module)
            gated.passage.take()
            if "forward" in module.__dict__:
                kept.own[module] = module.__dict__["forward"]
            module.__dict__["forward"] = gated
    return kept


class _Remembered:
    """The gates of a module, for the next time: compiled code holds for these very gates."""

    def __init__(self, gated: _GatedForward) -> None:
        self.gated = gated

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the module has none


def _gated(name: str, module: nn.Module) -> _GatedForward:
    known = module.__dict__.get("_paceline_gates")
    if known is None or known.gated.forward != module.forward:
        gated = _GatedForward(ModulePassage(name, module), module.forward)
        known = module.__dict__["_paceline_gates"] = _Remembered(gated)
    return known.gated


def gradient_hook(hook: Callable[[Tensor], Tensor | None]) -> PassageGate:
    """Return ``hook`` in the form that :func:`on_gradient` needs; call it outside the graph."""
    _offer()
    return PassageGate(TensorPassage(hook))


def on_gradient(tensor: Tensor, hook: PassageGate) -> Tensor:
    """Return ``tensor`` with ``hook`` on its gradient; use the result in place of ``tensor``."""
    call = torch.ops.paceline.begin(hook)
    passed: Tensor = _through(_Leaving, hook, call, (tensor,))[0]
    return passed


# -- what would be lost ---------------------------------------------------------------------------


def hooks_of(model: nn.Module, *, gated: bool = False) -> Iterator[str]:
    """Return a description of every hook that a traced backward pass would not call.

    ``gated`` leaves out those that :func:`keep_hooks` keeps, and the hooks of parameters, which an
    eager backward pass calls.
    """
    if has_global_backward_hooks():
        yield "a backward hook of all modules (register_module_full_backward_hook)"
    for name, module in model.named_modules():
        where = name or type(module).__name__
        old = has_old_backward_hooks(module)
        for hook in backward_hooks(module).values():
            if old or not gated:
                kind = "register_backward_hook" if old else "full backward hook"
                yield f"{_name_of(hook)} of {where} ({kind})"
        for hook in backward_pre_hooks(module).values():
            if not gated:
                yield f"{_name_of(hook)} of {where} (full backward pre-hook)"
    for name, param in model.named_parameters() if not gated else ():
        for hook in tensor_hooks(param).values():
            yield f"{_name_of(hook)} of {name} (tensor hook)"
        for hook in late_hooks_of(param).values():
            yield f"{_name_of(hook)} of {name} (post-accumulate hook)"


def refuse_hooks(model: nn.Module, *, gated: bool = False) -> None:
    """Raise an error that names the hooks that compiled code would not call, if there are any."""
    if lost := tuple(hooks_of(model, gated=gated)):
        raise HookRefusedError(lost)


def _name_of(hook: Any) -> str:
    hook = hook[0] if isinstance(hook, tuple) else hook
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name
