"""Pairing with DistributedDataParallel: gradients arrive in stretches, and so they are stepped.

The wrapper reduce-scatters each bucket, and a rank gets the averages of one stretch of it. The
parameters of a bucket are laid into a buffer that looks like the bucket; the same stretch of that
is what this rank steps, as a few long tensors, and then gathers in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ...groups import Group
from .pieces import LocalPiece, RunPiece
from .rows import KindOf, Laid
from .state import copied
from .stretches import Slice, length_of, runs_of

_LONGEST = 1 << 20  # elements of a run: few kernels, and what they work on still fits a cache


class GradientStretch(Protocol):
    """One bucket of a wrapper, and this rank's stretch of it."""

    @property
    def params(self) -> Sequence[Tensor]:
        """The bucket's parameters; they lie one after the other, each as in its own memory."""

    @property
    def numel(self) -> int:
        """Elements of the bucket, with what makes it divisible by the number of ranks."""

    @property
    def start(self) -> int:
        """Where this rank's stretch begins."""

    @property
    def stop(self) -> int:
        """Where it ends."""

    def gradient(self) -> Tensor | None:
        """The averages of the stretch; None while there are none."""

    @property
    def present(self) -> Collection[int]:
        """Places, among the parameters, of those that have a gradient, if only zeros."""


class GradientStretches(Protocol):
    """The gradients of a wrapper that reduce-scatters them."""

    @property
    def group(self) -> Group:
        """Whose ranks have the stretches."""

    @property
    def stretches(self) -> Sequence[GradientStretch]:
        """One for each bucket."""

    def clear(self, *, in_place: bool) -> None:
        """Forget the averages, as zero_grad does, or leave zeros as it does ``in_place``."""

    def use(self) -> None:
        """A step was taken with them."""


class PairedRow(Laid):
    """The parameters of one bucket, in a buffer of the same layout."""

    def __init__(
        self, stretch: GradientStretch, params: Mapping[int, Tensor], group: Group
    ) -> None:
        length = stretch.numel // group.size()
        total = sum(param.numel() for param in params.values())
        bounds = tuple(min(rank * length, total) for rank in range(group.size() + 1))
        super().__init__(bounds, params, group, length)
        self.stretch = stretch
        self._find_starts()

    def _find_starts(self) -> None:
        sizes = (param.numel() for param in self.params.values())
        starts = itertools.accumulate(sizes, initial=0)
        self._starts = dict(zip(self.params, starts, strict=False))

    def adopt(self, indices: Mapping[Tensor, int]) -> None:
        """Learn the indices of parameters that were nobody's so far."""
        fresh = {n: indices[p] for n, p in self.params.items() if n < 0 and p in indices}
        self.params = {fresh.get(n, n): param for n, param in self.params.items()}
        self.owned = tuple(
            tuple(Slice(fresh.get(s.param, s.param), s.start, s.stop) for s in slices)
            for slices in self.owned
        )
        self._find_starts()

    def idle(self) -> set[int]:
        """Parameters that no rank had a gradient for, though others of the bucket had one."""
        present = self.stretch.present
        if not present or len(present) == len(self.params):
            return set()
        return {index for at, index in enumerate(self.params) if at not in present}

    def pieces(self, group_of: Mapping[int, int], kind: KindOf) -> list[LocalPiece]:
        def found(part: Slice) -> Hashable:
            known = part.param in group_of
            return (group_of[part.param], kind(part.param)) if known else None

        runs = runs_of(self.owned[self.group.rank()], found, _LONGEST)
        return [self._run(run, group_of[run[0].param]) for run in runs]

    def _run(self, slices: Sequence[Slice], group: int) -> RunPiece:
        start = self._starts[slices[0].param] + slices[0].start
        stop = start + sum(part.length for part in slices)
        return RunPiece(self.buffer[start:stop], slices, group, self._gradient(start, stop))

    def _gradient(self, start: int, stop: int) -> Callable[[], Tensor | None]:
        stretch = self.stretch
        first, last = start - stretch.start, stop - stretch.start

        def gradient() -> Tensor | None:
            grad = stretch.gradient()
            return None if grad is None else grad[first:last].to(self.buffer.dtype)

        return gradient


def pair(scattered: GradientStretches, indices: Mapping[Tensor, int]) -> list[PairedRow]:
    """A row for every bucket with a parameter of ours; ``indices`` says which those are."""
    rows = []
    strangers = itertools.count(-1, -1)  # the bucket has them, and this optimizer does not
    for stretch in scattered.stretches:
        params = {_index(param, indices, strangers): param for param in stretch.params}
        if any(index >= 0 for index in params):
            rows.append(PairedRow(stretch, params, scattered.group))
    return rows


def set_apart(
    pieces: Sequence[LocalPiece], idle: Collection[int], optim: Optimizer
) -> list[LocalPiece]:
    """Let runs rest whose parameters are idle; one that has both kinds is cut, and its state too.

    A parameter without a gradient takes no step, so its step count is another one from now on.
    """
    found: list[LocalPiece] = []
    for piece in pieces:
        if not isinstance(piece, RunPiece):
            found.append(piece)
            continue
        runs = runs_of(piece.slices, lambda part: part.param in idle, piece.tensor.numel())
        parts = [piece] if len(runs) == 1 else _cut_run(piece, runs, optim)
        for run in parts:
            run.rests = run.slices[0].param in idle
        found.extend(parts)
    return found


def _cut_run(run: RunPiece, slices: Sequence[Sequence[Slice]], optim: Optimizer) -> list[RunPiece]:
    starts = itertools.accumulate(map(length_of, slices), initial=0)
    parts = [run.part(start, own) for start, own in zip(starts, slices, strict=False)]
    listed = optim.param_groups[run.group]["params"]
    at = next(at for at, tensor in enumerate(listed) if tensor is run.tensor)
    listed[at : at + 1] = [part.tensor for part in parts]
    state, start = optim.state.pop(run.tensor, {}), 0
    for part in parts:
        if state:
            optim.state[part.tensor] = _state_between(state, run, start, part)
        start += part.tensor.numel()
    return parts


def _state_between(
    state: Mapping[str, Any], run: RunPiece, start: int, part: RunPiece
) -> dict[str, Any]:
    stop = start + part.tensor.numel()
    return {
        name: copied(value[start:stop] if _as_long(value, run) else value)
        for name, value in state.items()
    }


def _as_long(value: Any, run: RunPiece) -> bool:
    return isinstance(value, Tensor) and value.shape == run.tensor.shape


def _index(param: Tensor, indices: Mapping[Tensor, int], others: itertools.count[int]) -> int:
    return indices[param] if param in indices else next(others)
