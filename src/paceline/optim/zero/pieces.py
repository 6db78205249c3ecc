"""Pieces: the tensors that this rank's optimizer steps, and which parameters they are parts of.

A piece that is a whole parameter is the parameter itself, so its gradient is there already. A part
of one is a tensor of its own on the same memory; it is lent its part of the gradient for the time
of a step. A run is a stretch of a buffer in which several parameters lie, with a gradient that lies
just so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ..._exchange import memory_like, memory_of
from .stretches import Slice, length_of


class LocalPiece(Protocol):
    """Something that is stepped as one tensor."""

    tensor: Tensor  # what the optimizer is given
    group: int  # the index of its parameter group
    slices: tuple[Slice, ...]  # what it holds of which parameters, in order

    @property
    def is_whole(self) -> bool:
        """Whether it is a parameter, in its own shape."""

    def lend_grad(self) -> None:
        """Have the tensor's gradient in ``.grad``."""

    def drop_grad(self) -> None:
        """Give it back."""


class WholePiece:
    """A parameter."""

    is_whole = True

    def __init__(self, param: Tensor, index: int, group: int) -> None:
        self.tensor = param
        self.group = group
        self.slices: tuple[Slice, ...] = (Slice(index, 0, param.numel()),)

    def lend_grad(self) -> None:
        """Nothing to do: a parameter has its gradient."""

    def drop_grad(self) -> None:
        """Nothing to do: the gradient stays."""


class PartPiece:
    """A stretch of one parameter's memory."""

    is_whole = False

    def __init__(self, param: Tensor, part: Slice, group: int) -> None:
        self._param, self._start, self._stop = param, part.start, part.stop
        self.tensor = memory_of(param)[part.start : part.stop]
        self.group = group
        self.slices: tuple[Slice, ...] = (part,)

    def lend_grad(self) -> None:
        """Look where the parameter's memory is now, and cut its gradient as it is cut."""
        place = memory_of(self._param)[self._start : self._stop]
        if place.data_ptr() != self.tensor.data_ptr():
            self.tensor.data = place
        grad = self._param.grad
        if grad is None:
            self.tensor.grad = None
        else:  # torch adds a sparse tensor to the wrong place of a stretch, so it gets a dense one
            whole = memory_like(grad.to_dense() if grad.is_sparse else grad, self._param)
            self.tensor.grad = whole[self._start : self._stop]

    def drop_grad(self) -> None:
        """Keep nothing of it: it belongs to the parameter."""
        self.tensor.grad = None


class RunPiece:
    """A stretch of a buffer; ``grad_of`` gives its gradient, or None when there is none."""

    is_whole = False

    def __init__(
        self,
        tensor: Tensor,
        slices: Sequence[Slice],
        group: int,
        grad_of: Callable[[], Tensor | None],
    ) -> None:
        assert tensor.numel() == length_of(slices)
        self.tensor = tensor.detach()
        self.group = group
        self.slices = tuple(slices)
        self.gradient = grad_of
        self.rests = False  # no rank had a gradient for its parameters

    def lend_grad(self) -> None:
        """Take it from where the average lies."""
        self.tensor.grad = None if self.rests else self.gradient()

    def drop_grad(self) -> None:
        """Keep nothing of it: the bucket is filled anew."""
        self.tensor.grad = None

    def part(self, start: int, slices: Sequence[Slice]) -> RunPiece:
        """The run of ``slices``, which begin at ``start`` of this one."""
        stop = start + length_of(slices)

        def gradient() -> Tensor | None:
            whole = self.gradient()
            return None if whole is None else whole[start:stop]

        return RunPiece(self.tensor[start:stop], slices, self.group, gradient)


def piece_of(param: Tensor, part: Slice, group: int) -> LocalPiece:
    """The parameter itself if ``part`` is all of it, else that part."""
    if part.length == param.numel():
        return WholePiece(param, part.param, group)
    return PartPiece(param, part, group)
