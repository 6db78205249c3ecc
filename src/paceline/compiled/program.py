"""Program: one training step as one function that Dynamo traces whole.

The functions here are what is compiled, so they are plain: no objects of ours inside but lists,
numbers and tensors. Everything that a step needs to know when it runs is an argument; everything
that the graph depends on is in :class:`StepLayout`, and another layout is another program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import scaling, updates
from .updates import Kind, Tensors

Loss = Callable[..., Tensor]
_programs = itertools.count(1)


@dataclass(frozen=True)
class AveragePlace:
    """Where a parameter's average lies in the memory of the buckets."""

    bucket: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self, buffers: Sequence[Tensor]) -> Tensor:
        """The average."""
        return buffers[self.bucket].as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class StepLayout:
    """What the graph of a step depends on, beside the model and the loss."""

    launches: tuple[tuple[int, ...], ...]  # slots, the reducer's indices too, that go together
    places: tuple[AveragePlace | None, ...]  # by slot; None: this parameter is not averaged
    classes: tuple[tuple[Kind, tuple[int, ...]], ...]  # who is updated how, by slot
    max_norm: float | None
    autocast: torch.dtype | None
    unscales: bool  # a scaler's scale is taken out of the averages
    keep: bool  # gradients that are not averaged are returned


def write(
    module: nn.Module, loss_fn: Loss, params: Tensors, layout: StepLayout
) -> Callable[..., Any]:
    """The function of a whole step: forward, backward, averages, clipping and update.

    It takes the buckets' memory, the wire, memory for whether a rank was in trouble, a scaler's
    scale or None, gradients that were gathered and are not averaged, by slot, the classes' state,
    hyperparameters (a row for each class, and then those of a step that changes nothing), and the
    batch. It returns the loss, the norm of all gradients if they are clipped, those gradients that
    are not averaged, for each slot whether this rank's graph reached the parameter, and whether a
    scaled gradient was not finite.
    """
    differentiate = _backward_of(module, loss_fn, params, layout.autocast)

    def whole(
        buffers: Tensors,
        wire: Tensor,
        trouble: Tensor,
        scale: Tensor | None,
        held: list[Tensor | None],
        states: list[dict[str, Tensors]],
        hyperparameters: Tensor,
        *batch: Any,
    ) -> tuple[Any, ...]:
        loss, fresh = differentiate(scale, *batch)
        local = [_sum(grad, held[slot]) if held else grad for slot, grad in enumerate(fresh)]
        grads, rows = list(local), hyperparameters
        if layout.launches:
            grads = _averaged(layout, buffers, wire, trouble, local)
        norm, found = _unscale_and_clip(layout, grads, scale)
        if layout.classes:
            rows = _unless_in_vain(trouble if layout.launches else None, found, hyperparameters)
        for row, (kind, slots) in enumerate(layout.classes):
            _update(kind, slots, params, grads, local, states[row], rows[row])
        used = tuple([grad is not None for grad in local])
        kept = [
            grad if place is None else None
            for grad, place in zip(local, layout.places, strict=True)
        ]
        return loss, norm, kept if layout.keep else [], used, found

    return _its_own(whole)


def write_gathering(
    module: nn.Module, loss_fn: Loss, params: Tensors, autocast: torch.dtype | None
) -> Callable[..., Any]:
    """The function of a step that only gathers: the loss, and this rank's gradients.

    It takes a scaler's scale or None, and the batch.
    """
    differentiate = _backward_of(module, loss_fn, params, autocast)

    def gathering(scale: Tensor | None, *batch: Any) -> tuple[Any, ...]:
        loss, local = differentiate(scale, *batch)
        return loss, list(local)

    return _its_own(gathering)


def _its_own(function: Any) -> Callable[..., Any]:
    """A copy with its own code object: Dynamo counts recompiles by code object."""
    name = f"{function.__name__}_{next(_programs)}"
    function.__code__ = function.__code__.replace(co_name=name)
    return function  # type: ignore[no-any-return]


def _backward_of(
    module: nn.Module, loss_fn: Loss, params: Tensors, autocast: torch.dtype | None
) -> Callable[..., tuple[Tensor, tuple[Tensor | None, ...]]]:
    device = params[0].device.type

    def differentiate(
        scale: Tensor | None, *batch: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        with torch.enable_grad():
            with casting(device, autocast):
                loss = loss_fn(module, *batch)
            scaled = loss if scale is None else loss * scale
            grads = torch.autograd.grad(scaled, params, allow_unused=True)
        return loss.detach(), grads

    return differentiate


def casting(device: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast to ``dtype``, if there is one."""
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


def _sum(grad: Tensor | None, held: Tensor | None) -> Tensor | None:
    return grad if grad is None or held is None else grad + held


def _averaged(
    layout: StepLayout,
    buffers: Tensors,
    wire: Tensor,
    trouble: Tensor,
    local: Sequence[Tensor | None],
) -> list[Tensor | None]:
    tickets = []
    for row in layout.launches:
        here = [slot for slot in row if local[slot] is not None]
        if here:
            grads = [local[slot] for slot in here]
            tickets.append(torch.ops.paceline.launch(grads, here, wire))
    torch.ops.paceline.settle(buffers, trouble, tickets, wire)
    return [
        local[slot] if place is None else place.read(buffers)
        for slot, place in enumerate(layout.places)
    ]


def _unless_in_vain(trouble: Tensor | None, found: Tensor | None, rows: Tensor) -> Tensor:
    """The first half of ``rows``; the second, which changes nothing, where nothing may change.

    That is where a rank was in trouble: a device gets there before the host knows, and half a
    gradient must not be stepped with. And where a scaled gradient was not finite.
    """
    reasons = [told for told in (trouble, found) if told is not None]
    if not reasons:
        return rows
    usual, idle = rows.chunk(2)
    return torch.where(torch.cat([told.flatten() for told in reasons]).gt(0).any(), idle, usual)


def _unscale_and_clip(
    layout: StepLayout, grads: list[Tensor | None], scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Divide the gradients by the scale and clip them, in the list; all are 0 if one is infinite.

    Returns their norm if they are clipped, and whether one was not finite if they are divided.
    """
    slots = [slot for slot, grad in enumerate(grads) if grad is not None]
    those: Tensors = [grads[slot] for slot in slots]  # type: ignore[misc]
    norm = found = None
    if layout.unscales and scale is not None:
        those, found = scaling.divide(those, scale)
    if layout.max_norm is not None:
        those, norm = updates.clip(those, layout.max_norm)
    if found is not None:
        those = [torch.where(found > 0, 0.0, grad) for grad in those]
    for slot, grad in zip(slots, those, strict=True):
        grads[slot] = grad
    return norm, found


def _update(
    kind: Kind,
    slots: Sequence[int],
    params: Tensors,
    grads: Sequence[Tensor | None],
    local: Sequence[Tensor | None],
    state: dict[str, Tensors],
    hyperparameters: Tensor,
) -> None:
    """Step those that this rank's graph reached; whoever else has an average is stepped later."""
    here = [at for at, slot in enumerate(slots) if local[slot] is not None]
    if here:
        chosen = [params[slots[at]] for at in here]
        given = [grads[slots[at]] for at in here]
        own = {name: [tensors[at] for at in here] for name, tensors in state.items()}
        updates.apply(kind, chosen, given, own, hyperparameters)  # type: ignore[arg-type]
