"""SentTerms: terms that are on their way, as they were when they were sent.

A gradient that was sent may still change inside its shard, and must then be taken back as it was.
Small ones are copied, all of a bucket in one call. A copy of a large one costs nothing until one of
the two is written to, but a few microseconds to make and to forget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from .._torch.tensors import copy_on_write, is_unwritten_copy
from .._transport import KeptFloats
from .sum_places import Summed

_SMALL = 1 << 14  # elements


class _LargeTerm(NamedTuple):
    """A large term."""

    term: Tensor
    copy: Tensor


class _SmallTerms(NamedTuple):
    """Small terms of a bucket, where they lay, and their copies."""

    terms: dict[int, Tensor]
    addresses: list[int]
    kept: KeptFloats


class SentTerms:
    """What was sent of ``tensors``, by their numbers."""

    def __init__(self, tensors: tuple[Summed, ...]) -> None:
        self._tensors = tensors
        self._small: list[_SmallTerms] = []
        self._large: dict[int, _LargeTerm] = {}
        self._spare: list[KeptFloats] = []

    def __bool__(self) -> bool:
        return bool(self._small or self._large)

    def note(self, terms: Mapping[int, Tensor]) -> None:
        """These are sent now."""
        small = {n: term for n, term in terms.items() if self._is_small(n, term)}
        if small:
            kept = self._spare.pop() if self._spare else KeptFloats()
            kept.keep(list(small.values()))
            self._small.append(_SmallTerms(small, list(map(Tensor.data_ptr, small.values())), kept))
        for number, term in terms.items():
            if number not in small:
                self._large[number] = _LargeTerm(term, copy_on_write(term))

    def _is_small(self, number: int, term: Tensor) -> bool:
        of = self._tensors[number]
        return of.numel <= _SMALL and of.is_quick(term)

    def numbers(self) -> set[int]:
        """Which ones were sent."""
        return {*self._large, *(number for row in self._small for number in row.terms)}

    def changed(self, now: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Those that ``now`` are other ones, as they were sent; until the next are noted."""
        found: dict[int, Tensor] = {}
        for row in self._small:
            found.update(self._changed_in(row, now))
        for number, (term, copy) in self._large.items():
            as_sent = is_unwritten_copy(term) or term.equal(copy)
            if now.get(number) is not term or not as_sent:
                found[number] = copy
        return found

    def _changed_in(self, row: _SmallTerms, now: Mapping[int, Tensor]) -> dict[int, Tensor]:
        pairs = zip(row.terms.items(), row.addresses, strict=True)
        gone = [now.get(n) is not term or self._moved(n, term, at) for (n, term), at in pairs]
        terms = list(row.terms.values())
        if any(gone):  # such a one must not be read as if it lay where it did
            copies = row.kept.copies()
            terms = [c if g else t for t, c, g in zip(terms, copies, gone, strict=True)]
        written = row.kept.changed(terms)
        if not any(gone) and not any(written):
            return {}
        kept = zip(row.terms, row.kept.copies(), gone, written, strict=True)
        return {n: self._shaped(n, copy) for n, copy, g, w in kept if g or w}

    def _moved(self, number: int, term: Tensor, address: int) -> bool:
        """Whether the same tensor has other memory, or reads it in another order."""
        of = self._tensors[number]
        return term.data_ptr() != address or not of.is_quick(term) or term.shape != of.like.shape

    def _shaped(self, number: int, flat: Tensor) -> Tensor:
        of = self._tensors[number]
        return flat.as_strided(of.like.shape, of.strides, flat.storage_offset())

    def forget(self) -> None:
        """Nothing is on its way any more."""
        self._spare += [row.kept for row in self._small]
        self._small, self._large = [], {}
