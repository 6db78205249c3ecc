"""Rows: parameters that are cut among the ranks together, and shared together after a step.

A row's parameters have one dtype and one device. After each rank has updated what it owns,
``share`` brings it to every rank with one gather: in place where the parameters live in one buffer
(:class:`Laid`), through a small one otherwise (:class:`Staged`). All ranks call it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..._exchange import copy_all, is_dense, memory_of, move_into
from ...groups import Group
from .pieces import LocalPiece, piece_of
from .stretches import Bounds, Slice, cut_slices, length_of, slices_between

_WINDOW = 1 << 20  # elements of each rank that travel at once when there is no buffer of their own
_WASTE = 1.25  # at most so many times the elements are sent to make ranks' parts equally long

KindOf = Callable[[int], Hashable]  # of a parameter by its index; only equal ones share a run


class Row:
    """What both kinds have in common: who owns what of which parameters."""

    def __init__(
        self, owned: Sequence[Sequence[Slice]], params: Mapping[int, Tensor], group: Group
    ) -> None:
        self.owned = tuple(tuple(slices) for slices in owned)  # by rank
        self.params = dict(params)  # by index
        self.group = group
        self.numel = sum(map(length_of, self.owned))
        self._awake = False

    @property
    def awake(self) -> bool:
        """Whether a step may change any of it; frozen parameters need not travel."""
        if not self._awake and self.numel and self.group.size() > 1:
            some = self.params.values()
            self._awake = any(p.requires_grad or p.grad is not None for p in some)
        return self._awake

    def pieces(self, group_of: Mapping[int, int], kind: KindOf) -> list[LocalPiece]:
        """What this rank's optimizer steps, of the parameters that ``group_of`` knows."""
        return self.pieces_of(self.group.rank(), group_of)

    def pieces_of(self, rank: int, group_of: Mapping[int, int]) -> list[LocalPiece]:
        """What ``rank`` owns, parameter by parameter."""
        return [
            piece_of(self.params[part.param], part, group_of[part.param])
            for part in self.owned[rank]
            if part.param in group_of
        ]

    def share(self) -> None:
        """Bring what each rank owns to all ranks; blocks until it is here."""
        raise NotImplementedError


class Laid(Row):
    """A row whose parameters live one after the other in one flat buffer, cut by ``bounds``.

    Where the ranks' stretches are equally long, ``length`` is how long; what is missing to the last
    ones stands at the end of the buffer. It may be given, for a buffer with more room there.
    """

    def __init__(
        self, bounds: Bounds, params: Mapping[int, Tensor], group: Group, length: int = 0
    ) -> None:
        indices, sizes = list(params), [param.numel() for param in params.values()]
        spans = list(itertools.pairwise(bounds))
        super().__init__([slices_between(indices, sizes, *s) for s in spans], params, group)
        self.bounds = bounds
        longest = max(b - a for a, b in spans)
        even = all(bound == min(r * longest, bounds[-1]) for r, bound in enumerate(bounds))
        self.length = length or (longest if even else 0)
        self._lie_down()

    def _lie_down(self) -> None:
        first = next(iter(self.params.values()))
        room = max(self.length * self.group.size(), self.bounds[-1])
        self.buffer = self.group.allocate(room, first.dtype, first.device)
        self._fill()

    def _fill(self) -> None:
        move_into(list(self.params.values()), self.buffer)
        self._places = [param.data_ptr() for param in self.params.values()]

    def refresh(self) -> None:
        """Take back parameters that were given other memory meanwhile, with what they hold now."""
        if [param.data_ptr() for param in self.params.values()] != self._places:
            self._fill()

    def share(self) -> None:
        if self.length:
            _gather(self.group, self.buffer.split(self.length), self.buffer)
        else:
            parts = [self.buffer[a:b] for a, b in itertools.pairwise(self.bounds)]
            _gather(self.group, parts)


class Staged(Row):
    """A row whose parameters stay where they are and travel through a buffer, part by part."""

    def __init__(
        self, owned: Sequence[Sequence[Slice]], params: Mapping[int, Tensor], group: Group
    ) -> None:
        super().__init__(owned, params, group)
        self._buffer: Tensor | None = None
        self._windows: list[_Window] = []
        self._places: list[int] = []

    def share(self) -> None:
        places = [param.data_ptr() for param in self.params.values()]
        if places != self._places:
            self._windows, self._places = self._cut(), places
        for window in self._windows:
            copy_all(*window.outgoing)
            _gather(self.group, window.parts, window.flat)
            copy_all(*window.incoming)

    def _cut(self) -> list[_Window]:
        longest = max(map(length_of, self.owned))
        return [
            self._window([cut_slices(slices, at, at + _WINDOW) for slices in self.owned])
            for at in range(0, longest, _WINDOW)
        ]

    def _window(self, owned: Sequence[Sequence[Slice]]) -> _Window:
        sizes, ranks = list(map(length_of, owned)), len(owned)
        padded = max(sizes) * ranks <= _WASTE * sum(sizes) + ranks
        rooms = [max(sizes)] * ranks if padded else sizes
        buffer = self._room(sum(rooms))
        parts = list(buffer.split(rooms))
        window = _Window(buffer if padded else None, parts, ([], []), ([], []))
        for rank, slices in enumerate(owned):
            staged = list(parts[rank][: sizes[rank]].split([part.length for part in slices]))
            lying = [self._place(part) for part in slices]
            staged = [flat.view(place.shape) for flat, place in zip(staged, lying, strict=True)]
            if rank == self.group.rank():
                window.outgoing[0].extend(staged)
                window.outgoing[1].extend(lying)
            else:
                window.incoming[0].extend(lying)
                window.incoming[1].extend(staged)
        return window

    def _place(self, part: Slice) -> Tensor:
        """Where it lies; a parameter that is no stretch of memory is never cut."""
        param = self.params[part.param]
        return memory_of(param)[part.start : part.stop] if is_dense(param) else param.detach()

    def _room(self, numel: int) -> Tensor:
        """The one buffer that all windows use, one after the other; the first is the longest."""
        if self._buffer is None:
            first = next(iter(self.params.values()))
            self._buffer = self.group.allocate(numel, first.dtype, first.device)
        return self._buffer[:numel]


@dataclass(frozen=True, eq=False)
class _Window:
    """What travels at once: where it lies in the buffer, and what is copied there and back."""

    flat: Tensor | None  # the whole, if the parts are equally long
    parts: list[Tensor]  # one for each rank
    outgoing: tuple[list[Tensor], list[Tensor]]  # targets, sources
    incoming: tuple[list[Tensor], list[Tensor]]


def _gather(group: Group, parts: Sequence[Tensor], flat: Tensor | None = None) -> None:
    """Bring each rank's part to every rank, in place; ``flat`` is all of them, if equally long."""
    own = parts[group.rank()]
    if flat is not None:
        group.all_gather_single(flat, own)
    else:
        group.all_gather(parts, own)
