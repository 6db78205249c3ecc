"""Binding: what a step's programs are made for, and whether that still holds.

A program is made for certain parameters, in certain buckets, with the state that an optimizer has
for them. All of that may change between two steps: layers are frozen, a checkpoint is loaded,
somebody takes an eager step. :meth:`Binding.settle` looks, which costs little, and makes other
programs where it must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import program, updates
from .program import AveragePlace, Loss, StepLayout
from .scaling import Scaling
from .settings import Settings
from .wire import Wire

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class Binding:
    """A wrapper, an optimizer and a loss, and the programs for them."""

    def __init__(self, wire: Wire, optimizer: Optimizer, loss_fn: Loss, settings: Settings) -> None:
        self._wire, self._optimizer = wire, optimizer
        self._loss_fn, self._settings = loss_fn, settings
        self.scaling = Scaling(settings.scaler)
        self.unfit = updates.why_not(optimizer)  # why the optimizer is no part of the graph
        self.params: list[Tensor] = []  # by slot: the reducer's, then others of the optimizer
        self.classes: list[updates.Class] = []
        self.layout: StepLayout | None = None
        self._whole: Callable[..., Any] | None = None
        self._gathering: Callable[..., Any] | None = None
        self._in_trouble: Tensor | None = None  # where a graph leaves whether a rank was
        self._seen: tuple[object, ...] = ()  # what all of that was made from
        self.look()

    # -- programs -----------------------------------------------------------------------------

    def whole(self, compiler: Compiler) -> Callable[..., Any]:
        """The program of a whole step."""
        if self._whole is None:
            self._whole = compiler(self.write())
        return self._whole

    def write(self) -> Callable[..., Any]:
        """The function of a whole step, which :meth:`whole` compiles."""
        assert self.layout is not None
        return program.write(self._wire.module, self._loss_fn, self.params, self.layout)

    def arguments(self) -> tuple[Any, ...]:
        """What that function is called with in this step, before the batch."""
        assert self.layout is not None
        return (
            self._wire.buffers() if self.layout.launches else [],
            self._wire.number,
            self._trouble(),
            self.scale,
            self._held(),
            [found.state for found in self.classes],
            self._hyperparameters(),
        )

    def gathering(self, compiler: Compiler) -> Callable[..., Any]:
        """The program of a step that gathers gradients for a later one."""
        if self._gathering is None:
            autocast = self._settings.autocast
            self._gathering = compiler(
                program.write_gathering(self._wire.module, self._loss_fn, self.params, autocast)
            )
        return self._gathering

    def lasting(self) -> list[Tensor]:
        """What the function is given in every step, in memory that stays where it is."""
        state = (t for found in self.classes for tensors in found.state.values() for t in tensors)
        reducer = self._wire.reducer
        buckets = [bucket.buffer for bucket in reducer.buckets] if reducer.averages else []
        scale = [] if self.scale is None else [self.scale]
        module = self._wire.module
        own = (*module.parameters(), *module.buffers())  # frozen ones are not in self.params
        return [*self.params, *own, *state, *buckets, *scale, self._trouble()]

    @property
    def scale(self) -> Tensor | None:
        """The scale of the step's scaler, if it has one."""
        return self.scaling.scale(self.params[0].device)

    def _trouble(self) -> Tensor:
        device = self.params[0].device
        if self._in_trouble is None or self._in_trouble.device != device:
            self._in_trouble = torch.zeros(2, device=device)
        return self._in_trouble

    def _hyperparameters(self) -> Tensor:
        """What the classes need to know in this step, a row for each; then to change nothing."""
        rows = [updates.hyperparameters_of(self._optimizer, found) for found in self.classes]
        rows += [updates.idle(found.kind) for found in self.classes]
        device = self.params[0].device
        # From memory that is not pinned, a copy waits for all that the GPU has yet to do.
        rows_here = torch.tensor(rows, dtype=torch.float64, pin_memory=device.type == "cuda")
        return rows_here.to(device, non_blocking=True)

    def _held(self) -> list[Tensor | None]:
        """By slot, gradients that were gathered and are not averaged; empty if there are none."""
        if self._settings.accumulate == 1 or self.layout is None:
            return []
        pairs = zip(self.params, self.layout.places, strict=True)
        held = [p.grad if place is None else None for p, place in pairs]
        return held if any(grad is not None for grad in held) else []

    # -- what they are for --------------------------------------------------------------------

    def settle(self) -> None:
        """See that the programs fit the parameters, buckets and state of now."""
        self.look()
        known = self.layout is not None
        if known and updates.hold(self._optimizer, self.classes, self.params):
            return
        if not self.unfit:
            slots = {param: slot for slot, param in enumerate(self.params)}
            self.classes = updates.classes_of(self._optimizer, slots)
        layout = self._make_layout()
        if layout != self.layout:
            self.layout, self._whole = layout, None

    def look(self) -> None:
        """Find the parameters again, if they or their buckets are others than before."""
        sizes = tuple(len(group["params"]) for group in self._optimizer.param_groups)
        reducer = self._wire.reducer
        seen = (reducer, reducer.averages, *reducer.buckets, sizes)
        if seen == self._seen:
            return
        self._seen, self.params = seen, self._find_params()
        self._whole = self._gathering = self.layout = None

    def _find_params(self) -> list[Tensor]:
        averaged: list[Tensor] = list(self._wire.reducer.params)
        known = set(averaged)
        others = (p for group in self._optimizer.param_groups for p in group["params"])
        return [*averaged, *(p for p in others if p.requires_grad and p not in known)]

    def _rows(self, indices: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """A bucket's parameters, cut behind large ones, so that these are copied from cache."""
        row: list[int] = []
        for number in indices:
            row.append(number)
            if self._wire.reducer.is_large(number):
                yield tuple(row)
                row = []
        if row:
            yield tuple(row)

    def _make_layout(self) -> StepLayout:
        reducer = self._wire.reducer
        buckets = reducer.buckets if reducer.averages else ()
        places: list[AveragePlace | None] = [None] * len(self.params)
        for index, bucket in enumerate(buckets):
            bucket.claim()
            for number, view in zip(bucket.numbers, bucket.views, strict=True):
                offset = int(view.storage_offset() - bucket.buffer.storage_offset())
                places[number] = AveragePlace(index, offset, tuple(view.shape), view.stride())
            bucket.let_go()
        return StepLayout(
            launches=tuple(row for bucket in buckets for row in self._rows(bucket.numbers)),
            places=tuple(places),
            classes=tuple(found.key for found in self.classes),
            max_norm=None if self.unfit else self._settings.max_norm,
            autocast=self._settings.autocast,
            unscales=bool(self.scaling) and not self.unfit,
            keep=self._settings.keep_grads or bool(self.unfit),
        )
