"""Order: whether ranks make their calls from the same lines, or have swapped some. Pure.

Two collectives of equal kind and size that one rank calls in another order are swapped without an
error: each engine sees calls that fit together. The lines that made them tell. Different lines
alone are no mistake (one branch for the root, another for the rest); but where a rank also makes at
another time what its peer makes now, the two met in the wrong order, as far as anybody can see.

Calls of unequal size or dtype are an error in engines that check it. NCCL does not: it waits, or
gives numbers that mean nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from . import events
from .account import Told, told
from .verdict import pattern, rank_name, words

ALIKE = frozenset({"all_reduce", "reduce", "broadcast", "barrier"})  # on all ranks
FEW = 3  # swaps that are told of a group
MOST = 512  # kinds of calls, and pairs of them, that are kept for a group


class Made(msgspec.Struct, frozen=True):
    """A kind of call: what was called, and from where."""

    line: str  # train.py:41
    call: str  # all_reduce SUM of float32[4]
    bucket: int = -1
    pattern: str = ""  # what all ranks must have in common, if that is known

    @property
    def same(self) -> tuple[str, str, int]:
        """What is equal on two ranks that do the same; folders may differ between hosts."""
        return os.path.basename(self.line), self.call, self.bucket

    @property
    def place(self) -> tuple[str, int]:
        """Where it was made; from one place ranks may send unequal sizes."""
        return os.path.basename(self.line), self.bucket


class Log(msgspec.Struct, frozen=True):
    """What a rank called: kinds of calls, and for each call its number and which kind it was."""

    kinds: list[Made]
    calls: list[tuple[int, int]]


def log_of(board: events.Board, after: int = 0) -> Log:
    """The collectives that the rank of ``board`` made after number ``after``, if still known."""
    known: dict[Any, int] = {}
    kinds: list[Made] = []
    calls: list[tuple[int, int]] = []
    for entry in list(events.calls):
        if entry.board is not board or entry.sequence <= after or entry.code is None:
            continue
        if entry.purpose in events.ANYWHERE or entry.error:  # which has been told
            continue
        place = (entry.code, entry.lasti, entry.kind, entry.reduction, entry.root, entry.bucket)
        key = (*place, entry.shape, entry.dtype)
        index = known.get(key)
        if index is None:
            index = known[key] = len(kinds)
            kinds.append(made(told(entry)))
        calls.append((entry.sequence, index))
    return Log(kinds, calls)


def log_from(calls: Sequence[Told]) -> Log:
    """The log of a rank, from what it has told of its calls."""
    own = (call for call in calls if call.purpose not in events.ANYWHERE and not call.error)
    lined = [call for call in own if call.sequence and call.line]
    return Log([made(c) for c in lined], [(c.sequence, at) for at, c in enumerate(lined)])


def made(call: Told) -> Made:
    """What kind of call it was."""
    own = repr(pattern(call)) if call.operation in ALIKE else ""
    return Made(call.line, words(call), call.bucket, own)


@dataclass(frozen=True)
class Swap:
    """Two calls of one number that do not belong together."""

    sequence: int
    mine: Made
    theirs: Made

    @property
    def is_unfit(self) -> bool:
        """Whether no engine can make one collective of them."""
        known = self.mine.pattern and self.theirs.pattern
        return bool(known) and self.mine.pattern != self.theirs.pattern


@dataclass(eq=False)
class Pairing:
    """Which calls of two ranks met, since their group was made."""

    checked: bool = True  # the engine refuses calls that do not fit together
    compared: int = 0  # the last call that was looked at
    _mine: set[tuple[str, str, int]] = field(default_factory=set)
    _theirs: set[tuple[str, str, int]] = field(default_factory=set)
    _differing: dict[tuple[str, str], Swap] = field(default_factory=dict)  # by their lines
    _told: set[tuple[str, str]] = field(default_factory=set)

    def compare(self, mine: Log, theirs: Log) -> Swap | None:
        """Take in what both made; returns the first two that were swapped, once for each pair.

        A rank that leaves a call out has every later one beside another: a few tell enough.
        """
        other = dict(theirs.calls)
        for sequence, index in mine.calls:
            if sequence in other and sequence > self.compared:
                self._meet(Swap(sequence, mine.kinds[index], theirs.kinds[other[sequence]]))
                self.compared = sequence
        found = next((swap for swap in self._differing.values() if self._is_wrong(swap)), None)
        if found is None or len(self._told) >= FEW:
            return None
        self._told.add(_lines(found))
        del self._differing[_lines(found)]
        return found

    def _meet(self, pair: Swap) -> None:
        for seen, kind in ((self._mine, pair.mine), (self._theirs, pair.theirs)):
            if len(seen) < MOST:
                seen.add(kind.same)
        differs = pair.mine.place != pair.theirs.place or self._is_unfit(pair)
        if differs and len(self._differing) < MOST:
            lines = _lines(pair)
            if lines not in self._told and lines[::-1] not in self._told:
                known = self._differing.setdefault(lines, pair)
                if self._is_unfit(pair) and not self._is_unfit(known):
                    self._differing[lines] = pair

    def _is_unfit(self, pair: Swap) -> bool:
        return not self.checked and pair.is_unfit

    def _is_wrong(self, pair: Swap) -> bool:
        if _lines(pair)[::-1] in self._told:  # the same two, the other way round
            return False
        if self._is_unfit(pair):
            return True
        return pair.theirs.same in self._mine or pair.mine.same in self._theirs


def _lines(pair: Swap) -> tuple[str, str]:
    return pair.mine.line, pair.theirs.line


def in_words(swap: Swap, board: events.Board, other: int) -> str:
    """What to tell the user; ``other`` is the rank that was compared with."""
    me, them = (rank_name(board.members, rank) for rank in (board.rank, other))
    both = (
        f"{me} called {swap.mine.call} at {swap.mine.line}, {them} called {swap.theirs.call} at "
        f"{swap.theirs.line}"
    )
    if swap.is_unfit and not board.checked:
        return (
            f"call {swap.sequence} of the group {board.name} is not the same on all ranks: {both}. "
            f"{board.backend} does not check this: it waits, or gives wrong numbers. All ranks "
            "must call it with the same reduction, size, dtype and root. Make the group with "
            'checks="strict" to get an error before that.'
        )
    return (
        f"call {swap.sequence} of the group {board.name} was made from different lines: {both}, "
        "and each line is also called at another time. If these are two "
        "different collectives, each got the other's numbers: all ranks must call them in the same "
        'order. Make the group with checks="strict" to get an error before that, or with '
        'checks="off" if it is meant so.'
    )
